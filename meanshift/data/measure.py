"""What the samples of a source are: channels, type, range, mean and std of the values."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from meanshift.config import Data, SampleSpec
from meanshift.data.convert import convert, has_alpha, match_channels, name_of
from meanshift.data.unreadable import UnreadableSample
from meanshift.runtime import rng

if TYPE_CHECKING:
    from meanshift.data.source import Source

LOOKED_AT = 32
"""samples that are read to learn their channels and their type"""
MEASURED = 256
"""samples whose values are measured, where they are not 8-bit RGB images"""
PERCENTILES = (0.1, 99.9)
"""of the values that become 0 and 1 where images are not of 8 bits"""
ONE_SCALE = 10
"""columns of vectors have one scale, which is then left as it is, unless the std of one is
this many times that of the median"""
_PIXELS = 4096  # of each sample, spread over it, so that large ones do not fill the memory


def measure(source: Source, settings: Data | None = None) -> SampleSpec:
    """Describe the samples of a source by some of them; what is set stays as it is.

    8-bit RGB images are normalized as for ImageNet; the mean and the standard deviation of others
    are measured. The columns of vectors that have one scale, as embeddings do, get one std.
    """
    settings = settings or Data()
    looked_at = list(_read_some(source, LOOKED_AT))
    transparent = sum(map(has_alpha, looked_at))
    kind = source.kind
    if not looked_at:
        return _of_unreadable(source, settings)
    if settings.kind not in ("auto", kind):
        raise ValueError(
            f"data.kind: got {settings.kind}, and {source.name} holds {kind}s; arrays of signals "
            f"are named `signals` in an .npz file"
        )
    stored = _common_channels(looked_at)
    channels = settings.channels or stored
    convertible = {1, 3} if kind == "image" and stored in (1, 3) else {stored}
    if channels not in convertible | ({stored + 1} if transparent else set()):
        raise ValueError(
            f"{source.name}: samples of {stored} channels, and the network takes {channels}; leave "
            f"out what asks for it: --data.channels or --encoder.weights"
        )
    if transparent and channels in (1, 3):
        warnings.warn(
            f"{source.name}: {transparent} of {len(looked_at)} images that were looked at have "
            f"transparency, which is blended with white; type --data.channels {stored + 1} to keep "
            f"it as a channel",
            stacklevel=3,
        )
    if settings.sampling_rate and source.sampling_rate not in (0, settings.sampling_rate):
        raise ValueError(
            f"data.sampling_rate: got {settings.sampling_rate} Hz, and {source.name} has "
            f"{source.sampling_rate} Hz; convert the files (ffmpeg -ar {settings.sampling_rate})"
        )
    dtype = _common_dtype(source, looked_at) if settings.dtype == "auto" else settings.dtype
    spec = SampleSpec(
        kind=kind,
        channels=channels,
        dtype=dtype,
        sampling_rate=source.sampling_rate or settings.sampling_rate,
    )
    if kind == "image" and dtype == "uint8" and settings.range in ("auto", (0.0, 255.0)):
        values_range = (0.0, 255.0)
        if channels == 3 and settings.mean == settings.std == "auto":
            return spec
    elif kind != "image":
        values_range = (0.0, 1.0)
    elif isinstance(settings.range, tuple):
        values_range = settings.range
    else:
        values_range = _range(source, spec, minmax=settings.range == "minmax")
    spec = dataclasses.replace(spec, range=values_range)
    return _with_moments(source, spec, settings)


def _of_unreadable(source: Source, settings: Data) -> SampleSpec:
    """The settings for images, which are named as they are met; signals have no usual channels."""
    if source.kind != "image":
        try:
            source.read(0)
        except UnreadableSample as error:
            raise ValueError(
                f"{source.name}: none of the first {source.kind}s can be read; {error.title}: "
                f"{error.reason}"
            ) from None
    return settings.sample_spec


def _read_some(source: Source, count: int) -> Iterator[Tensor]:
    """The readable ones of some samples, chosen by the number of samples alone."""
    indices = rng.choice(0, len(source), count, rng.SAMPLE).tolist()
    source.prefetch(indices)
    for index in indices:
        try:
            yield source.read(index)
        except UnreadableSample:
            continue


def _common_channels(samples: list[Tensor]) -> int:
    """Gray among RGB counts as RGB; otherwise what most samples have, an alpha channel aside."""
    counts = Counter(len(sample) - has_alpha(sample) for sample in samples)
    return 3 if set(counts) == {1, 3} else counts.most_common(1)[0][0]


def _common_dtype(source: Source, samples: list[Tensor]) -> str:
    """8 bits where most samples have them; the others are then unreadable."""
    dtypes = Counter(sample.dtype for sample in samples)
    dtype = dtypes.most_common(1)[0][0]
    if dtype != torch.uint8:
        dtype = functools.reduce(torch.promote_types, dtypes)
        if torch.uint8 in dtypes:
            warnings.warn(
                f"{source.name}: {dtypes[torch.uint8]} of {len(samples)} samples that were looked "
                f"at are of 8 bits among others of {name_of(dtype)}, and are scaled as those; "
                f"convert them alike",
                stacklevel=4,
            )
    return name_of(dtype)


def _range(source: Source, spec: SampleSpec, *, minmax: bool) -> tuple[float, float]:
    """The values of black and white: percentiles of some samples, or their least and largest."""
    pixels = [torch.empty(0)]
    for sample in _read_some(source, MEASURED):
        with contextlib.suppress(ValueError):  # named when it is met
            pixels.append(_pixels(match_channels(sample, spec, 0)).flatten())
    values = torch.cat(pixels)
    values = values[values.isfinite()].sort().values
    if not len(values):
        return 0.0, 1.0
    low, high = (0.0, 100.0) if minmax else PERCENTILES
    last = len(values) - 1
    black, white = (float(values[round(part / 100 * last)]) for part in (low, high))
    return (black, white) if black < white else (black, black + 1)


def _with_moments(source: Source, spec: SampleSpec, settings: Data) -> SampleSpec:
    """The specification with the mean and the standard deviation of its converted values."""
    pixels = []
    for sample in _read_some(source, MEASURED):
        try:
            converted = convert(sample, spec)
        except ValueError:  # named when it is met
            continue
        values = converted.float()
        pixels.append(_pixels(values.div_(255) if spec.is_bytes else values))
    if not pixels:
        return spec
    rows = torch.cat(pixels, 1).double()
    std = rows.std(1, correction=0)
    if spec.kind == "vector" and std.any() and std.max() <= ONE_SCALE * std[std > 0].median():
        std = torch.full_like(std, float(std.square().mean().sqrt()))
    std = torch.where(std > 1e-6, std, 1.0)
    mean = tuple(round(value, 6) for value in rows.mean(1).tolist())
    stds = tuple(float(f"{value:.6g}") for value in std.tolist())
    return dataclasses.replace(
        spec,
        mean=mean if isinstance(settings.mean, str) else settings.mean,
        std=stds if isinstance(settings.std, str) else settings.std,
    )


def _pixels(sample: Tensor) -> Float[Tensor, "channels values"]:
    """At most some thousand values of each channel, spread over the sample."""
    values = sample.reshape(len(sample), -1)
    return values[:, :: max(1, values.shape[1] // _PIXELS)].float()
