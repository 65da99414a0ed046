"""One image file to RGB bytes, whatever its mode, depth or orientation."""

from __future__ import annotations

import io
import re
import warnings
from pathlib import Path

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image, ImageOps
from torch import Tensor

from meanshift.data.file_access import DiskTimeout, open_regular
from meanshift.data.source import UnreadableSample

SUFFIXES = frozenset(
    ".jpg .jpeg .jpe .jfif .png .bmp .gif .tif .tiff .webp .ppm .pgm .pbm .pnm".split()
)


def read_image(
    file: Path | io.BytesIO, *, title: str = "", formats: tuple[str, ...] | None = None
) -> UInt8[Tensor, "3 height width"]:
    """Decode a file; any error becomes `UnreadableSample` with its reason.

    `formats` are Pillow's names of the formats to try, for files from untrusted people.
    """
    title = title or str(file)
    try:
        with warnings.catch_warnings():
            # The warning of a bomb too: filters belong to the process, so another thread may have
            # changed them; `_refuse_bomb` checks by itself.
            warnings.filterwarnings("ignore", category=UserWarning)
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            opened = open_regular(file) if isinstance(file, Path) else file
            with Image.open(opened, formats=formats) as image:
                _refuse_bomb(image, title)
                pixels = np.array(to_rgb(ImageOps.exif_transpose(image)))
    except (UnreadableSample, DiskTimeout):
        raise
    except Image.DecompressionBombError as bomb:
        raise UnreadableSample(title, str(bomb)) from None
    except Exception as error:  # decoders raise anything from OSError to struct.error
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        reason = re.sub(r" <_io\.\w+.*?>", "", reason)  # its address in memory differs every time
        raise UnreadableSample(title, f"{type(error).__name__}: {reason}") from None
    return torch.from_numpy(pixels).permute(2, 0, 1)


def _refuse_bomb(image: Image.Image, title: str) -> None:
    """Refuse an image that would fill the memory, by its header alone."""
    width, height = image.size
    limit = Image.MAX_IMAGE_PIXELS
    if limit is not None and width * height > limit:
        raise UnreadableSample(
            title,
            f"{width} x {height} pixels, more than the limit of {limit} (it could be a "
            f"decompression bomb)",
        )


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert any mode to RGB: 16-bit gray is scaled, not clipped; transparency becomes white."""
    if image.mode.startswith("I"):  # 16-bit gray; Pillow's own conversion would clip at 255
        gray = np.asarray(image)
        if gray.itemsize > 2 and (gray.min() < 0 or gray.max() > 65535):
            raise ValueError("32-bit image beyond the 16-bit range: scale it to 0..65535")
        return Image.fromarray((gray >> 8).astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise ValueError("floating-point image of unknown range: save it with 8 or 16 bits")
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    return image.convert("RGB")
