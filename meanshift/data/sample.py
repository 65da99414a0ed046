"""Images shipped inside the package: a balanced subset of CIFAR-10 (see sample/README.md)."""

from __future__ import annotations

import functools
from importlib import resources

import numpy as np
from PIL import Image

from meanshift.data.arrays import ArraySource

SIDE = 32
"""pixels of a tile's side"""
TRAIN = 1000
"""tiles of each sheet that are for training; the rest is for testing"""


def read_sample() -> dict[str, ArraySource]:
    """10,000 training images and 2,000 test images, from one sheet of tiles per class."""
    return {
        split: ArraySource(pixels, labels, name="sample", classes=classes)
        for split, (pixels, labels, classes) in _decode().items()
    }


@functools.cache
def _decode() -> dict[str, tuple[np.ndarray, np.ndarray, list[str]]]:
    """Pixels, labels and class names of each split; a command often opens the sample again."""
    folder = resources.files("meanshift.data") / "sample"
    sheets = sorted((f for f in folder.iterdir() if f.name.endswith(".jpg")), key=lambda f: f.name)
    classes = [sheet.name.removesuffix(".jpg") for sheet in sheets]
    tiles = []
    for sheet in sheets:
        with sheet.open("rb") as file:
            tiles.append(split_tiles(np.asarray(Image.open(file).convert("RGB"))))

    def split(part: slice) -> tuple[np.ndarray, np.ndarray, list[str]]:
        labels = np.repeat(np.arange(len(tiles)), len(tiles[0][part]))
        pixels = np.concatenate([class_tiles[part] for class_tiles in tiles])
        return pixels, labels, classes

    return {"train": split(slice(0, TRAIN)), "test": split(slice(TRAIN, None))}


def split_tiles(sheet: np.ndarray) -> np.ndarray:
    """Split a sheet of square tiles into an array of images, row by row."""
    rows = sheet.shape[0] // SIDE
    columns = sheet.shape[1] // SIDE
    tiles = sheet.reshape(rows, SIDE, columns, SIDE, 3).swapaxes(1, 2)
    return np.ascontiguousarray(tiles.reshape(-1, SIDE, SIDE, 3))
