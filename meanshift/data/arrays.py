"""Images of one size in an array: .npy and .npz files, mapped where they can be."""

from __future__ import annotations

import hashlib
import io
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from meanshift.config.samples import Kind
from meanshift.data.convert import torch_dtype
from meanshift.data.source import Source

_KEYS = {  # the usual names of the arrays of images and of labels, by split
    "train": (
        ("x_train", "train_images", "images", "signals", "x", "data", "arr_0"),
        ("y_train", "train_labels", "labels", "y", "targets", "arr_1"),
    ),
    "val": (("x_val", "val_images", "signals_val"), ("y_val", "val_labels")),
    "test": (("x_test", "test_images", "signals_test"), ("y_test", "test_labels")),
}


class ArraySource(Source):
    """An array of samples, of any type of number.

    Images are gray (n, h, w), or have their channels last or first; vectors are (n, columns);
    signals are (n, channels, time) or (n, time), and are named as such.
    """

    def __init__(
        self,
        pixels: np.ndarray,
        labels: np.ndarray | None,
        *,
        name: str,
        classes: list[str] | None = None,
        kind: Kind | None = None,
        titles: Sequence[str] | None = None,
    ) -> None:
        self.name = name
        self.titles = titles
        self.kind = kind or ("vector" if pixels.ndim == 2 else "image")
        self.pixels = _channels_last(pixels, name, self.kind)
        self.labels = None
        if labels is not None:
            array = np.asarray(labels)
            one_each = array.shape[:1] == (len(pixels),) and array.size == len(pixels)
            if not one_each or array.dtype.kind not in "iu":
                raise ValueError(
                    f"{name}: labels of shape {array.shape} and type {array.dtype} for "
                    f"{len(pixels)} images; need one integer per image"
                )
            # Below 0 is unknown, also -100, which torch's losses ignore.
            self.labels = torch.from_numpy(array.reshape(-1).astype(np.int64)).clamp(min=-1)
        count = 0 if self.labels is None or not len(self.labels) else int(self.labels.max()) + 1
        if count > 1_000_000:
            raise ValueError(
                f"{name}: a label is {count - 1}, and there are {len(pixels)} images; need "
                f"classes numbered from 0: np.unique(labels, return_inverse=True)[1]"
            )
        self.classes = classes or [str(i) for i in range(count)]

    def __len__(self) -> int:
        return len(self.pixels)

    def title(self, index: int) -> str:
        return f"#{index}" if self.titles is None else str(self.titles[index])

    def read(self, index: int) -> Shaped[Tensor, "channels *size"]:
        return self.read_batch(torch.tensor([index]))[0].movedim(-1, 0)

    @property
    def uniform(self) -> bool:
        return True

    def read_batch(self, indices: Int[Tensor, " batch"]) -> Shaped[Tensor, "batch *size channels"]:
        return torch.from_numpy(torch_dtype(self.pixels[indices.numpy()]))

    def content_fingerprint(self) -> str:
        if isinstance(self.pixels, np.memmap) and self.pixels.filename:
            status = Path(self.pixels.filename).stat()  # too large to be read at each start
            content = f"{self.fingerprint()} {status.st_size} {status.st_mtime_ns}"
            return hashlib.sha256(content.encode()).hexdigest()[:16]
        digest = hashlib.blake2b(super().fingerprint().encode() + repr(self.pixels.shape).encode())
        for start in range(0, len(self), 4096):
            digest.update(np.ascontiguousarray(self.pixels[start : start + 4096]).data)
        return digest.hexdigest()[:16]

    def fingerprint(self) -> str:
        """Titles are only numbers, so some thousand images over the array are read as well."""
        digest = hashlib.sha256(super().fingerprint().encode() + repr(self.pixels.shape).encode())
        digest.update(np.ascontiguousarray(self.pixels[:: 1 + len(self) // 1000]).tobytes())
        return digest.hexdigest()[:16]


def read_arrays(path: Path) -> dict[str, ArraySource]:
    """The splits of an .npz file, or the one array of an .npy file."""
    if path.suffix == ".npy":
        return {"train": ArraySource(_try_read(path, _map_npy), None, name=str(path))}
    keys = _try_read(path, _keys)
    if "embedding" in keys:  # written by `meanshift embed`
        columns = {key: _try_read(path, _read_member, key) for key in keys}
        return split_vectors(
            columns["embedding"],
            name=str(path),
            labels=columns.get("label"),
            splits=columns.get("split"),
            titles=columns.get("file"),
        )
    splits = {}
    for split, (image_keys, label_keys) in _KEYS.items():
        image_key = next((key for key in image_keys if key in keys), None)
        label_key = next((key for key in label_keys if key in keys), None)
        if image_key is not None:
            pixels = _try_read(path, _read_member, image_key)
            labels = None if label_key is None else _try_read(path, _read_member, label_key)
            kind: Kind | None = "signal" if image_key.startswith("signals") else None
            splits[split] = ArraySource(pixels, labels, name=str(path), kind=kind)
    if "train" not in splits:
        raise ValueError(
            f"{path}: found the arrays {', '.join(keys) or 'none'}; need x_train (and y_train, "
            f"x_test, y_test), images and labels, or signals and labels"
        )
    return splits


def split_vectors(
    vectors: np.ndarray,
    *,
    name: str,
    labels: np.ndarray | None,
    splits: np.ndarray | None,
    titles: np.ndarray | None,
) -> dict[str, ArraySource]:
    """The splits of vectors that stand one below the other, train first; labels may be texts."""
    numbers, classes = (None, None) if labels is None else _number_classes(np.asarray(labels))
    split_of = np.full(len(vectors), "train") if splits is None else np.asarray(splits).astype(str)
    if "train" not in split_of:
        raise ValueError(f"{name}: no row of its column `split` is `train`; need some to train on")
    parts = {}
    for split in sorted(set(split_of.tolist()), key=lambda split: (split != "train", split)):
        rows = split_of == split
        parts[split] = ArraySource(
            vectors[rows],
            None if numbers is None else numbers[rows],
            name=name,
            classes=classes,
            titles=None if titles is None else np.asarray(titles)[rows].tolist(),
        )
    return parts


def _number_classes(values: np.ndarray) -> tuple[np.ndarray | None, list[str] | None]:
    """Labels as numbers, and the names of the classes; missing ones are -1."""
    if values.dtype.kind in "iu":
        return values, None
    texts = np.array(["" if value is None or value != value else str(value) for value in values])
    names = sorted(set(texts.tolist()) - {""})
    number = {name: index for index, name in enumerate(names)}
    return (np.array([number.get(text, -1) for text in texts]), names) if names else (None, None)


def _try_read(path: Path, read: Callable[..., Any], *args: str) -> Any:
    """Call `read`; the many errors of a damaged file become one that names it."""
    try:
        return read(path, *args)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{path}: not a readable {path.suffix} file ({error})") from None


def _map_npy(path: Path) -> np.ndarray:
    return np.lib.format.open_memmap(path, mode="r")


def _keys(path: Path) -> list[str]:
    with zipfile.ZipFile(path) as archive:
        return [name.removesuffix(".npy") for name in archive.namelist()]


def _read_member(path: Path, key: str) -> np.ndarray:
    """One array of an .npz, mapped into memory when it is stored uncompressed."""
    with zipfile.ZipFile(path) as archive:
        entry = archive.getinfo(f"{key}.npy")
        if entry.compress_type == zipfile.ZIP_STORED:
            with archive.open(entry) as member, path.open("rb") as file:
                shape, fortran, dtype = read_header(member)
                # A member's bytes follow its local header, which has two lengths at offset 26.
                file.seek(entry.header_offset + 26)
                name_length, extra_length = np.frombuffer(file.read(4), "<u2").tolist()
                data = entry.header_offset + 30 + name_length + extra_length
                offset = data + member.tell()
            if not dtype.hasobject and not fortran:
                return np.memmap(path, dtype, "r", offset, shape)
    with np.load(path) as loaded:
        array: np.ndarray = loaded[key]
        return array


def read_header(
    file: IO[bytes] | io.BufferedIOBase,
) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, order and type of the array of an .npy file; its values follow in the file."""
    major, _ = np.lib.format.read_magic(file)
    formats = np.lib.format
    read = formats.read_array_header_1_0 if major == 1 else formats.read_array_header_2_0
    return read(file)


def _channels_last(pixels: np.ndarray, name: str, kind: Kind) -> np.ndarray:
    """Samples with their channels last: of images an axis of 1 or 3, else the shorter one."""
    if pixels.dtype.kind not in "buif":
        raise ValueError(
            f"{name}: pixels of type {pixels.dtype}; need numbers, as x.astype('float32')"
        )
    if kind == "vector" and 0 not in pixels.shape:
        return pixels
    if kind == "signal" and pixels.ndim in (2, 3) and 0 not in pixels.shape:
        return pixels[..., None] if pixels.ndim == 2 else pixels.transpose(0, 2, 1)
    if pixels.ndim == 3:
        pixels = pixels[..., None]
    if pixels.ndim != 4 or 0 in pixels.shape:
        raise ValueError(
            f"{name}: an array of shape {pixels.shape}; need images (n, height, width) or with a "
            f"fourth axis of channels, last or second, or vectors (n, columns)"
        )
    second, last = (pixels.shape[axis] in (1, 3) for axis in (1, 3))
    if not last and (second or pixels.shape[1] < pixels.shape[3]):
        pixels = pixels.transpose(0, 2, 3, 1)
    return pixels
