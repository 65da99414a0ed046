"""Images of one size in an array: .npy and .npz files, mapped where they can be."""

from __future__ import annotations

import hashlib
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from meanshift.data.source import Source

_KEYS = {  # the usual names of the arrays of images and of labels, by split
    "train": (
        ("x_train", "train_images", "images", "x", "data", "arr_0"),
        ("y_train", "train_labels", "labels", "y", "targets", "arr_1"),
    ),
    "val": (("x_val", "val_images"), ("y_val", "val_labels")),
    "test": (("x_test", "test_images"), ("y_test", "test_labels")),
}


class ArraySource(Source):
    """An array of images: gray (n, h, w), or color with channels last or first; 8 or 16 bits."""

    def __init__(
        self,
        pixels: np.ndarray,
        labels: np.ndarray | None,
        *,
        name: str,
        classes: list[str] | None = None,
    ) -> None:
        self.name = name
        self.pixels = _channels_last(pixels, name)
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
        return f"#{index}"

    def read(self, index: int) -> UInt8[Tensor, "3 height width"]:
        return self.read_batch(torch.tensor([index]))[0].permute(2, 0, 1)

    @property
    def uniform(self) -> bool:
        return True

    def read_batch(self, indices: Int[Tensor, " batch"]) -> UInt8[Tensor, "batch height width 3"]:
        pixels = self.pixels[indices.numpy()]
        if pixels.dtype == np.uint16:
            pixels = (pixels >> 8).astype(np.uint8)
        images = torch.from_numpy(pixels)
        return images.expand(-1, -1, -1, 3) if images.shape[3] == 1 else images

    def content_fingerprint(self) -> str:
        if isinstance(self.pixels, np.memmap) and self.pixels.filename:
            status = Path(self.pixels.filename).stat()  # too large to be read at each start
            content = f"{self.fingerprint()} {status.st_size} {status.st_mtime_ns}"
            return hashlib.sha256(content.encode()).hexdigest()[:16]
        digest = hashlib.blake2b(super().fingerprint().encode() + repr(self.pixels.shape).encode())
        for start in range(0, len(self), 4096):
            digest.update(self.pixels[start : start + 4096].tobytes())
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
    splits = {}
    for split, (image_keys, label_keys) in _KEYS.items():
        image_key = next((key for key in image_keys if key in keys), None)
        label_key = next((key for key in label_keys if key in keys), None)
        if image_key is not None:
            pixels = _try_read(path, _read_member, image_key)
            labels = None if label_key is None else _try_read(path, _read_member, label_key)
            splits[split] = ArraySource(pixels, labels, name=str(path))
    if "train" not in splits:
        raise ValueError(
            f"{path}: found the arrays {', '.join(keys) or 'none'}; need x_train (and y_train, "
            f"x_test, y_test), or images and labels"
        )
    return splits


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
                version = np.lib.format.read_magic(member)
                header = getattr(np.lib.format, f"read_array_header_{version[0]}_0")
                shape, fortran, dtype = header(member)
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


def _channels_last(pixels: np.ndarray, name: str) -> np.ndarray:
    if pixels.dtype not in (np.uint8, np.uint16):
        raise ValueError(
            f"{name}: pixels of type {pixels.dtype}; need uint8 (or uint16): for values in 0..1 "
            f"save (x * 255).astype('uint8')"
        )
    if pixels.ndim == 3:
        pixels = pixels[..., None]
    if pixels.ndim == 4 and pixels.shape[3] not in (1, 3) and pixels.shape[1] in (1, 3):
        pixels = pixels.transpose(0, 2, 3, 1)
    if pixels.ndim != 4 or pixels.shape[3] not in (1, 3) or 0 in pixels.shape:
        raise ValueError(
            f"{name}: an array of shape {pixels.shape}; need (n, height, width), with 1 or 3 "
            f"channels last or second"
        )
    return pixels
