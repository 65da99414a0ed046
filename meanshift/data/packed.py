"""Images decoded and shrunk once into mapped files: a store that is itself a source.

A store is a directory. Each split has a file of pixels (`train.bin`: height x width x 3 bytes a
image, one after the other) and its index (`train.npz`); `pack.json` is written last.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shlex
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms.v2 import functional as TF

from meanshift.data.loader import ignore_signals, iterate
from meanshift.data.source import Source, UnreadableSample
from meanshift.runtime.progress import progress
from meanshift.runtime.run_directory import atomic_writer, exclusive_lock

_FORMAT = "meanshift pack 1"
_FINISHED, _UNFINISHED = "pack.json", "unfinished.json"
_SETTLED = 16 << 20  # bytes of pixels between two moments at which a killed pack can go on

Row = list[Any]
"""Height and width of an image; of an unreadable one 0, 0, its title and the reason."""


class PackedSource(Source):
    """One split of a store; its images are views of the mapped file and cannot be written to."""

    def __init__(self, root: Path, split: str, *, side: int, classes: list[str]) -> None:
        self.name, self.file = str(root), root / f"{split}.bin"
        self.side, self.classes = side, classes
        with np.load(self.file.with_suffix(".npz")) as index:
            held: dict[str, np.ndarray] = dict(index)
        self.labels = torch.from_numpy(held["labels"]) if "labels" in held else None
        titles = held["titles"].tobytes().decode("utf-8", "surrogateescape")
        self.titles = titles.split("\0")  # which no file's name can hold
        self.bad: dict[str, list[str]] = json.loads(held["bad"].tobytes())
        self.sizes = held["sizes"]
        self.ends = (3 * self.sizes.astype(np.int64).prod(1)).cumsum()
        there, needed = self.file.stat().st_size, int(self.ends[-1])
        if there != needed:
            raise ValueError(
                f"{self.file}: has {there} bytes, its index needs {needed}; copy the store again, "
                f"or delete it and pack anew"
            )
        self.pixels = _mapped(self.file)

    def __len__(self) -> int:
        return len(self.titles)

    def title(self, index: int) -> str:
        return self.titles[index]

    def read(self, index: int) -> UInt8[Tensor, "3 height width"]:
        height, width = self.sizes[index].tolist()
        if not height:
            raise UnreadableSample(*self.bad[str(index)])
        start = int(self.ends[index]) - 3 * height * width
        return self.pixels.as_strided((3, height, width), (1, 3 * width, 3), start)

    def fingerprint(self) -> str:
        """Names can stay the same: a little of some thousand images is read as well."""
        digest = hashlib.sha256(f"{super().fingerprint()} {self.side}".encode())
        digest.update(self.sizes.tobytes())
        starts = [0, *self.ends.tolist()]
        for index in range(0, len(self), 1 + len(self) // 1000):
            middle = (starts[index] + starts[index + 1]) // 2  # borders are often blank
            some = self.pixels[middle : min(middle + 4096, starts[index + 1])]
            digest.update(some.numpy().tobytes())
        return digest.hexdigest()[:16]

    def contents(self) -> str:
        told = self.file.stat()  # too large to be read at each start
        sizes = f"{self.fingerprint()} {told.st_size} {told.st_mtime_ns}"
        return hashlib.sha256(sizes.encode()).hexdigest()[:16]

    def __getstate__(self) -> dict[str, Any]:
        """All but the pixels, which a worker maps itself."""
        return {name: held for name, held in vars(self).items() if name != "pixels"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, pixels=_mapped(state["file"]))


def read_packed(root: Path) -> dict[str, PackedSource] | None:
    """The splits of a store; None where the directory is none."""
    if told := _told(root / _FINISHED):
        return {
            split: PackedSource(root, split, side=told["side"], classes=more["classes"])
            for split, more in told["splits"].items()
        }
    if told := _told(root / _UNFINISHED):
        again = shlex.join(["meanshift", "pack", told["source"], str(root)])
        raise ValueError(f"{root}: unfinished; type {again} --side {told['side']} again")
    return None


def is_finished(root: Path) -> bool:
    """Whether a store is there and complete."""
    return _told(root / _FINISHED) is not None


def pack(
    sources: Mapping[str, Source], out: Path, *, name: str, side: int = 256, workers: int = 0
) -> dict[str, PackedSource]:
    """Write the images of every split into a store, short sides shrunk to `side`, and open it.

    `name` is what a user types for the sources. A pack that was stopped at any moment goes on where
    it was and ends with the same bytes.
    """
    splits = {
        split: {"classes": source.classes, "contents": source.contents()}
        for split, source in sources.items()
    }
    wanted = {"format": _FORMAT, "side": side, "source": name, "splits": splits}
    try:
        finished = _begin(out, wanted)
        if not finished:
            with exclusive_lock(out / _UNFINISHED, "is packing into it", "another directory"):
                for split, source in sources.items():
                    _fill(out / f"{split}.bin", source, side, workers)
                _write(out / _FINISHED, json.dumps(wanted, indent=2).encode() + b"\n")
        for left in (_UNFINISHED, *(f"{split}.part" for split in sources)):
            (out / left).unlink(missing_ok=True)
    except OSError as error:
        raise OSError(
            f"{out}: the store could not be written ({error}); make room there and type the "
            f"command again: it goes on where it stopped"
        ) from error
    store = read_packed(out)
    assert store is not None
    bad = [why for source in store.values() for why in source.bad.values()]
    if bad and not finished:
        warnings.warn(
            f"{name}: {len(bad)} of {sum(map(len, sources.values()))} images cannot be read and "
            f"only keep their places, the first is {bad[0][0]} ({bad[0][1]})",
            stacklevel=2,
        )
    return store


def _begin(out: Path, wanted: dict[str, Any]) -> bool:
    """Whether the store is finished; a new one is begun, and what is not this one is refused."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out}: is a file; need a new directory for the store: choose another")
    for file in (_FINISHED, _UNFINISHED):
        if there := _told(out / file):
            if there["side"] != wanted["side"]:
                what = f"with --side {there['side']}, now it is {wanted['side']}"
            elif there["splits"] != wanted["splits"]:
                what = f"from other images or labels ({there['source']} as it was then)"
            else:
                return file == _FINISHED
            raise ValueError(f"{out}: was packed {what}; choose another directory, or delete it")
    if out.exists() and any(not held.name.startswith(".") for held in out.iterdir()):
        raise ValueError(
            f"{out}: holds files but no {_FINISHED}, so it is no store; need a new or empty "
            f"directory: choose another"
        )
    out.mkdir(parents=True, exist_ok=True)
    _write(out / _UNFINISHED, json.dumps(wanted).encode())
    return False


