"""Vectors in a Parquet file: a column of lists, or every column of numbers."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np

from meanshift.data.arrays import ArraySource, split_vectors
from meanshift.runtime.errors import Note
from meanshift.runtime.extras import require

_LABELS = ("label", "labels", "target", "class", "y")
_NO_VALUES = {*_LABELS, "split", "file", "id", "__index_level_0__"}  # the last is pandas's index
_EMBEDDINGS = ("embedding", "embeddings", "features", "vector", "x")


def read_vectors(path: Path) -> dict[str, ArraySource]:
    """The vectors of a file; a column `label` has their classes, `split` their splits."""
    require("pyarrow", extra="parquet", what=f"{path}: Parquet files")
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not a readable Parquet file ({error})") from None
    columns = {
        name: table.column(name).to_numpy()
        for name in (*_LABELS, "split", "file")
        if name in table.column_names
    }
    label = next((columns[name] for name in _LABELS if name in columns), None)
    return split_vectors(
        _vectors(table, path),
        name=str(path),
        labels=label,
        splits=columns.get("split"),
        titles=columns.get("file"),
    )


def _vectors(table: Any, path: Path) -> np.ndarray:
    import pyarrow as pa

    lists = [
        field.name
        for field in table.schema
        if pa.types.is_list(field.type) or pa.types.is_fixed_size_list(field.type)
    ]
    chosen = next((name for name in (*_EMBEDDINGS, *lists) if name in lists), None)
    if chosen is not None:
        rows = table.column(chosen).to_pylist()
        if len({None if row is None else len(row) for row in rows}) != 1 or rows[0] is None:
            raise ValueError(f"{path}: the lists of `{chosen}` differ in length; need one length")
        try:
            return np.asarray(rows, np.float32)
        except (TypeError, ValueError):
            raise ValueError(f"{path}: the lists of `{chosen}` are not numbers") from None
    is_number = (pa.types.is_floating, pa.types.is_integer, pa.types.is_boolean)
    columns = {field.name: field.type for field in table.schema if field.name not in _NO_VALUES}
    numbers = [name for name, kind in columns.items() if any(test(kind) for test in is_number)]
    if not numbers:
        raise ValueError(f"{path}: has no column of numbers or of lists; need some to learn from")
    others = [name for name in columns if name not in numbers]
    if others:
        note = f"{path}: {len(others)} columns are not numbers and left out: {', '.join(others)}"
        warnings.warn(note, Note, stacklevel=4)
    floats = [table.column(name).cast(pa.float32(), safe=False) for name in numbers]
    return np.stack([column.to_numpy() for column in floats], 1)
