"""One image file to RGB bytes, whatever its mode, depth or orientation."""

from __future__ import annotations

import io
import warnings
from pathlib import Path

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image, ImageOps
from torch import Tensor

from meanshift.data.source import UnreadableSample

SUFFIXES = frozenset(
    ".jpg .jpeg .jpe .jfif .png .bmp .gif .tif .tiff .webp .ppm .pgm .pbm .pnm".split()
)


def read_image(
    file: Path | io.BytesIO, *, title: str = "", formats: tuple[str, ...] | None = None
) -> UInt8[Tensor, "3 height width"]:
    """Decode a file; anything that goes wrong becomes `Unreadable` with its reason.

    `formats` are Pillow's names of those to try, for files that strangers give.
    """
    title = title or str(file)
    try:
        with warnings.catch_warnings():
            # Of a bomb as well: filters are the whole process's, so a thread cannot trust them.
            warnings.filterwarnings("ignore", category=UserWarning)
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with Image.open(file, formats=formats) as image:
                _refuse_bomb(image, title)
                pixels = np.array(to_rgb(ImageOps.exif_transpose(image)))
    except UnreadableSample:
        raise
    except Image.DecompressionBombError as bomb:
        raise UnreadableSample(title, str(bomb)) from None
    except Exception as error:  # decoders raise anything from OSError to struct.error
        why = f"{type(error).__name__}: {error}"
        if isinstance(file, io.BytesIO):  # its place in memory would make each run's words differ
            why = why.replace(repr(file), repr(title))
        raise UnreadableSample(title, why) from None
    return torch.from_numpy(pixels).permute(2, 0, 1)


def _refuse_bomb(image: Image.Image, title: str) -> None:
    """Refuse an image that would fill the memory, by its header alone."""
    width, height = image.size
    most = Image.MAX_IMAGE_PIXELS
    if most is not None and width * height > most:
        raise UnreadableSample(
            title,
            f"{width} x {height} pixels, more than the {most} that are decoded (it could be a "
            f"decompression bomb)",
        )


def to_rgb(image: Image.Image) -> Image.Image:
    """Any mode to RGB: deep grays are scaled and not clipped, transparency lies on white."""
    if image.mode.startswith("I"):  # 16-bit gray; Pillow's own conversion would clip at 255
        deep = np.asarray(image)
        if deep.itemsize > 2 and (deep.min() < 0 or deep.max() > 65535):
            raise ValueError("32-bit image beyond the 16-bit range: scale it to 0..65535")
        return Image.fromarray((deep >> 8).astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise ValueError("floating-point image of unknown range: save it with 8 or 16 bits")
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    return image.convert("RGB")
