"""The views that a run's encoders saw, drawn again from their addresses."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor
from torchvision.transforms.v2 import functional as TF

from meanshift.config import Config
from meanshift.data import Source, UnreadableSample
from meanshift.ops.image import MEAN, STD
from meanshift.runtime import rng
from meanshift.transforms.augment import Address, TwoViews, draw_boxes


@dataclass(frozen=True)
class ReplayedViews:
    """Images of a source that could be read, and both views of each at an epoch."""

    ids: Int[Tensor, " n"]
    sizes: Int[Tensor, "n 2"]
    """height and width of each image"""
    images: list[UInt8[Tensor, "channels _ _"]]
    """the images themselves, where they were wished for"""
    target: Float[Tensor, "n channels size size"]
    online: Float[Tensor, "n channels size size"]


def replay_views(
    source: Source, ids: Int[Tensor, " m"], *, epoch: int, config: Config, keep: bool = False
) -> ReplayedViews:
    """Both views of some images as the epoch gives them (counted from 0), normalized.

    Without workers and without the order of the run: a view depends on its address alone. Large
    images are cut as they are read: only those that are to be kept are in memory together.
    """
    two_views = TwoViews(config.views, config.train.seed, config.data.image_size)
    images, crops = list[Tensor](), list[list[Tensor]]()
    kept, sizes = list[int](), list[tuple[int, ...]]()
    for index in ids.tolist():
        try:
            image = source.read(index)
        except UnreadableSample:  # in training another image stood in for it
            continue
        kept.append(index)
        sizes.append(tuple(image.shape[1:]))
        if keep:
            images.append(image)
        if not source.uniform:
            crops.append(two_views.crop([image], epoch, torch.tensor([index])))
    ids, shapes = torch.tensor(kept, dtype=torch.int64), torch.tensor(sizes).view(-1, 2)
    if not kept:
        empty = torch.empty(0, 3, config.data.image_size, config.data.image_size)
        return ReplayedViews(ids, shapes.long(), [], empty, empty)
    whole = (
        source.gather(ids) if source.uniform else [torch.cat(r) for r in zip(*crops, strict=True)]
    )
    target, online = two_views.finish(whole, epoch, ids)
    return ReplayedViews(ids, shapes, images, target, online)


def denormalize(view: Float[Tensor, "channels size size"]) -> UInt8[Tensor, "channels size size"]:
    """A normalized view as the image that it is."""
    mean, deviation = (torch.tensor(values)[:, None, None] for values in (MEAN, STD))
    return ((view.cpu() * deviation + mean).clamp(0, 1) * 255).round().to(torch.uint8)


def center_square(
    image: UInt8[Tensor, "3 height width"], side: int
) -> UInt8[Tensor, "side side 3"]:
    """The center of an image at a size."""
    if tuple(image.shape[1:]) != (side, side):
        image = TF.center_crop(TF.resize(image, [side], antialias=True), [side, side])
    return image.permute(1, 2, 0).contiguous()


def crop_boxes(drawn: ReplayedViews, *, epoch: int, config: Config) -> list[Int[Tensor, "n 4"]]:
    """Where the target's and the online view were cut: (top, left, height, width) of each."""
    streams = [rng.ONLINE] * 2 if config.views.same_view else [rng.TARGET, rng.ONLINE]
    return [
        draw_boxes(
            config.views,
            Address(config.train.seed, epoch, drawn.ids, stream),
            *drawn.sizes.unbind(1),
        )
        for stream in streams
    ]
