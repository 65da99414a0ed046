"""Images decoded and resized once into mapped files: a store that is itself a source.

A store is a directory. Each split has a file of pixels (`train.bin`: height x width x 3 bytes per
image, one after the other) and its index (`train.npz`); `pack.json` is written last.

A store is too large to be read at each opening. So `pack.json` has the checksums of the indexes, an
index has one for each image, and an image is compared with it whenever it is read.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shlex
import warnings
import zipfile
import zlib
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor
from torch.utils.data import Dataset

from meanshift.config.samples import RGB
from meanshift.data.loader import iterate
from meanshift.data.source import Source
from meanshift.data.unreadable import UnreadableSample
from meanshift.runtime import checksum
from meanshift.runtime.checksum import DamagedFile
from meanshift.runtime.files import atomic_writer, exclusive_lock
from meanshift.runtime.progress import progress

_FORMAT = "meanshift pack 2"
_FORMAT_WITHOUT_CHECKSUMS = "meanshift pack 1"
_FINISHED = "pack.json"
_UNFINISHED = "unfinished.json"
_REPAIR = "copy the store again, or delete it and pack again"
_SYNC_BYTES = 16 << 20  # bytes of pixels between two points from which a killed pack continues

Row = list[Any]
"""Height, width and CRC-32 of an image; of an unreadable one 0, 0, its title and the reason."""


class PackedSource(Source):
    """One split of a store; its images are read-only views of the mapped file."""

    def __init__(
        self,
        root: Path,
        split: str,
        *,
        side: int,
        classes: list[str],
        index_checksum: str | None = None,
    ) -> None:
        self.name = str(root)
        self.file = root / f"{split}.bin"
        self.side = side
        self.classes = classes
        index = _read_index(self.file.with_suffix(".npz"), index_checksum)
        self.labels = torch.from_numpy(index["labels"]) if "labels" in index else None
        self.groups = torch.from_numpy(index["groups"]) if "groups" in index else None
        titles = index["titles"].tobytes().decode("utf-8", "surrogateescape")
        self.titles = titles.split("\0")  # which no file name contains
        self.bad: dict[str, list[str]] = json.loads(index["bad"].tobytes())
        self.checksums = index.get("checksums")
        """CRC-32 of each image; None in a store of an earlier version"""
        self.sizes = index["sizes"]
        self.ends = (3 * self.sizes.astype(np.int64).prod(1)).cumsum()
        size = self.file.stat().st_size
        expected = int(self.ends[-1])
        if size != expected:
            raise ValueError(
                f"{self.file}: has {size} bytes, its index needs {expected}; {_REPAIR}"
            )
        self.pixels = _map_file(self.file)

    def __len__(self) -> int:
        return len(self.titles)

    def title(self, index: int) -> str:
        return self.titles[index]

    def read(self, index: int) -> UInt8[Tensor, "3 height width"]:
        height, width = self.sizes[index].tolist()
        if not height:
            raise UnreadableSample(*self.bad[str(index)])
        end = int(self.ends[index])
        start = end - 3 * height * width
        if self.checksums is not None:
            crc = zlib.crc32(self.pixels[start:end].numpy().data)
            if crc != self.checksums[index]:
                damage = f"damaged in {self.file}: differs from its checksum; {_REPAIR}"
                raise UnreadableSample(self.titles[index], damage)
        return self.pixels.as_strided((3, height, width), (1, 3 * width, 3), start)

    def fingerprint(self) -> str:
        """Names can stay the same, so a little of some thousand images is read as well."""
        digest = hashlib.sha256(f"{super().fingerprint()} {self.side}".encode())
        digest.update(self.sizes.tobytes())
        starts = [0, *self.ends.tolist()]
        for index in range(0, len(self), 1 + len(self) // 1000):
            middle = (starts[index] + starts[index + 1]) // 2  # borders are often blank
            content = self.pixels[middle : min(middle + 4096, starts[index + 1])]
            digest.update(content.numpy().tobytes())
        return digest.hexdigest()[:16]

    def content_fingerprint(self) -> str:
        status = self.file.stat()  # too large to be read at each start
        content = f"{self.fingerprint()} {status.st_size} {status.st_mtime_ns}"
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def __getstate__(self) -> dict[str, Any]:
        """All but the pixels, which a worker maps itself."""
        return {name: value for name, value in vars(self).items() if name != "pixels"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, pixels=_map_file(state["file"]))


def read_packed(root: Path) -> dict[str, PackedSource] | None:
    """The splits of a store; None where the directory is none."""
    if metadata := _read_metadata(root / _FINISHED):
        return {
            split: PackedSource(
                root,
                split,
                side=metadata["side"],
                classes=part["classes"],
                index_checksum=metadata.get("indexes", {}).get(split),
            )
            for split, part in metadata["splits"].items()
        }
    if metadata := _read_metadata(root / _UNFINISHED):
        command = shlex.join(["meanshift", "pack", metadata["source"], str(root)])
        raise ValueError(f"{root}: unfinished; type {command} --side {metadata['side']} again")
    return None


def is_finished(root: Path) -> bool:
    """Whether a store is there and complete."""
    return _read_metadata(root / _FINISHED) is not None


def pack(
    sources: Mapping[str, Source], out: Path, *, name: str, side: int = 256, workers: int = 0
) -> dict[str, PackedSource]:
    """Write the images of every split into a store, short sides reduced to `side`, and open it.

    `name` is what a user types for the sources. A pack that was stopped at any point continues
    where it was and ends with the same bytes.
    """
    splits: dict[str, dict[str, Any]] = {
        split: {"classes": source.classes, "contents": source.content_fingerprint()}
        for split, source in sources.items()
    }
    for split, source in sources.items():
        if source.groups is not None:
            splits[split]["groups"] = zlib.crc32(source.groups.numpy().tobytes())
    metadata = {"format": _FORMAT, "side": side, "source": name, "splits": splits}
    try:
        finished = _begin(out, metadata, sources)
        if not finished:
            with exclusive_lock(out / _UNFINISHED, "is packing into it", "another directory"):
                for split, source in sources.items():
                    _pack_split(out / f"{split}.bin", source.with_spec(RGB), side, workers)
                indexes = {split: checksum.compute(out / f"{split}.npz") for split in sources}
                checksum.write_json(out / _FINISHED, {**metadata, "indexes": indexes}, indent=2)
        for leftover in (_UNFINISHED, *(f"{split}.part" for split in sources)):
            (out / leftover).unlink(missing_ok=True)
    except OSError as error:
        raise OSError(
            f"{out}: the store could not be written ({error}); free some space there and type the "
            f"command again: it continues where it stopped"
        ) from error
    store = read_packed(out)
    assert store is not None
    bad = [entry for source in store.values() for entry in source.bad.values()]
    if bad and not finished:
        title, reason = bad[0]
        warnings.warn(
            f"{name}: {len(bad)} of {sum(map(len, sources.values()))} images cannot be read and "
            f"only keep their places, the first is {title} ({reason})",
            stacklevel=2,
        )
    return store


def _refuse_other_samples(source: Source) -> None:
    """Refuse what would not be the same as 8-bit RGB."""
    spec = source.sample_spec
    if not spec.is_bytes or spec.channels not in (1, 3):
        raise ValueError(
            f"{source.name}: {spec.describe()}; a store holds 8-bit RGB images only, so train on "
            f"these as they are (large ones are read fastest from an .npy array)"
        )


def _begin(out: Path, metadata: dict[str, Any], sources: Mapping[str, Source]) -> bool:
    """Begin a new store, or return whether it is finished; refuse what is not this store."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out}: is a file; need a new directory for the store: choose another")
    for file in (_FINISHED, _UNFINISHED):
        if existing := _read_metadata(out / file):
            if existing["side"] != metadata["side"]:
                difference = f"with --side {existing['side']}, now it is {metadata['side']}"
            elif existing["splits"] != metadata["splits"]:
                difference = (
                    f"from other images, labels or groups ({existing['source']} as it was then)"
                )
            else:
                return file == _FINISHED
            raise ValueError(
                f"{out}: was packed {difference}; choose another directory, or delete it"
            )
    if out.exists() and any(not path.name.startswith(".") for path in out.iterdir()):
        raise ValueError(
            f"{out}: has files but no {_FINISHED}, so it is no store; need a new or empty "
            f"directory: choose another"
        )
    for source in sources.values():
        _refuse_other_samples(source)
    out.mkdir(parents=True, exist_ok=True)
    _write(out / _UNFINISHED, json.dumps(metadata).encode())
    return False


