"""What the samples of a source are, and how they become the input of a network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["image", "vector", "signal"]

IMAGENET_MEAN = (0.485, 0.456, 0.406)
"""mean of ImageNet's channels, as the authors use it"""
IMAGENET_STD = (0.229, 0.224, 0.225)
"""standard deviation of ImageNet's channels"""


@dataclass(frozen=True, kw_only=True)
class SampleSpec:
    """Samples of one kind: the values that are stored, and how a network sees them.

    Stored values are scaled so that `range` becomes 0 to 1, and are then normalized by `mean` and
    `std` of each channel. The default is an 8-bit RGB image, normalized as for ImageNet.
    """

    kind: Kind = "image"
    channels: int = 3
    """channels of an image or a signal, columns of a vector"""
    dtype: str = "uint8"
    """of the stored values; samples of 8 bits stay bytes until they are normalized"""
    range: tuple[float, float] = (0.0, 255.0)
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    sampling_rate: int = 0
    """of sound in Hz; 0 where it is not known"""

    @property
    def is_bytes(self) -> bool:
        """Whether samples are read as bytes, and not as floats in [0, 1]."""
        return self.kind == "image" and self.dtype == "uint8" and self.range == (0.0, 255.0)

    @property
    def is_rgb(self) -> bool:
        """Whether operators on colors apply."""
        return self.kind == "image" and self.channels == 3

    @property
    def depth(self) -> str:
        """The type of the stored values in words; 16 bits are read into 32."""
        if self.dtype.startswith("float"):
            return "floats"
        return "8 bits" if self.dtype == "uint8" else "16 bits or more"

    def describe(self) -> str:
        """One line for a person."""
        if self.is_bytes and self.is_rgb:
            return "8-bit RGB images"
        low, high = self.range
        name = {"image": "images", "signal": "signals", "vector": "vectors"}[self.kind]
        parts = "columns" if self.kind == "vector" else "channels"
        parts = parts if self.channels != 1 else parts[:-1]
        if self.kind != "image":
            rate = f" at {self.sampling_rate:,} Hz" if self.sampling_rate else ""
            return f"{name} of {self.channels} {parts}{rate}"
        scale = f"{low:g} to {high:g} become 0 to 1"
        return f"{name} of {self.channels} {parts}, {self.depth}, {scale}"


RGB = SampleSpec()
"""8-bit RGB images, normalized as for ImageNet"""
