"""Features on the disk: extracted once, then memory-mapped.

A file is named after the weights, the images and the evaluation transform, so features of other
weights, images or transforms are never read by mistake.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import warnings
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from meanshift.config import SampleSpec
from meanshift.data import Source, UnreadableSample
from meanshift.models.features import BATCH_SIZE, feature_batches, warn_unreadable
from meanshift.runtime import checksum, distributed
from meanshift.runtime.checksum import DamagedFile
from meanshift.runtime.files import atomic_writer
from meanshift.transforms.eval import TRANSFORM_VERSION, needs_no_resize, rank_batches

FORMAT = 3
"""version of the files; files of other versions are ignored and written again"""

_HEADER_BYTES = 128


def cached_features(
    network: nn.Module,
    source: Source,
    *,
    weights: str,
    folder: Path,
    image_size: int,
    resize: int = 0,
    bicubic: bool = False,
    device: torch.device,
    precision: torch.dtype = torch.float32,
    workers: int = 0,
) -> tuple[Float[Tensor, "readable features"], Int[Tensor, " readable"]]:
    """Return features from a file in `folder`, extracted into it if necessary, and their indices.

    `weights` is the fingerprint of the network. The rows are memory-mapped, so a million images
    need not fit into memory. Unreadable images have no row and are named in a warning.
    """
    if not len(source):
        raise ValueError(f"{source.name}: no images")
    if needs_no_resize(
        source, image_size, resize
    ):  # these settings then change nothing: share the file
        resize = 0
        bicubic = False
    transform: dict[str, Any] = {"image_size": image_size, "resize": resize, "bicubic": bicubic}
    file = _feature_file(source, weights, folder, transform, precision)
    cached = file.open(len(source))
    (missing,) = distributed.all_max(int(cached is None))
    if missing:
        unreadable: dict[int, UnreadableSample] = {}
        batches = feature_batches(
            network,
            source,
            **transform,
            device=device,
            precision=precision,
            workers=workers,
            bad=unreadable,
            show_progress=True,
        )
        with closing(batches):  # restores the network's modes, also after an error
            file.write(batches, source, unreadable)
        cached = file.open(len(source))
        if cached is None:
            raise ValueError(f"{folder}: need a folder on a disk that all processes share (--out)")
    assert cached is not None
    features, bad = cached
    if bad:
        warn_unreadable(source, bad, "are left out")
    return features, _indices_without(bad, len(source))


def store_features(
    features: Float[Tensor, "n features"],
    source: Source,
    *,
    weights: str,
    folder: Path,
    image_size: int,
) -> None:
    """Write features that `extract_features` gave in float32, so that `cached_features` finds them.

    None of the images may be unreadable, as in arrays.
    """
    transform = {"image_size": image_size, "resize": 0, "bicubic": False}
    file = _feature_file(source, weights, folder, transform, torch.float32)
    batches = (features[indices] for indices in rank_batches(len(source), BATCH_SIZE))
    file.write(batches, source, {})


def _feature_file(
    source: Source,
    weights: str,
    folder: Path,
    transform: Mapping[str, Any],
    precision: torch.dtype,
) -> _FeatureFile:
    key = {
        "format": FORMAT,
        "weights": weights,
        "images": source.content_fingerprint(),
        **transform,
        "precision": str(precision),
        "transform": TRANSFORM_VERSION,
    }
    if source.sample_spec != SampleSpec():
        key["samples"] = repr(source.sample_spec)
    return _FeatureFile(folder, key)


class _FeatureFile:
    """Rows of float32 in NAME.npy, and the key and the unreadable images in NAME.json.

    The .json file is written last and deleted first: a .npy file without it is not complete. It has
    the checksum of the rows, which are read once to compare them: every protocol reads them all.
    """

    def __init__(self, folder: Path, key: Mapping[str, Any]) -> None:
        name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
        self.key = key
        self.path = folder / f"{name}.npy"
        self.metadata_path = folder / f"{name}.json"

    def open(self, size: int) -> tuple[Tensor, dict[int, UnreadableSample]] | None:
        """Map the rows of `size` images, and list unreadable ones; None without a valid file."""
        try:
            metadata = checksum.read_json(self.metadata_path)
            bad = {
                int(index): UnreadableSample(title, reason)
                for index, (title, reason) in metadata["bad"].items()
            }
            rows_checksum = checksum.compute(self.path)
            if rows_checksum != metadata["rows"]:
                raise DamagedFile(self.path, "its bytes differ from its checksum")
            rows = torch.from_numpy(np.lib.format.open_memmap(self.path, mode="c"))
            if not self.key.items() <= metadata.items() or len(rows) + len(bad) != size:
                raise DamagedFile(self.path, "it has the features of something else")
        except FileNotFoundError:
            return None
        except DamagedFile as error:
            warnings.warn(f"{error.damage}; the features are extracted again", stacklevel=3)
            return None
        return rows, bad

    def write(
        self, batches: Iterable[Tensor], source: Source, unreadable: dict[int, UnreadableSample]
    ) -> None:
        """Write this process's batches; rows of unreadable images are left out."""
        try:
            bad = self._write_rows(batches, rank_batches(len(source), BATCH_SIZE), unreadable)
            with distributed.fail_together():
                if distributed.rank() == 0:
                    titles = {index: [error.title, error.reason] for index, error in bad.items()}
                    metadata = {
                        **self.key,
                        "source": source.name,
                        "rows": checksum.compute(self.path),
                        "bad": titles,
                    }
                    checksum.write_json(self.metadata_path, metadata, indent=2)
        except OSError as error:
            raise OSError(
                f"{self.path}: the features could not be written ({error}); make room, or choose "
                f"another place with --out, and type the command again"
            ) from error

    def _write_rows(
        self,
        batches: Iterable[Tensor],
        indices: Iterable[Tensor],
        unreadable: dict[int, UnreadableSample],
    ) -> dict[int, UnreadableSample]:
        """Write all rows and return the unreadable images of all processes.

        Each process but the first writes to a file of its own; the first one appends these files.
        """
        rank = distributed.rank()
        parts = [
            self.path.with_name(f".{self.path.name}.{other}")
            for other in range(distributed.world_size())
        ]
        with ExitStack() as stack:
            try:
                with distributed.fail_together():
                    self.path.parent.mkdir(parents=True, exist_ok=True)
                    if rank == 0:
                        self.metadata_path.unlink(missing_ok=True)
                        file = stack.enter_context(atomic_writer(self.path, shared=True))
                        file.write(bytes(_HEADER_BYTES))  # replaced when the shape is known
                        shape = _append_rows(file, batches, indices, unreadable)
                    else:
                        with parts[rank].open("wb") as part:
                            shape = _append_rows(part, batches, indices, unreadable)
                shapes = distributed.all_gather_list([shape])
                bad = dict(distributed.all_gather_list(list(unreadable.items())))
                with distributed.fail_together():
                    count = sum(rows for rows, _ in shapes)
                    _check_any_readable(count, bad)
                    if rank == 0:
                        for path in parts[1:]:
                            with path.open("rb") as part:
                                shutil.copyfileobj(part, file)
                        file.seek(0)
                        file.write(_npy_header(count, max(width for _, width in shapes)))
            finally:
                parts[rank].unlink(missing_ok=True)
        return bad


