"""Embeddings of any images in a file that other programs read: .npz or .parquet."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from meanshift.data import Source, open_source
from meanshift.models.features import cached_features
from meanshift.models.weights import Weights, fingerprint
from meanshift.runtime import distributed
from meanshift.runtime.device import pick_device, pick_precision
from meanshift.runtime.run_directory import atomic_writer

_ROWS = 16_384  # written at a time


def embed(
    weights: Weights,
    source: str,
    out: Path,
    *,
    projector: bool = False,
    labels: Path | None = None,
    image_size: int = 0,
    resize: int = 0,
    workers: int = 0,
    device: str = "auto",
    precision: str = "float32",
) -> tuple[int, int]:
    """Write names, ids, splits, labels and embeddings of all images: (images, dimensions).

    An image's id is its place in its split; an unreadable one has no row and is named in a
    warning. The embedding is the backbone's, or the projector's where that is asked for.
    """
    if out.suffix not in (".npz", ".parquet"):
        raise ValueError(f"{out}: need a name that ends in .npz or .parquet")
    network: nn.Module = weights.backbone
    if projector:
        if weights.projector is None:
            raise ValueError(f"{weights.title}: no projector known here; use the backbone's output")
        network = nn.Sequential(weights.backbone, weights.projector)
    where = pick_device(device)
    parts = []
    for split, part in open_source(source, labels=labels).items():
        features, kept = cached_features(
            network.to(where),
            part,
            weights=fingerprint(network),
            folder=weights.home / "features",
            image_size=image_size or weights.image_size,
            resize=resize,
            device=where,
            precision=pick_precision(precision, where),
            workers=workers,
        )
        parts.append((split, part, features, kept))
    with distributed.fail_together():
        if distributed.rank() == 0:
            _write(out, parts)
    return sum(len(kept) for *_, kept in parts), parts[0][2].shape[1]


_Part = tuple[str, Source, Tensor, Tensor]


def _write(out: Path, parts: list[_Part]) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        with atomic_writer(out) as file:
            (_write_npz if out.suffix == ".npz" else _write_parquet)(file, parts)
    except OSError as error:
        raise OSError(f"{out}: could not be written ({error}); make room and try again") from error


def _columns(parts: list[_Part]) -> Iterator[tuple[dict[str, Any], Tensor]]:
    """What is said of each image, and its row, some thousands at a time."""
    for split, source, features, kept in parts:
        labels = torch.full((len(source),), -1) if source.labels is None else source.labels
        for ids, rows in zip(kept.split(_ROWS), features.split(_ROWS), strict=True):
            told = [int(label) for label in labels[ids]]
            titles = [source.title(int(index)) for index in ids]
            yield (
                {
                    "file": [title.encode(errors="backslashreplace").decode() for title in titles],
                    "id": ids.tolist(),
                    "split": [split] * len(ids),
                    "label": [source.classes[label] if label >= 0 else None for label in told],
                },
                rows,
            )


def _write_npz(file: Any, parts: list[_Part]) -> None:
    columns: dict[str, list[Any]] = {"file": [], "id": [], "split": [], "label": []}
    for told, _ in _columns(parts):
        for name, values in told.items():
            columns[name] += [value if value is not None else "" for value in values]
    whole = parts[0][2] if len(parts) == 1 else torch.cat([features for _, _, features, _ in parts])
    arrays = {name: np.array(values) for name, values in columns.items()}
    with zipfile.ZipFile(file, "w") as archive:  # `np.savez` can keep nothing by the name `file`
        for name, array in [*arrays.items(), ("embedding", whole.numpy())]:
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def _write_parquet(file: Any, parts: list[_Part]) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    width = parts[0][2].shape[1]
    schema = pa.schema(
        [
            ("file", pa.string()),
            ("id", pa.int64()),
            ("split", pa.string()),
            ("label", pa.string()),
            ("embedding", pa.list_(pa.float32(), width)),
        ]
    )
    with parquet.ParquetWriter(file, schema) as writer:
        for told, rows in _columns(parts):
            flat = pa.array(rows.contiguous().numpy().reshape(-1))
            embedding = pa.FixedSizeListArray.from_arrays(flat, width)
            arrays = [pa.array(told[name], schema.field(name).type) for name in told]
            writer.write_table(pa.Table.from_arrays([*arrays, embedding], schema=schema))
