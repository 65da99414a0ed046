"""Replay: the views that a run's encoders saw, computed again from their addresses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor
from torchvision.transforms.v2 import functional as TF

from meanshift.config import ViewSpec
from meanshift.data import Source, UnreadableSample
from meanshift.ops.image import MEAN, STD
from meanshift.transforms.augment import Address, MultiViewTransform, draw_boxes


@dataclass(frozen=True)
class ReplayedViews:
    """The readable images of a source, and the views of each at an epoch."""

    ids: Int[Tensor, " n"]
    sizes: Int[Tensor, "n 2"]
    """height and width of each image"""
    images: list[UInt8[Tensor, "channels _ _"]]
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
            image = source.read(index)
        except UnreadableSample:  # training replaced it by another image
            continue
        readable.append(index)
        sizes.append(tuple(image.shape[1:]))
        if keep_images:
            images.append(image)
        if not source.uniform:
            crops.append(transform.crop([image], epoch, torch.tensor([index])))
    ids = torch.tensor(readable, dtype=torch.int64)
    shapes = torch.tensor(sizes).view(-1, 2)
    if not readable:
        return ReplayedViews(ids, shapes.long(), [], _empty_views(transform))
    pixels = (
        source.read_batch(ids)
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


def denormalize(view: Float[Tensor, "*patches channels _ _"]) -> UInt8[Tensor, "channels _ _"]:
    """Convert a normalized view to an image of bytes; jigsaw patches become rows in their order."""
    if view.ndim == 4:
        grid = math.isqrt(len(view))
        view = torch.cat([torch.cat(list(row), 2) for row in view.split(grid)], 1)
    mean, std = (torch.tensor(values)[:, None, None] for values in (MEAN, STD))
    return ((view.cpu() * std + mean).clamp(0, 1) * 255).round().to(torch.uint8)


def center_square(
    image: UInt8[Tensor, "3 height width"], side: int
) -> UInt8[Tensor, "side side 3"]:
    """Resize an image and crop its center to `side` pixels."""
    if tuple(image.shape[1:]) != (side, side):
        image = TF.center_crop(TF.resize(image, [side], antialias=True), [side, side])
    return image.permute(1, 2, 0).contiguous()


def _empty_views(transform: MultiViewTransform) -> tuple[Tensor, ...]:
    return tuple(torch.empty(0, *transform.shape(view)) for view in transform.single_views())
