"""Tiny folders in the layout of Pascal VOC."""

import numpy as np
from PIL import Image

COLORS = {"lime": (40, 210, 30), "plum": (210, 30, 160)}


def write_voc(root, train=6, test=3, *, sides=(26, 44), suffix=".jpg"):
    """Write images with one solid rectangle each, lime and plum in turn, on gray noise."""
    random = np.random.default_rng(0)
    folder = root / "VOC2007"
    for part in ("ImageSets/Main", "JPEGImages", "Annotations"):
        (folder / part).mkdir(parents=True)
    for split, count, first in (("trainval", train, 0), ("test", test, 100)):
        names = [f"{first + index:06d}" for index in range(count)]
        (folder / f"ImageSets/Main/{split}.txt").write_text("\n".join(names) + "\n")
        for index, name in enumerate(names):
            height, width = random.integers(64, 97, 2)
            pixels = random.integers(90, 166, (height, width, 3), dtype=np.uint8)
            box_height, box_width = random.integers(*sides, 2)
            top = random.integers(0, height - box_height)
            left = random.integers(0, width - box_width)
            label = sorted(COLORS)[index % 2]
            pixels[top : top + box_height, left : left + box_width] = COLORS[label]
            Image.fromarray(pixels).save(folder / f"JPEGImages/{name}{suffix}", quality=95)
            corners = (left + 1, top + 1, left + box_width, top + box_height)
            sides_of_box = zip(("xmin", "ymin", "xmax", "ymax"), corners, strict=True)
            box = "".join(f"<{side}>{value}</{side}>" for side, value in sides_of_box)
            (folder / f"Annotations/{name}.xml").write_text(
                f"<annotation><object><name>{label}</name><bndbox>{box}</bndbox></object>"
                f"</annotation>"
            )
    return root


def truncate_images(root, *names):
    """Cut files short behind their header, so that only decoding them fails."""
    for name in names:
        file = root / f"VOC2007/JPEGImages/{name}.jpg"
        file.write_bytes(file.read_bytes()[:900])
