"""DICOM files: the values that they mean (as CT numbers), and the frames of a file."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from meanshift.data.convert import torch_dtype
from meanshift.data.file_access import Stream
from meanshift.data.unreadable import UnreadableSample
from meanshift.runtime.extras import require

SUFFIXES = frozenset((".dcm", ".dicom"))


def is_dicom(file: Stream) -> bool:
    """Whether a file begins as DICOM does: 128 bytes of anything, then DICM."""
    beginning = file.read(132)
    file.seek(0)
    return beginning[128:] == b"DICM"


def read_frame(file: Stream, title: str, frame: int = 0) -> np.ndarray:
    """The pixels of a frame, channels last, with the file's own slope and intercept.

    Black is low also where the file says that it is high (MONOCHROME1).
    """
    dataset = _open(file, title)
    from pydicom.pixels.processing import apply_color_lut, apply_rescale
    from pydicom.pixels.utils import pixel_array

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of values that do not follow the standard
        values = np.asarray(pixel_array(dataset, index=frame))
    if dataset.get("PhotometricInterpretation") == "PALETTE COLOR":
        values = apply_color_lut(values, dataset)
    if values.ndim == 3:
        return torch_dtype(values)
    if dataset.get("PhotometricInterpretation") == "MONOCHROME1":
        values = _inverted(values, dataset)
    scaled = apply_rescale(values, dataset)
    if np.array_equal(scaled, values):
        return torch_dtype(values)[..., None]
    whole = np.array_equal(scaled, scaled.round())
    return scaled.astype(np.int32 if whole else np.float32)[..., None]


def _inverted(values: np.ndarray, dataset: Any) -> np.ndarray:
    """The values with black and white exchanged, by the range that the stored bits have."""
    signed = dataset.get("PixelRepresentation") == 1
    highest = -1 if signed else 2 ** int(dataset.BitsStored) - 1
    inverted = highest - values.astype(np.int64)
    return (inverted if signed else inverted.clip(0)).astype(values.dtype)


def describe(file: Stream, title: str) -> tuple[int, str]:
    """How many frames a file has (0 without pixels), and its patient, or else its series."""
    dataset = _open(file, title, stop_before_pixels=True)
    frames = int(dataset.get("NumberOfFrames") or 1) if "Rows" in dataset else 0
    return frames, str(dataset.get("PatientID") or dataset.get("SeriesInstanceUID") or "")


def _open(file: Stream, title: str, *, stop_before_pixels: bool = False) -> Any:
    try:
        require("pydicom", extra="dicom", what="DICOM files")
    except ValueError as missing:
        raise UnreadableSample(title, str(missing)) from None
    import pydicom

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pydicom.dcmread(file, stop_before_pixels=stop_before_pixels)