def _fill(file: Path, source: Source, side: int, workers: int) -> None:
    """Append the images that a file of pixels lacks, then write its index."""
    part, waiting, unsettled = file.with_suffix(".part"), b"", 0
    with file.open("ab") as pixels, part.open("ab") as lines:
        rows, told, used = _settled(part, file.stat().st_size)
        lines.truncate(told)
        pixels.truncate(used)
        loader = DataLoader(
            _Shrunk(source, side, start=len(rows)),
            batch_size=None,
            num_workers=0 if source.uniform else workers,
            worker_init_fn=ignore_signals,
            generator=torch.Generator(),  # its base seed must not come from the global generator
        )
        with progress(f"pack {file.stem}", len(source), unit="pic", start=len(rows)) as bar:
            for content, more in iterate(loader):
                rows += more
                waiting += b"".join(json.dumps(row).encode() + b"\n" for row in more)
                unsettled += pixels.write(content.numpy().data)
                if unsettled >= _SETTLED or len(rows) == len(source):
                    pixels.flush()
                    os.fsync(pixels.fileno())  # a row must never be there without its pixels
                    lines.write(waiting)
                    lines.flush()
                    waiting, unsettled = b"", 0
                bar.update(len(more))
    titles = "\0".join(map(source.title, range(len(source)))).encode("utf-8", "surrogateescape")
    bad = json.dumps({index: row[2:] for index, row in enumerate(rows) if row[2:]}).encode()
    arrays = {
        "sizes": np.array([row[:2] for row in rows], np.int32),
        "titles": np.frombuffer(titles, np.uint8),
        "bad": np.frombuffer(bad, np.uint8),
    }
    if source.labels is not None:
        arrays["labels"] = source.labels.numpy()
    index = io.BytesIO()
    np.savez(index, **arrays)  # type: ignore[arg-type]
    _write(file.with_suffix(".npz"), index.getvalue())


def _settled(part: Path, room: int) -> tuple[list[Row], int, int]:
    """The rows whose pixels are there, and how many bytes they and their pixels take."""
    rows, told, used = list[Row](), 0, 0
    for line in part.read_bytes().splitlines(keepends=True):
        try:
            row = json.loads(line)
            end = used + 3 * row[0] * row[1]
        except (ValueError, TypeError, IndexError):  # cut off
            break
        if end > room or not line.endswith(b"\n"):
            break
        rows.append(row)
        told, used = told + len(line), end
    return rows, told, used


class _Shrunk(Dataset[tuple[Tensor, list[Row]]]):
    """A few images as one run of bytes, so that a worker's message is one block of memory."""

    def __init__(self, source: Source, side: int, start: int) -> None:
        self.source, self.side = source, side
        self.batches = torch.arange(start, len(source)).split(8)

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, batch: int) -> tuple[Tensor, list[Row]]:
        rows, parts = list[Row](), [torch.empty(0, dtype=torch.uint8)]
        for index in self.batches[batch].tolist():
            try:
                image = self.source.read(index)
            except UnreadableSample as error:
                rows.append([0, 0, error.title, error.why])
                continue
            if min(image.shape[1:]) > self.side:
                image = TF.resize(image, [self.side], antialias=True)
            rows.append([*image.shape[1:]])
            parts.append(image.permute(1, 2, 0).reshape(-1))
        return torch.cat(parts), rows


def _mapped(file: Path) -> UInt8[Tensor, " bytes"]:
    if not file.stat().st_size:
        return torch.empty(0, dtype=torch.uint8)
    # Not copy-on-write, which would silence torch's warning: the system refuses to map more than
    # its memory so.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(np.memmap(file, np.uint8, "r"))


def _told(file: Path) -> dict[str, Any] | None:
    """What a store says of itself; None where there is no such file, or it is somebody else's."""
    try:
        told = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(told, dict) or not str(told.get("format")).startswith("meanshift pack "):
        return None
    if told["format"] != _FORMAT:
        raise ValueError(
            f"{file}: of the format {told['format']!r}; this version reads {_FORMAT!r}: pack anew"
        )
    return told


def _write(file: Path, content: bytes) -> None:
    with atomic_writer(file) as beside:
        beside.write(content)
