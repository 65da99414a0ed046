"""Embeddings of any images in a file that other programs read: .npz or .parquet."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from meanshift.data import Source, open_source
from meanshift.models.feature_cache import cached_features
from meanshift.models.view_whitening import without_whitening
from meanshift.models.weights import Weights, fingerprint, writable_dir
from meanshift.runtime import distributed
from meanshift.runtime.device import pick_device, pick_precision
from meanshift.runtime.extras import require
from meanshift.runtime.files import atomic_writer

NOTE = "meanshift"
"""key of a note in the metadata of a Parquet file"""
_ROWS = 16_384
"""rows that are written at a time"""


@dataclass(frozen=True)
class EmbeddedSplit:
    """The embeddings of one split of a source."""

    name: str
    source: Source
    embeddings: Float[Tensor, "n features"]
    ids: Int[Tensor, " n"]
    """index in the source of each readable image"""


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

    The id of an image is its index in its split; an unreadable one has no row and is named in a
    warning. The embedding is the output of the backbone, or with `projector` of the projector.
    """
    if out.suffix not in (".npz", ".parquet"):
        raise ValueError(f"{out}: need a name that ends in .npz or .parquet")
    if out.suffix == ".parquet":
        require("pyarrow", extra="parquet", what="Parquet files")
    network: nn.Module = weights.backbone
    if projector:
        if weights.projector is None:
            raise ValueError(f"{weights.title}: has no projector; use the output of the backbone")
        network = nn.Sequential(without_whitening(weights.backbone), weights.projector)
    torch_device = pick_device(device)
    folder = writable_dir(weights.output_dir) / "features"
    splits = []
    for name, split in open_source(source, labels=labels).items():
        embeddings, ids = cached_features(
            network.to(torch_device),
            weights.adapted(split),
            weights=fingerprint(network),
            folder=folder,
            image_size=image_size or weights.image_size,
            resize=resize,
            device=torch_device,
            precision=pick_precision(precision, torch_device),
            workers=workers,
        )
        splits.append(EmbeddedSplit(name, split, embeddings, ids))
    with distributed.fail_together():
        if distributed.rank() == 0:
            _write(out, splits)
    return sum(len(split.ids) for split in splits), splits[0].embeddings.shape[1]


def _write(out: Path, splits: list[EmbeddedSplit]) -> None:
    """Write all splits to one file."""
    write_file = _write_npz if out.suffix == ".npz" else write_parquet
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        with atomic_writer(out) as file:
            write_file(file, splits)
    except OSError as error:
        raise OSError(f"{out}: could not be written ({error}); make room and try again") from error


def _columns(splits: list[EmbeddedSplit]) -> Iterator[tuple[dict[str, list[Any]], Tensor]]:
    """The columns and the embeddings of some thousand images at a time."""
    for split in splits:
        source = split.source
        for ids, rows in zip(split.ids.split(_ROWS), split.embeddings.split(_ROWS), strict=True):
            numbers = [-1] * len(ids) if source.labels is None else source.labels[ids].tolist()
            titles = [source.title(int(index)) for index in ids]
            columns = {
                "file": [title.encode(errors="backslashreplace").decode() for title in titles],
                "id": ids.tolist(),
                "split": [split.name] * len(ids),
                "label": [source.classes[label] if label >= 0 else None for label in numbers],
            }
            yield columns, rows


def _write_npz(file: BinaryIO, splits: list[EmbeddedSplit]) -> None:
    columns: dict[str, list[Any]] = {"file": [], "id": [], "split": [], "label": []}
    for part, _ in _columns(splits):
        for name, values in part.items():
            columns[name] += ["" if value is None else value for value in values]
    arrays = {name: np.array(values) for name, values in columns.items()}
    if len(splits) == 1:
        arrays["embedding"] = splits[0].embeddings.numpy()
    else:
        arrays["embedding"] = torch.cat([split.embeddings for split in splits]).numpy()
    with zipfile.ZipFile(file, "w") as archive:  # `np.savez` cannot store an array named `file`
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def write_parquet(
    file: BinaryIO, splits: list[EmbeddedSplit], *, row_group: int = _ROWS, note: str = ""
) -> None:
    """Write names, ids, splits, labels and embeddings, with a note in the metadata of the file."""
    import pyarrow as pa
    from pyarrow import parquet

    width = splits[0].embeddings.shape[1]
    schema = pa.schema(
        [
            ("file", pa.string()),
            ("id", pa.int64()),
            ("split", pa.string()),
            ("label", pa.string()),
            ("embedding", pa.list_(pa.float32(), width)),
        ],
        metadata={NOTE: note} if note else None,
    )
    with parquet.ParquetWriter(file, schema, use_dictionary=["split", "label"]) as writer:
        for columns, rows in _columns(splits):
            flat = pa.array(rows.contiguous().numpy().reshape(-1))
            embedding = pa.FixedSizeListArray.from_arrays(flat, width)
            arrays = [pa.array(columns[name], schema.field(name).type) for name in columns]
            table = pa.Table.from_arrays([*arrays, embedding], schema=schema)
            writer.write_table(table, row_group_size=row_group)
