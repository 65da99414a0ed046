"""Samples as they are stored, converted to what a network takes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Shaped
from torch import Tensor

from meanshift.config import SampleSpec

_GRAY = (0.299, 0.587, 0.114)  # of red, green and blue: Pillow's weights


def convert(
    stored: Shaped[Tensor, "*shape"], spec: SampleSpec, *, channel_dim: int = 0
) -> Shaped[Tensor, "*converted"]:
    """Convert stored values to the channels of a specification, as bytes or floats in [0, 1].

    A ValueError says why a sample does not fit.
    """
    values = match_channels(stored, spec, channel_dim)
    if spec.is_bytes:
        if values.dtype != torch.uint8:
            name = name_of(stored.dtype)
            raise ValueError(
                f"{name} values among 8-bit images; convert them alike, or state the values of "
                f"black and white: --data.dtype {name} --data.range LOW,HIGH"
            )
        return values
    if values.is_floating_point() and not bool(values.isfinite().all()):
        raise ValueError("has values that are not finite; replace them in the file")
    if spec.kind != "image":
        return values.to(torch.float32)
    low, high = spec.range
    return values.to(torch.float32).sub(low).div_(high - low).clamp_(0, 1)


def match_channels(
    stored: Shaped[Tensor, "*shape"], spec: SampleSpec, channel_dim: int
) -> Shaped[Tensor, "*converted"]:
    """Convert only the channels: gray and RGB to one another, an alpha channel to white.

    A second or fourth channel is alpha only where the file says so (`mark_alpha`), else a band.
    """
    channels = stored.shape[channel_dim]
    if channels == spec.channels:
        return stored
    if spec.kind == "image" and has_alpha(stored) and spec.channels in (1, 3):
        return match_channels(_on_white(stored, channel_dim), spec, channel_dim)
    if spec.kind == "image" and channels == 1 and spec.channels == 3:
        shape = list(stored.shape)
        shape[channel_dim] = 3
        return stored.expand(shape)
    if spec.kind == "image" and channels == 3 and spec.channels == 1:
        red, green, blue = stored.movedim(channel_dim, 0).float().unbind()
        gray = _GRAY[0] * red + _GRAY[1] * green + _GRAY[2] * blue
        gray = gray if stored.is_floating_point() else gray.round()
        return gray.to(stored.dtype).unsqueeze(channel_dim)
    name = "columns" if spec.kind == "vector" else "channels"
    raise ValueError(f"{channels} {name}; the network takes {spec.channels}")


def mark_alpha(image: Tensor) -> Tensor:
    """Record that the last channel of an image is alpha, as its file says."""
    image.last_channel_is_alpha = True  # type: ignore[attr-defined]
    return image


def has_alpha(image: Tensor) -> bool:
    """Whether the last channel of an image was marked as alpha."""
    return getattr(image, "last_channel_is_alpha", False)


def _on_white(stored: Tensor, channel_dim: int) -> Tensor:
    """An image with an alpha channel, the last one, blended with white."""
    white = 255 if stored.dtype == torch.uint8 else 65535
    colors, alpha = stored.split([stored.shape[channel_dim] - 1, 1], channel_dim)
    blended = torch.lerp(torch.tensor(float(white)), colors.float(), alpha.float() / white)
    return blended.round().to(stored.dtype)


def torch_dtype(values: np.ndarray) -> np.ndarray:
    """The same values in a type that torch computes with."""
    if values.dtype == bool:
        return values.astype(np.uint8) * np.uint8(255)
    wider = {"uint16": "int32", "uint32": "float64", "uint64": "float64"}
    native = values.astype(values.dtype.newbyteorder("="), copy=False)
    return native.astype(wider.get(native.dtype.name, native.dtype.name), copy=False)


def name_of(dtype: torch.dtype) -> str:
    """The name of a type as in `--data.dtype`."""
    return str(dtype).removeprefix("torch.")


def blank(spec: SampleSpec, size: Sequence[int]) -> Shaped[Tensor, "channels *size"]:
    """A sample without content, in place of one that cannot be read."""
    if spec.is_bytes:
        return torch.full((spec.channels, *size), 128, dtype=torch.uint8)
    middle = 0.5 if spec.kind == "image" else 0.0
    return torch.full((spec.channels, *size), middle)
