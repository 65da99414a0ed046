"""Make the sheets of `meanshift/data/sample` from the complete CIFAR-10.

usage: python tools/make_sample.py CIFAR10.npz    (x_train, y_train, x_test, y_test; uint8, NHWC)

One sheet a class: its first 1,000 training images, then its first 200 test images, 40 a row.
JPEG blocks of 8x8 do not cross the borders of 32x32 tiles, so no image bleeds into its neighbor.
"""

import sys
from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = "airplane automobile bird cat deer dog frog horse ship truck".split()
TRAIN, TEST, COLUMNS, QUALITY = 1000, 200, 40, 90


def main(path: str) -> None:
    out = Path(__file__).parent.parent / "meanshift" / "data" / "sample"
    with np.load(path) as data:
        for label, name in enumerate(CLASSES):
            train = data["x_train"][data["y_train"] == label][:TRAIN]
            test = data["x_test"][data["y_test"] == label][:TEST]
            tiles = np.concatenate([train, test])
            sheet = (
                tiles.reshape(-1, COLUMNS, 32, 32, 3).swapaxes(1, 2).reshape(-1, COLUMNS * 32, 3)
            )
            Image.fromarray(sheet).save(
                out / f"{name}.jpg", quality=QUALITY, subsampling=0, optimize=True
            )


if __name__ == "__main__":
    main(sys.argv[1])
