"""Small encoded images for the page; the latest ones are cached in memory."""

from __future__ import annotations

import io
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch
from jaxtyping import UInt8
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2 import functional as TF

from meanshift.data import Source
from meanshift.transforms.replay import to_rgb

SIDES = (64, 128, 256, 768)
SHEET_SIDE = 64  # of a thumbnail in a sheet
SHEET_COLUMNS = 8
_EXACT_SIDE = 64  # images up to this side are shown pixel by pixel


class Thumbnails:
    """A cache of encoded images by (source, index, side), of at most `max_bytes` bytes."""

    def __init__(
        self, to_rgb: Callable[[Tensor], Tensor] = to_rgb, *, max_bytes: int = 64 * 2**20
    ) -> None:
        self.to_rgb = to_rgb
        self._max_bytes = max_bytes
        self._bytes = 0
        self._cache: OrderedDict[tuple[str, int, int], tuple[bytes, str]] = OrderedDict()
        self._lock = threading.Lock()
        self.decoding = threading.Lock()
        """one image is decoded at a time: a large one takes hundreds of megabytes"""

    def get(self, name: str, source: Source, index: int, side: int) -> tuple[bytes, str]:
        """An image inside a square of `side` pixels and its media type; or `UnreadableSample`."""
        key = name, index, side
        with self._lock:
            if key in self._cache:
                self._cache.move_to_end(key)
                return self._cache[key]
        with self.decoding:
            encoded = encode(self.to_rgb(source.sample(index)), side)
        with self._lock:
            if key not in self._cache:
                self._cache[key] = encoded
                self._bytes += len(encoded[0])
            while self._bytes > self._max_bytes and len(self._cache) > 1:
                _, (content, _) = self._cache.popitem(last=False)
                self._bytes -= len(content)
        return encoded


def encode(image: UInt8[Tensor, "3 height width"], side: int) -> tuple[bytes, str]:
    """Small images as they are in PNG, others resized to fit the square in JPEG."""
    height, width = image.shape[1:]
    exact = max(height, width) <= _EXACT_SIDE
    if not exact and max(height, width) > side:
        scale = side / max(height, width)
        size = [max(1, round(height * scale)), max(1, round(width * scale))]
        image = TF.resize(image, size, antialias=True)
    pixels = Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())
    buffer = io.BytesIO()
    if exact:
        pixels.save(buffer, "PNG")
        return buffer.getvalue(), "image/png"
    pixels.save(buffer, "JPEG", quality=85)
    return buffer.getvalue(), "image/jpeg"


def encode_sheet(tiles: Sequence[UInt8[Tensor, "side side 3"]]) -> bytes:
    """Squares of one size in lines of `SHEET_COLUMNS`, as one JPEG."""
    lines = math.ceil(len(tiles) / SHEET_COLUMNS)
    padding = [torch.zeros_like(tiles[0])] * (lines * SHEET_COLUMNS - len(tiles))
    squares = torch.stack([*tiles, *padding]).unflatten(0, (lines, SHEET_COLUMNS))
    pixels = squares.permute(0, 2, 1, 3, 4).flatten(2, 3).flatten(0, 1)
    buffer = io.BytesIO()
    Image.fromarray(pixels.contiguous().numpy()).save(buffer, "JPEG", quality=85)
    return buffer.getvalue()
