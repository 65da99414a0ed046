"""Replay: the views that a run's encoders saw, computed again from their addresses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, Shaped, UInt8
from torch import Tensor

from meanshift.config import SampleSpec, ViewSpec
from meanshift.config.samples import RGB
from meanshift.data import Source, UnreadableSample
from meanshift.transforms.augment import Address, MultiViewTransform, draw_boxes


@dataclass(frozen=True)
class ReplayedViews:
    """The readable images of a source, and the views of each at an epoch."""

    ids: Int[Tensor, " n"]
    sizes: Int[Tensor, "n 2"]
    """height and width of each image"""
    images: list[Shaped[Tensor, "..."]]
    """the images themselves, with `keep_images`"""
    views: tuple[Float[Tensor, "n ..."], ...]
    """one tensor per view, in the order of the specifications"""


def replay_views(
    source: Source,
    ids: Int[Tensor, " m"],
    transform: MultiViewTransform,
    *,
    epoch: int,
    keep_images: bool = False,
) -> ReplayedViews:
    """Compute the normalized views of some images at an epoch (counted from 0).

    A view depends on its address alone, so neither workers nor the order of the run matter. Images
    of different sizes are cropped as they are read; all of them are in memory only with
    `keep_images`.
    """
    readable: list[int] = []
    sizes: list[tuple[int, ...]] = []
    images: list[Tensor] = []
    crops: list[list[Tensor]] = []
    for index in ids.tolist():
        try:
            image = source.sample(index)
        except UnreadableSample:  # training replaced it by another image
            continue
        readable.append(index)
        sizes.append((*image.shape[1:], 1, 1)[:2])
        if keep_images:
            images.append(image)
        if not source.uniform:
            crops.append(transform.crop([image], epoch, torch.tensor([index])))
    ids = torch.tensor(readable, dtype=torch.int64)
    shapes = torch.tensor(sizes).view(-1, 2)
    if not readable:
        return ReplayedViews(ids, shapes.long(), [], _empty_views(transform))
    pixels = (
        source.sample_batch(ids)
        if source.uniform
        else [torch.cat(view) for view in zip(*crops, strict=True)]
    )
    return ReplayedViews(ids, shapes, images, transform.finish(pixels, epoch, ids))


def crop_boxes(
    replayed: ReplayedViews, views: Sequence[ViewSpec], *, seed: int, epoch: int
) -> list[Int[Tensor, "n 4"]]:
    """Return where each view was cropped: (top, left, height, width) of each image."""
    heights, widths = replayed.sizes.unbind(1)
    return [
        draw_boxes(view, Address(seed, epoch, replayed.ids, view.stream), heights, widths)
        for view in views
    ]


def denormalize(
    view: Float[Tensor, "..."], samples: SampleSpec = RGB
) -> Float[Tensor, "channels *size"]:
    """Undo the normalization of a view; jigsaw patches become rows in their order."""
    if view.ndim == 4:
        grid = math.isqrt(len(view))
        view = torch.cat([torch.cat(list(row), 2) for row in view.split(grid)], 1)
    ones = [1] * (view.ndim - 1)
    mean, std = (torch.tensor(v).view(-1, *ones) for v in (samples.mean, samples.std))
    if samples.kind != "image":
        return view.cpu() * std + mean
    return (view.cpu() * std + mean).clamp(0, 1)


def to_rgb(
    image: Shaped[Tensor, "channels *size"], bands: Sequence[int] = ()
) -> UInt8[Tensor, "3 _ _"]:
    """A sample as an RGB image of bytes, to be looked at.

    Of more than three channels the chosen `bands` are shown as red, green and blue, by default the
    first three; of two channels the first. A vector is a grid of its values, row by row, and a
    signal its waveform.
    """
    if image.ndim == 1:
        return _grid_of_values(image)
    if image.ndim == 2:
        return _waveform(image)
    check_bands(bands, len(image))
    shown = image[list(bands) or ([0, 1, 2] if len(image) >= 3 else [0])]
    if shown.dtype != torch.uint8:
        shown = (shown * 255).round().to(torch.uint8)
    return shown.expand(3, *shown.shape[1:])


def check_bands(bands: Sequence[int], channels: int) -> None:
    """Refuse bands that samples of so many channels cannot be shown by."""
    if bands and (len(bands) not in (1, 3) or not all(0 <= band < channels for band in bands)):
        raise ValueError(
            f"--bands: got {','.join(map(str, bands))}, need one or three of 0 to {channels - 1}, "
            f"as {'0' if channels < 3 else '2,1,0'}"
        )


def center_square(
    image: UInt8[Tensor, "3 height width"], side: int
) -> UInt8[Tensor, "side side 3"]:
    """Resize an image and crop its center to `side` pixels."""
    if tuple(image.shape[1:]) != (side, side):
        from torchvision.transforms.v2 import functional as TF  # slow to import

        image = TF.center_crop(TF.resize(image, [side], antialias=True), [side, side])
    return image.permute(1, 2, 0).contiguous()


def _grid_of_values(vector: Float[Tensor, " columns"]) -> UInt8[Tensor, "3 _ _"]:
    side = math.isqrt(len(vector) - 1) + 1
    low, high = vector.min(), vector.max()
    shades = (vector - low) / (high - low).clamp(min=1e-12) * 255
    cells = torch.full((side * side,), 255, dtype=torch.uint8)
    cells[: len(vector)] = shades.round().to(torch.uint8)
    return cells.view(1, side, side).expand(3, -1, -1)


def _waveform(signal: Float[Tensor, "channels time"], side: int = 64) -> UInt8[Tensor, "3 _ _"]:
    """The range of the values of the first channel in each of 64 parts of the time."""
    values = signal[0] / signal[0].abs().max().clamp(min=1e-12)
    parts = values.tensor_split(min(side, len(values)))
    low, high = (torch.stack([pick(part) for part in parts]) for pick in (torch.amin, torch.amax))
    level = torch.linspace(1, -1, side)[:, None]
    line = 1.5 / side  # silence is a line of two pixels
    inside = (level >= low - line) & (level <= high + line)
    shown = torch.where(inside, 60, 255).to(torch.uint8)
    return shown[None].expand(3, -1, -1)


def _empty_views(transform: MultiViewTransform) -> tuple[Tensor, ...]:
    return tuple(torch.empty(0, *transform.shape(view)) for view in transform.single_views())