def _pack_split(file: Path, source: Source, side: int, workers: int) -> None:
    """Append the images that a file of pixels lacks, then write its index."""
    part = file.with_suffix(".part")
    with file.open("ab") as pixels, part.open("ab") as lines:
        rows, line_bytes, pixel_bytes = _complete_rows(part, file.stat().st_size)
        lines.truncate(line_bytes)
        pixels.truncate(pixel_bytes)
        batches = iterate(
            _ResizedBatches(source, side, start=len(rows)),
            workers=0 if source.uniform else workers,
        )
        pending_lines = b""
        pending_bytes = 0
        bar = progress(f"pack {file.stem}", len(source), unit="img", start=len(rows))
        with closing(batches), bar:
            for content, new_rows in batches:
                rows += new_rows
                pending_lines += b"".join(json.dumps(row).encode() + b"\n" for row in new_rows)
                pending_bytes += pixels.write(content.numpy().data)
                if pending_bytes >= _SYNC_BYTES or len(rows) == len(source):
                    pixels.flush()
                    os.fsync(pixels.fileno())  # a row must never be there without its pixels
                    lines.write(pending_lines)
                    lines.flush()
                    pending_lines = b""
                    pending_bytes = 0
                bar.update(len(new_rows))
    _write_index(file.with_suffix(".npz"), source, rows)


