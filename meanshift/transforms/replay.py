"""The views that a run's encoders saw, computed again from their addresses."""

from __future__ import annotations

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
    """Images of a source that could be read, and the views of each at an epoch."""

    ids: Int[Tensor, " n"]
    sizes: Int[Tensor, "n 2"]
    """height and width of each image"""
    images: list[UInt8[Tensor, "channels _ _"]]
    """the images themselves, if they were asked for"""
    views: tuple[Float[Tensor, "n channels _ _"], ...]
    """one tensor a view, in the order of the specifications"""


def replay_views(
    source: Source,
    ids: Int[Tensor, " m"],
    transform: MultiViewTransform,
    *,
    epoch: int,
    keep_images: bool = False,
) -> ReplayedViews:
    """The normalized views of some images as an epoch (counted from 0) gives them.

    Neither workers nor the order of the run matter: a view depends on its address alone. Large
    images are cropped as they are read; only with `keep_images` are all of them in memory.
    """
    images = list[Tensor]()
    crops = list[list[Tensor]]()
    readable = list[int]()
    sizes = list[tuple[int, ...]]()
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
        empty = [torch.empty(0, 3, v.size or transform.size, v.size or transform.size)
                 for v in transform.views for _ in range(v.count)]  # fmt: skip
        return ReplayedViews(ids, shapes.long(), [], tuple(empty))
    pixels = (
        source.gather(ids)
        if source.uniform
        else [torch.cat(view) for view in zip(*crops, strict=True)]
    )
    return ReplayedViews(ids, shapes, images, transform.finish(pixels, epoch, ids))


def denormalize(view: Float[Tensor, "channels size size"]) -> UInt8[Tensor, "channels size size"]:
    """A normalized view as an image of bytes."""
    mean, std = (torch.tensor(values)[:, None, None] for values in (MEAN, STD))
    return ((view.cpu() * std + mean).clamp(0, 1) * 255).round().to(torch.uint8)


def center_square(
    image: UInt8[Tensor, "3 height width"], side: int
) -> UInt8[Tensor, "side side 3"]:
    """The center of an image, resized to `side` pixels."""
    if tuple(image.shape[1:]) != (side, side):
        image = TF.center_crop(TF.resize(image, [side], antialias=True), [side, side])
    return image.permute(1, 2, 0).contiguous()


def crop_boxes(
    replayed: ReplayedViews, views: Sequence[ViewSpec], *, seed: int, epoch: int
) -> list[Int[Tensor, "n 4"]]:
    """Where each view was cropped: (top, left, height, width) of each image."""
    heights, widths = replayed.sizes.unbind(1)
    return [
        draw_boxes(view, Address(seed, epoch, replayed.ids, view.stream), heights, widths)
        for view in views
    ]
