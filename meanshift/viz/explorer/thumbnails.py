"""Images as the page shows them: small, encoded once, the latest kept in memory."""

from __future__ import annotations

import io
import threading
from collections import OrderedDict

from jaxtyping import UInt8
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2 import functional as TF

from meanshift.data import Source

SIDES = (64, 128, 256, 768)
_EXACT = 64  # images up to this side are shown pixel by pixel


class Thumbnails:
    """Encoded images by (part, index, side), as many as fit into `room` bytes."""

    def __init__(self, *, room: int = 64 * 2**20) -> None:
        self._room, self._held = room, 0
        self._kept: OrderedDict[tuple[str, int, int], tuple[bytes, str]] = OrderedDict()
        self._lock = threading.Lock()
        self.decoding = threading.Lock()
        """One image is decoded at a time: a large one takes hundreds of megabytes."""

    def of(self, part: str, source: Source, index: int, side: int) -> tuple[bytes, str]:
        """An image inside a square of `side` pixels, and its media type; may be `Unreadable`."""
        key = part, index, side
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        with self.decoding:
            made = encode(source.read(index), side)
        with self._lock:
            if key not in self._kept:
                self._kept[key] = made
                self._held += len(made[0])
            while self._held > self._room and len(self._kept) > 1:
                self._held -= len(self._kept.popitem(last=False)[1][0])
        return made


def encode(image: UInt8[Tensor, "3 height width"], side: int) -> tuple[bytes, str]:
    """Small images as they are in PNG, others made to fit in JPEG."""
    height, width = image.shape[1:]
    exact = max(height, width) <= _EXACT
    if not exact and max(height, width) > side:
        shrink = side / max(height, width)
        fitting = [max(1, round(height * shrink)), max(1, round(width * shrink))]
        image = TF.resize(image, fitting, antialias=True)
    held = io.BytesIO()
    shown = Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())
    shown.save(held, "PNG") if exact else shown.save(held, "JPEG", quality=85)
    return held.getvalue(), "image/png" if exact else "image/jpeg"