def _write_index(path: Path, source: Source, rows: list[Row]) -> None:
    titles = "\0".join(map(source.title, range(len(source)))).encode("utf-8", "surrogateescape")
    bad = json.dumps({index: row[2:] for index, row in enumerate(rows) if not row[0]}).encode()
    arrays = {
        "sizes": np.array([row[:2] for row in rows], np.int32),
        "checksums": np.array([row[2] if row[0] else 0 for row in rows], np.uint32),
        "titles": np.frombuffer(titles, np.uint8),
        "bad": np.frombuffer(bad, np.uint8),
    }
    if source.labels is not None:
        arrays["labels"] = source.labels.numpy()
    if source.groups is not None:
        arrays["groups"] = source.groups.numpy()
    content = io.BytesIO()
    np.savez(content, **arrays)  # type: ignore[arg-type]
    _write(path, content.getvalue())


def _complete_rows(part: Path, file_size: int) -> tuple[list[Row], int, int]:
    """The rows whose pixels are in the file, and how many bytes they and their pixels take."""
    rows = list[Row]()
    line_bytes = 0
    pixel_bytes = 0
    for line in part.read_bytes().splitlines(keepends=True):
        try:
            row = json.loads(line)
            height, width, _, *_ = row
            end = pixel_bytes + 3 * height * width
        except (ValueError, TypeError):  # cut off, or without a checksum
            break
        if end > file_size or not line.endswith(b"\n"):
            break
        rows.append(row)
        line_bytes += len(line)
        pixel_bytes = end
    return rows, line_bytes, pixel_bytes


class _ResizedBatches(Dataset[tuple[Tensor, list[Row]]]):
    """A few images as one run of bytes, so that a worker's message is one block of memory."""

    def __init__(self, source: Source, side: int, start: int) -> None:
        self.source = source
        self.side = side
        self.batches = torch.arange(start, len(source)).split(8)

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, batch: int) -> tuple[Tensor, list[Row]]:
        rows = list[Row]()
        parts = [torch.empty(0, dtype=torch.uint8)]
        indices = self.batches[batch].tolist()
        self.source.prefetch(indices)
        for index in indices:
            try:
                image = self.source.sample(index)
            except UnreadableSample as error:
                rows.append([0, 0, error.title, error.reason])
                continue
            if min(image.shape[1:]) > self.side:
                from torchvision.transforms.v2 import functional as TF  # slow to import

                image = TF.resize(image, [self.side], antialias=True)
            pixels = image.permute(1, 2, 0).reshape(-1)
            rows.append([*image.shape[1:], zlib.crc32(pixels.numpy().data)])
            parts.append(pixels)
        return torch.cat(parts), rows


def _map_file(file: Path) -> UInt8[Tensor, " bytes"]:
    if not file.stat().st_size:
        return torch.empty(0, dtype=torch.uint8)
    # A copy-on-write map would silence torch's warning, but the system refuses one that is larger
    # than its memory.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(np.memmap(file, np.uint8, "r"))


def _read_index(file: Path, expected: str | None) -> dict[str, np.ndarray]:
    """The arrays of an index, compared with its checksum, or else with those that zip has."""
    try:
        if expected is not None and checksum.compute(file) != expected:
            raise ValueError("its bytes differ from its checksum")
        with np.load(file) as archive:
            return dict(archive)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{file}: damaged ({error}); {_REPAIR}") from None


def _read_metadata(file: Path) -> dict[str, Any] | None:
    """The metadata of a store; None where there is no such file, or it is not ours."""
    try:
        found = checksum.verify(file)
        metadata = json.loads(file.read_text())
    except DamagedFile as error:
        raise ValueError(f"{error.damage}; {_REPAIR}") from None
    except (OSError, ValueError):
        return None
    if not isinstance(metadata, dict):
        return None
    if not str(metadata.get("format")).startswith("meanshift pack "):
        return None
    if metadata["format"] not in (_FORMAT, _FORMAT_WITHOUT_CHECKSUMS):
        raise ValueError(
            f"{file}: has the format {metadata['format']!r}; this version reads {_FORMAT!r}: pack "
            f"again"
        )
    if file.name == _FINISHED and metadata["format"] == _FORMAT and found is None:
        raise ValueError(f"{file}: damaged (its checksum is missing); {_REPAIR}")
    return metadata


def _write(file: Path, content: bytes) -> None:
    with atomic_writer(file) as temporary:
        temporary.write(content)
