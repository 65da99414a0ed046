"""The views that a run's encoders saw, drawn again from their addresses."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from meanshift import keyed
from meanshift.augment import DEVIATION, MEAN, Address, TwoViews, draw_boxes
from meanshift.config import Config
from meanshift.data import Source, Unreadable


@dataclass(frozen=True)
class Drawn:
    """Pictures of a source that could be read, and both views of each at an epoch."""

    ids: Int[Tensor, " n"]
    pictures: list[UInt8[Tensor, "channels _ _"]]
    target: Float[Tensor, "n channels size size"]
    online: Float[Tensor, "n channels size size"]


def draw_again(source: Source, ids: Int[Tensor, " m"], *, epoch: int, config: Config) -> Drawn:
    """Both views of some pictures as the epoch gives them (counted from 0), normalised.

    Without workers and without the order of the run: a view depends on its address alone.
    """
    two_views = TwoViews(config.views, config.train.seed, config.data.image_size)
    pictures, kept = list[Tensor](), list[int]()
    for index in ids.tolist():
        try:
            pictures.append(source.read(index))
            kept.append(index)
        except Unreadable:  # in training another picture stood in for it
            continue
    ids = torch.tensor(kept, dtype=torch.int64)
    if not kept:
        empty = torch.empty(0, 3, config.data.image_size, config.data.image_size)
        return Drawn(ids, [], empty, empty)
    if source.uniform:
        target, online = two_views.finish(source.gather(ids), epoch, ids)
    else:
        target, online = two_views.finish(two_views.crop(pictures, epoch, ids), epoch, ids)
    return Drawn(ids, pictures, target, online)


def shown(view: Float[Tensor, "channels size size"]) -> UInt8[Tensor, "channels size size"]:
    """A normalised view as the picture that it is."""
    mean, deviation = (torch.tensor(values)[:, None, None] for values in (MEAN, DEVIATION))
    return ((view.cpu() * deviation + mean).clamp(0, 1) * 255).round().to(torch.uint8)


def boxes(drawn: Drawn, *, epoch: int, config: Config) -> list[Int[Tensor, "n 4"]]:
    """Where the target's and the online view were cut: (top, left, height, width) of each."""
    streams = [keyed.ONLINE] * 2 if config.views.same_view else [keyed.TARGET, keyed.ONLINE]
    sizes = torch.tensor([picture.shape[1:] for picture in drawn.pictures]).view(-1, 2)
    return [
        draw_boxes(
            config.views, Address(config.train.seed, epoch, drawn.ids, stream), *sizes.unbind(1)
        )
        for stream in streams
    ]
