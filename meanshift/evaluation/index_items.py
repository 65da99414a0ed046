"""The items of an index: names, ids, labels and embeddings in parts of one Parquet table.

A part is a file of some thousand rows, so that a build can be continued, and rows anywhere in the
table are read without the others: a part has small row groups. DuckDB, pandas and pyarrow read all
parts as one table.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from meanshift.data import UnreadableSample
from meanshift.evaluation.embed import NOTE, EmbeddedSplit, write_parquet
from meanshift.runtime import checksum
from meanshift.runtime.checksum import DamagedFile
from meanshift.runtime.files import atomic_writer

PART_IMAGES = 16_384
"""images of one part; their embeddings are in memory at a time"""
ROW_GROUP = 1024
"""rows that are read at a time to get one of them"""


@dataclass(frozen=True)
class Item:
    """An image of an index."""

    file: str
    """its name, as `embed` writes it"""
    id: int
    """its index in its split"""
    split: str
    label: str | None


@dataclass(frozen=True)
class Part:
    """One file of the table: its size and checksum show damage."""

    name: str
    rows: int
    size: int
    crc32: str
    bad: dict[int, UnreadableSample] = field(default_factory=dict)
    """images that have no row, by their index in the split"""


def write_part(path: Path, split: EmbeddedSplit, bad: Mapping[int, UnreadableSample]) -> None:
    """Write the embeddings of some images, completely or not at all."""
    note = json.dumps({index: [error.title, error.reason] for index, error in bad.items()})
    with atomic_writer(path) as file:
        write_parquet(file, [split], row_group=ROW_GROUP, note=note)


def read_part(path: Path) -> Part:
    """What the file of a part holds; raises `DamagedFile`."""
    import pyarrow as pa
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            rows = file.metadata.num_rows
            note = json.loads(file.schema_arrow.metadata[NOTE.encode()])
    except (pa.ArrowException, OSError, KeyError, TypeError, ValueError) as error:
        raise DamagedFile(path, str(error)) from None
    return Part(
        name=path.name,
        rows=rows,
        size=path.stat().st_size,
        crc32=checksum.compute(path),
        bad={int(index): UnreadableSample(*error) for index, error in note.items()},
    )


class Items:
    """The rows of all parts, numbered from 0."""

    def __init__(self, folder: Path, parts: Sequence[Part], dim: int) -> None:
        self.folder = folder
        self.parts = list(parts)
        self.dim = dim
        self._ends = np.cumsum([part.rows for part in parts])
        self._verified = set[str]()

    def __len__(self) -> int:
        return int(self._ends[-1]) if self.parts else 0

    def check_sizes(self) -> None:
        """Raise an error if a file is missing or has another size; reads no content."""
        for part in self.parts:
            path = self.folder / part.name
            if not path.is_file():
                raise DamagedFile(path, "the file is missing")
            if path.stat().st_size != part.size:
                raise DamagedFile(path, f"has {path.stat().st_size} bytes, need {part.size}")

    def chunks(self) -> Iterator[tuple[int, Float[np.ndarray, "n dim"]]]:
        """The number of the first row of each part, and its embeddings."""
        first = 0
        for part in self.parts:
            if part.rows:
                with self._open(part) as file:
                    yield first, _embeddings(file.read(columns=["embedding"]), self.dim)
            first += part.rows

    def embeddings(self, rows: Int[np.ndarray, " n"]) -> Float[np.ndarray, "n dim"]:
        """The embeddings of some rows."""
        values = np.empty((len(rows), self.dim), np.float32)
        for positions, table in self._tables(rows, ["embedding"]):
            values[positions] = _embeddings(table, self.dim)
        return values

    def items(self, rows: Int[np.ndarray, " n"]) -> list[Item]:
        """The images of some rows."""
        columns = ["file", "id", "split", "label"]
        found: dict[int, Item] = {}
        for positions, table in self._tables(rows, columns):
            for position, values in zip(positions.tolist(), table.to_pylist(), strict=True):
                found[position] = Item(**values)
        return [found[position] for position in range(len(rows))]

    def _tables(
        self, rows: Int[np.ndarray, " n"], columns: Sequence[str]
    ) -> Iterator[tuple[Int[np.ndarray, " m"], Any]]:
        """Positions in `rows`, and a table of these rows: one for each row group that has some."""
        part_of_row = np.searchsorted(self._ends, rows, side="right")
        for number in np.unique(part_of_row).tolist():
            part = self.parts[number]
            first = int(self._ends[number]) - part.rows
            inside = rows - first
            with self._open(part) as file:
                groups = np.where(part_of_row == number, inside // ROW_GROUP, -1)
                for group in np.unique(groups[groups >= 0]).tolist():
                    positions = (groups == group).nonzero()[0]
                    table = file.read_row_group(group, columns=columns, use_threads=False)
                    yield positions, table.take(inside[positions] % ROW_GROUP)

    def _open(self, part: Part) -> Any:
        """The file of a part, whose checksum is compared when it is first opened."""
        from pyarrow import parquet

        path = self.folder / part.name
        try:
            if part.name not in self._verified and checksum.compute(path) != part.crc32:
                raise DamagedFile(path, "its bytes differ from its checksum")
        except FileNotFoundError:
            raise DamagedFile(path, "the file is missing") from None
        self._verified.add(part.name)
        return parquet.ParquetFile(path)


def _embeddings(table: Any, dim: int) -> Float[np.ndarray, "n dim"]:
    column = table.column("embedding").combine_chunks()
    values: np.ndarray = (
        column.flatten().to_numpy(zero_copy_only=False, writable=True).reshape(-1, dim)
    )
    return values
