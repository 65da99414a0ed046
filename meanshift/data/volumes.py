"""Volumes in .npy files: arrays of three axes, of which the first numbers the slices."""

from __future__ import annotations

import math

import numpy as np

from meanshift.data.arrays import read_header
from meanshift.data.convert import torch_dtype
from meanshift.data.file_access import Stream
from meanshift.data.unreadable import UnreadableSample

SUFFIXES = frozenset((".npy",))
_MAX_CHANNELS = 4  # of a first or last axis that numbers channels, not slices


def is_array(file: Stream) -> bool:
    """Whether a file begins as .npy files do."""
    beginning = file.read(6)
    file.seek(0)
    return beginning == b"\x93NUMPY"


def count_axes(file: Stream) -> int:
    """The number of axes of an array."""
    return len(read_header(file)[0])


def count_slices(file: Stream) -> int:
    """The number of slices of a volume; 1 for a single image."""
    shape = read_header(file)[0]
    return shape[0] if _is_volume(shape) else 1


def read_slice(file: Stream, title: str, index: int = 0) -> np.ndarray:
    """The pixels of a slice, or of a single image, channels last."""
    shape, fortran, dtype = read_header(file)
    if dtype.kind not in "buif" or len(shape) not in (2, 3) or 0 in shape:
        raise UnreadableSample(
            title, f"an array of {shape} {dtype}; need numbers, (slices, height, width)"
        )
    if _is_volume(shape) and not fortran:
        size = math.prod(shape[1:]) * dtype.itemsize
        file.seek(index * size, 1)
        values = np.frombuffer(bytearray(file.read(size)), dtype)
        return torch_dtype(values.reshape(*shape[1:], 1))
    file.seek(0)
    values = np.load(file)
    values = values[index] if _is_volume(shape) else values
    if values.ndim == 3 and shape[2] > _MAX_CHANNELS:
        values = values.transpose(1, 2, 0)
    return torch_dtype(values if values.ndim == 3 else values[..., None])


def _is_volume(shape: tuple[int, ...]) -> bool:
    return len(shape) == 3 and min(shape[0], shape[2]) > _MAX_CHANNELS
