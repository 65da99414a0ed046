"""The weak and the strong view of the paper, for whole batches at once, on the device.

What a view is made of is drawn from its address (`keyed`); how it is made is arithmetic on the
batch (`pixels`). So any part of a batch can be made alone, and gives the same up to the rounding
of float32: sums of parts of other sizes may differ by about 1e-6.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor
from torch.nn import functional as F

from meanshift.config import Strength, Views
from meanshift.ops.image import ColorParameters, apply_color, crop, normalize
from meanshift.runtime import rng

PIXELS = 2**19
"""made at a time on a CPU: what a view is made of then stays in its cache"""

# Columns of the uniform numbers at an address. A crop reads the same columns in either strength.
_AREA, _RATIO = slice(0, 10), slice(10, 20)
_TOP, _LEFT, _FLIP = 20, 21, 22
_JITTERED, _FACTORS, _SEQUENCE = 23, slice(24, 28), slice(28, 32)
_GRAYED, _BLURRED, _SIGMA, _COLUMNS = 32, 33, 34, 35


@dataclass(frozen=True)
class Address:
    """Where the randomness of a batch of views lives."""

    seed: int
    epoch: int
    ids: Int[Tensor, " batch"]
    stream: int

    @functools.cached_property
    def uniform(self) -> Float[Tensor, "batch 35"]:
        return rng.uniform(self.seed, self.epoch, self.ids, self.stream, _COLUMNS)


def draw_boxes(
    views: Views, address: Address, heights: Int[Tensor, " batch"], widths: Int[Tensor, " batch"]
) -> Int[Tensor, "batch 4"]:
    """Crop boxes (top, left, height, width) by the rule of torchvision's RandomResizedCrop."""
    u = address.uniform
    heights, widths = heights.double(), widths.double()
    low, high = views.crop_area
    area = (low + (high - low) * u[:, _AREA]) * (heights * widths)[:, None]
    log_ratio = torch.tensor([3 / 4, 4 / 3], dtype=torch.float64).log()
    ratio = (log_ratio[0] + (log_ratio[1] - log_ratio[0]) * u[:, _RATIO]).exp()
    w, h = (area * ratio).sqrt().round(), (area / ratio).sqrt().round()
    fits = (w > 0) & (w <= widths[:, None]) & (h > 0) & (h <= heights[:, None])
    first = fits.int().argmax(1, keepdim=True)
    w, h = w.gather(1, first)[:, 0], h.gather(1, first)[:, 0]
    top, left = ((heights - h + 1) * u[:, _TOP]).floor(), ((widths - w + 1) * u[:, _LEFT]).floor()
    # No attempt fitted: the largest central crop of an allowed ratio.
    aspect = widths / heights
    center_w = torch.where(aspect > 4 / 3, (heights * 4 / 3).round(), widths)
    center_h = torch.where(aspect < 3 / 4, (widths / (3 / 4)).round(), heights)
    none = ~fits.any(1)
    w, h = torch.where(none, center_w, w), torch.where(none, center_h, h)
    top = torch.where(none, ((heights - h) / 2).floor(), top)
    left = torch.where(none, ((widths - w) / 2).floor(), left)
    return torch.stack([top, left, h, w], 1).long()


def draw_flips(views: Views, address: Address) -> Bool[Tensor, " batch"]:
    """Which views are mirrored."""
    return address.uniform[:, _FLIP] < views.flip


def draw_colors(views: Views, address: Address) -> ColorParameters:
    """Jitter, gray and blur of a strong view, by the rules of ColorJitter and of MoCo v2."""
    u = address.uniform
    reach = torch.tensor(views.jitter_strength, dtype=torch.float64)
    unchanged = torch.tensor([1.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    low, high = views.blur_sigma
    blurred = u[:, _BLURRED] < views.blur
    return ColorParameters(
        factors=unchanged + reach * (2 * u[:, _FACTORS] - 1),
        sequence=u[:, _SEQUENCE].argsort(1),
        jittered=u[:, _JITTERED] < views.jitter,
        grayed=u[:, _GRAYED] < views.gray,
        sigma=torch.where(blurred, low + (high - low) * u[:, _SIGMA], 0.0),
    )


@dataclass(frozen=True)
class TwoViews:
    """The target's and the online view of images, from a config: the same wherever it is made."""

    views: Views
    seed: int
    size: int

    def crop(
        self, images: list[UInt8[Tensor, "channels _ _"]], epoch: int, ids: Int[Tensor, " batch"]
    ) -> list[UInt8[Tensor, "batch channels size size"]]:
        """Mirrored crops of images of any sizes, in a loader worker: decoded once, cut twice."""
        sizes, square = torch.tensor([one.shape[1:] for one in images]), [self.size, self.size]
        crops = []
        for stream, _ in self._roles():
            address = Address(self.seed, epoch, ids, stream)
            boxes = draw_boxes(self.views, address, *sizes.unbind(1)).tolist()
            flips = draw_flips(self.views, address).tolist()
            cut = []
            for image, (top, left, h, w), flip in zip(images, boxes, flips, strict=True):
                # Channels side by side, as they were decoded: the kernel for bytes wants them so.
                part = image.permute(1, 2, 0)[None, top : top + h, left : left + w]
                one = F.interpolate(
                    part.permute(0, 3, 1, 2), square, mode="bilinear", antialias=True
                )
                cut.append(one.flip(3) if flip else one)
            crops.append(torch.cat(cut))
        return crops

    def finish(
        self,
        images: UInt8[Tensor, "batch height width channels"]
        | list[UInt8[Tensor, "batch channels _ _"]],
        epoch: int,
        ids: Int[Tensor, " batch"],
    ) -> tuple[Float[Tensor, "batch channels _ _"], Float[Tensor, "batch channels _ _"]]:
        """(target view, online view) of a batch of whole images of one size, or of crops."""
        cut = isinstance(images, list)
        held = images if isinstance(images, list) else [images] * len(self._roles())
        shape = (len(ids), held[0].shape[1 if cut else 3], self.size, self.size)
        on_cpu = held[0].device.type == "cpu"
        few = max(1, PIXELS // self.size**2) if on_cpu else len(ids)
        made = []
        for whole, (stream, strength) in zip(held, self._roles(), strict=True):
            views = torch.empty(shape, device=whole.device)
            for view, some, part in zip(*(x.split(few) for x in (views, whole, ids)), strict=True):
                address = Address(self.seed, epoch, part, stream)
                normalize(self._view(some, address, strength, cut=cut), out=view)
            made.append(views)
        return made[0], made[-1]

    def _view(self, images: Tensor, address: Address, strength: Strength, *, cut: bool) -> Tensor:
        if cut:
            view = images.to(torch.float32, memory_format=torch.contiguous_format).div_(255)
        else:
            sizes = torch.tensor(images.shape[1:3]).expand(len(images), 2)
            boxes = draw_boxes(self.views, address, *sizes.unbind(1))
            view = crop(images, boxes, draw_flips(self.views, address), self.size)
        if strength == "strong":
            view = apply_color(view, draw_colors(self.views, address))
        return view

    def _roles(self) -> list[tuple[int, Strength]]:
        online: tuple[int, Strength] = (rng.ONLINE, self.views.online)
        return [online] if self.views.same_view else [(rng.TARGET, self.views.target), online]
