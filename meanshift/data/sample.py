"""Images shipped inside the package: a balanced cut of CIFAR-10 (see sample/README.md)."""

from __future__ import annotations

from importlib import resources

import numpy as np
from PIL import Image

from meanshift.data.arrays import ArraySource

SIDE, TRAIN = (
    32,
    1000,
)  # pixels of a tile; tiles of each sheet that are for training, the rest is held out


def read_sample() -> dict[str, ArraySource]:
    """10,000 images to train on and 2,000 to judge with, from one sheet of tiles a class."""
    folder = resources.files("meanshift.data") / "sample"
    sheets = sorted((f for f in folder.iterdir() if f.name.endswith(".jpg")), key=lambda f: f.name)
    classes, tiles = [], []
    for sheet in sheets:
        with sheet.open("rb") as file:
            tiles.append(cut_tiles(np.asarray(Image.open(file).convert("RGB"))))
        classes.append(sheet.name.removesuffix(".jpg"))

    def split(part: slice) -> ArraySource:
        labels = np.repeat(np.arange(len(tiles)), len(tiles[0][part]))
        return ArraySource(
            np.concatenate([t[part] for t in tiles]), labels, name="sample", classes=classes
        )

    return {"train": split(slice(0, TRAIN)), "test": split(slice(TRAIN, None))}


def cut_tiles(sheet: np.ndarray) -> np.ndarray:
    """A sheet of square tiles to an array of images, row by row."""
    rows, columns = sheet.shape[0] // SIDE, sheet.shape[1] // SIDE
    tiles = sheet.reshape(rows, SIDE, columns, SIDE, 3).swapaxes(1, 2)
    return np.ascontiguousarray(tiles.reshape(-1, SIDE, SIDE, 3))
