"""Files of several images: pages of a TIFF, frames of a DICOM file, slices of a volume."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from meanshift.data import dicom, tiff, volumes
from meanshift.data.file_access import DiskTimeout, open_regular
from meanshift.data.remote_folder import RemotePath
from meanshift.runtime.errors import Note

_HEADER = 1 << 16  # bytes of a file that may be read for its header


class StackedImage(NamedTuple):
    """One image of a folder."""

    file: Path
    page: int
    """in its file; -1 for the only image of a file"""
    whole: str
    """the stack or the patient that it belongs to; empty for none"""


def find_images(root: Path | RemotePath, files: Sequence[Path]) -> list[StackedImage]:
    """The images of the files below a folder, in order; DICOM files without pixels have none."""
    images = list[StackedImage]()
    empty = list[Path]()
    stacks = 0
    for file in files:
        pages, whole = _look_into(root, file)
        if not pages:
            empty.append(file)
        elif len(pages) == 1:
            images.append(StackedImage(file, -1, whole))
        else:
            stacks += 1
            whole = whole or file.as_posix()
            images += [StackedImage(file, page, whole) for page in pages]
    if stacks:
        slices = len(images) - (len(files) - len(empty) - stacks)
        warnings.warn(f"{root}: {stacks} files are stacks of {slices} images", Note, stacklevel=5)
    if empty:
        warnings.warn(
            f"{root}: {len(empty)} DICOM files have no pixels and are left out, the first is "
            f"{empty[0]}",
            stacklevel=5,
        )
    return images


def hold_volumes(root: Path | RemotePath, files: Sequence[Path]) -> bool:
    """Whether the first file that is an array has three axes, and so is no signal."""
    for file in files:
        if file.suffix.lower() in volumes.SUFFIXES:
            try:
                return volumes.count_axes(open_regular(root / file, at_once=_HEADER)) == 3
            except DiskTimeout:
                raise
            except Exception:  # damaged files raise anything
                continue
    return False


def _look_into(root: Path | RemotePath, file: Path) -> tuple[Sequence[int], str]:
    """The pages of a file, and the patient; reading the file says why it cannot be read."""
    suffix = file.suffix.lower()
    try:
        if suffix in dicom.SUFFIXES:
            frames, patient = dicom.describe(open_regular(root / file, at_once=_HEADER), str(file))
            return range(frames), patient
        if suffix in tiff.SUFFIXES:
            return tiff.find_pages(open_regular(root / file, at_once=_HEADER)), ""
        if suffix in volumes.SUFFIXES:
            return range(volumes.count_slices(open_regular(root / file, at_once=_HEADER))), ""
    except DiskTimeout:
        raise
    except Exception:  # damaged files raise anything
        return [0], ""
    return [0], ""
