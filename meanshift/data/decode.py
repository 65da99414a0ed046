"""One image file to a tensor, whatever its mode, depth or orientation."""

from __future__ import annotations

import io
import re
import warnings
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Shaped
from PIL import Image, ImageOps
from torch import Tensor

from meanshift.data import dicom, tiff, volumes
from meanshift.data.convert import mark_alpha, torch_dtype
from meanshift.data.file_access import DiskTimeout, Stream, open_regular
from meanshift.data.remote_folder import RemotePath
from meanshift.data.unreadable import UnreadableSample, refuse_bomb

SUFFIXES = frozenset(
    ".jpg .jpeg .jpe .jfif .png .bmp .gif .tif .tiff .webp .ppm .pgm .pbm .pnm .dcm .dicom".split()
)


def read_image(
    file: Path | RemotePath | io.BytesIO,
    *,
    title: str = "",
    formats: tuple[str, ...] | None = None,
    page: int = 0,
) -> Shaped[Tensor, "channels height width"]:
    """Decode a file as it is stored: 1 to N channels of bytes, integers or floats.

    Any error becomes `UnreadableSample` with its reason. `formats` are Pillow's names of the
    formats to try, for files from untrusted people. `page` is that of a file of several images.
    """
    title = title or str(file)
    try:
        with warnings.catch_warnings():
            # The warning of a bomb too: filters belong to the process, so another thread may have
            # changed them; `refuse_bomb` checks by itself.
            warnings.filterwarnings("ignore", category=UserWarning)
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            warnings.filterwarnings("ignore", "The image decoding", DeprecationWarning)
            opened = file if isinstance(file, io.BytesIO) else open_regular(file)
            pixels, alpha = _decode(opened, title, formats, page)
    except (UnreadableSample, DiskTimeout):
        raise
    except Image.DecompressionBombError as bomb:
        raise UnreadableSample(title, str(bomb)) from None
    except Exception as error:  # decoders raise anything from OSError to struct.error
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        reason = re.sub(r" <_io\.\w+.*?>", "", reason)  # its address in memory differs every time
        raise UnreadableSample(title, f"{type(error).__name__}: {reason}") from None
    return as_channels_first(pixels, alpha=alpha)


def _decode(
    file: Stream, title: str, formats: tuple[str, ...] | None, page: int
) -> tuple[np.ndarray, bool]:
    """The pixels of a file, channels last, and whether the last one is alpha."""
    if formats is None and dicom.is_dicom(file):
        return dicom.read_frame(file, title, page), False
    if formats is None and tiff.needs_tifffile(file):
        return tiff.read_page(file, title, page), False
    if formats is None and volumes.is_array(file):
        return volumes.read_slice(file, title, page), False
    with Image.open(file, formats=formats) as image:
        if page:
            image.seek(page)
        refuse_bomb(*image.size, title)
        if image.format == "PNG" and image.mode != "I;16" and _has_16_bits(file):
            return _decode_deep_png(file)
        ImageOps.exif_transpose(image, in_place=True)
        return to_array(image)


def _decode_deep_png(file: Stream) -> tuple[np.ndarray, bool]:
    """Colors of 16 bits, which Pillow would reduce to 8."""
    from torchvision.io import ImageReadMode, decode_image  # deprecated: needed by nothing else

    file.seek(0)
    content = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)
    deep = decode_image(content, mode=ImageReadMode.UNCHANGED).to(torch.int32)
    return deep.permute(1, 2, 0).numpy(), len(deep) in (2, 4)


def _has_16_bits(file: Stream) -> bool:
    """Whether the header of a PNG file says 16 bits."""
    position = file.tell()
    file.seek(24)
    depth = file.read(1)
    file.seek(position)
    return depth == b"\x10"


def to_array(image: Image.Image) -> tuple[np.ndarray, bool]:
    """The pixels of an opened image, channels last, and whether the last one is alpha.

    Gray stays gray and 16 bits stay 16 bits; palettes, CMYK and the like become RGB.
    """
    is_gray = image.mode in ("1", "L", "La", "LA")
    is_deep = image.mode == "F" or image.mode.startswith("I")
    alpha = image.has_transparency_data and not is_deep
    if is_deep:
        pixels = torch_dtype(np.array(image))
    else:
        mode = ("L" if is_gray else "RGB") + ("A" if alpha else "")
        pixels = np.array(image if image.mode == mode else image.convert(mode))
    return pixels[..., None] if pixels.ndim == 2 else pixels, alpha


def as_channels_first(
    pixels: np.ndarray, *, alpha: bool
) -> Shaped[Tensor, "channels height width"]:
    """Pixels as a tensor, marked where the last channel is alpha."""
    image = torch.from_numpy(pixels).permute(2, 0, 1)
    return mark_alpha(image) if alpha else image