def _append_rows(
    file: BinaryIO,
    batches: Iterable[Tensor],
    indices: Iterable[Tensor],
    unreadable: Mapping[int, UnreadableSample],
) -> tuple[int, int]:
    """Append the rows of readable images to a file; return how many there are and their width."""
    count = width = 0
    for rows, batch_indices in zip(batches, indices, strict=True):
        first = int(batch_indices[0])
        gaps = [index - first for index in unreadable if 0 <= index - first < len(rows)]
        readable = rows[_indices_without(gaps, len(rows))] if gaps else rows
        file.write(readable.numpy().tobytes())
        count += len(readable)
        width = rows.shape[1]
    return count, width


def _npy_header(count: int, width: int) -> bytes:
    header = io.BytesIO()
    description = {"descr": "<f4", "fortran_order": False, "shape": (count, width)}
    np.lib.format.write_array_header_1_0(header, description)
    assert len(header.getvalue()) == _HEADER_BYTES
    return header.getvalue()


def _check_any_readable(count: int, bad: Mapping[int, UnreadableSample]) -> None:
    if not count:
        first = bad[min(bad)]
        raise ValueError(
            f"none of the {len(bad)} images can be read, the first is {first.title} "
            f"({first.reason})"
        )


def _indices_without(excluded: Iterable[int], size: int) -> Int[Tensor, " readable"]:
    included = torch.ones(size, dtype=torch.bool)
    included[list(excluded)] = False
    return included.nonzero()[:, 0]
