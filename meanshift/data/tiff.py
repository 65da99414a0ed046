"""TIFF files that Pillow cannot read as they are: many bands, or colors of more than 8 bits."""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image, ImageSequence
from PIL import TiffImagePlugin as tags

from meanshift.data.convert import torch_dtype
from meanshift.data.file_access import Stream
from meanshift.data.unreadable import UnreadableSample, refuse_bomb
from meanshift.runtime.extras import require

SUFFIXES = frozenset((".tif", ".tiff"))
_BEGINNINGS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_ALPHA = (1, 2)  # ExtraSamples: 0 is an unspecified band
_SEPARATED = 5  # PhotometricInterpretation of CMYK


def needs_tifffile(file: Stream) -> bool:
    """Whether a file is a TIFF whose bands or depth Pillow would drop or refuse."""
    beginning = file.read(4)
    file.seek(0)
    if beginning not in _BEGINNINGS:
        return False
    if beginning in _BEGINNINGS[2:]:  # BigTIFF
        return True
    directory = _first_directory(file)
    samples = directory.get(tags.SAMPLESPERPIXEL, 1)
    bits = max(directory.get(tags.BITSPERSAMPLE, (1,)))
    formats = directory.get(tags.SAMPLEFORMAT, (1,))
    alpha = set(directory.get(tags.EXTRASAMPLES, ())) & set(_ALPHA)
    if samples == 1:
        return bits > 32 or (bits, formats[0]) in [(32, 1), (16, 3), (8, 2)]
    cmyk = directory.get(tags.PHOTOMETRIC_INTERPRETATION) == _SEPARATED
    bands = samples not in (3, 4) or (samples == 4 and not alpha and not cmyk)
    return bits > 8 or bands


def find_pages(file: Stream) -> list[int]:
    """The pages of the size of the first one; others are previews."""
    if needs_tifffile(file):
        import tifffile

        with tifffile.TiffFile(file) as opened:
            sizes = [page.aspage().shape for page in opened.pages]
    else:
        with Image.open(file) as image:
            sizes = [frame.size for frame in ImageSequence.Iterator(image)]
    return [page for page, size in enumerate(sizes) if size == sizes[0]]


def _first_directory(file: Stream) -> tags.ImageFileDirectory_v2:
    header = file.read(8)
    directory = tags.ImageFileDirectory_v2(header)
    file.seek(directory.next)
    directory.load(file)
    file.seek(0)
    return directory


def read_page(file: Stream, title: str, page: int = 0) -> np.ndarray:
    """The pixels of a page, channels last."""
    try:
        require("tifffile", extra="tiff", what="TIFF files of many bands or more than 8 bits")
    except ValueError as missing:
        raise UnreadableSample(title, str(missing)) from None
    import tifffile

    with tifffile.TiffFile(file) as opened:
        found: Any = opened.pages[page]
        refuse_bomb(found.keyframe.imagewidth, found.keyframe.imagelength, title)
        pixels = found.asarray()
        axes = found.axes
    if "S" in axes:
        pixels = np.moveaxis(pixels, axes.index("S"), -1)
    return torch_dtype(pixels if pixels.ndim == 3 else pixels[..., None])
