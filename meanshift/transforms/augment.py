"""Training views of whole batches at once, on the device.

The parameters of a view are drawn from its address (`runtime.rng`); the image operators are
`ops.image`. So any part of a batch can be computed alone, with the same result up to the rounding
of float32: sums over parts of other sizes may differ by about 1e-6.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor
from torch.nn import functional as F

from meanshift.config import ViewSpec
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
    view: ViewSpec, address: Address, heights: Int[Tensor, " batch"], widths: Int[Tensor, " batch"]
) -> Int[Tensor, "batch 4"]:
    """Crop boxes (top, left, height, width) by the rule of torchvision's RandomResizedCrop."""
    u = address.uniform
    heights, widths = heights.double(), widths.double()
    low, high = view.crop_area
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


def draw_flips(view: ViewSpec, address: Address) -> Bool[Tensor, " batch"]:
    """Which views are mirrored."""
    return address.uniform[:, _FLIP] < view.flip


def draw_colors(view: ViewSpec, address: Address) -> ColorParameters:
    """Jitter, gray and blur of a strong view, by the rules of ColorJitter and of MoCo v2."""
    u = address.uniform
    reach = torch.tensor(view.jitter_strength, dtype=torch.float64)
    unchanged = torch.tensor([1.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    low, high = view.blur_sigma
    blurred = u[:, _BLURRED] < view.blur
    return ColorParameters(
        factors=unchanged + reach * (2 * u[:, _FACTORS] - 1),
        sequence=u[:, _SEQUENCE].argsort(1),
        jittered=u[:, _JITTERED] < view.jitter,
        grayed=u[:, _GRAYED] < view.gray,
        sigma=torch.where(blurred, low + (high - low) * u[:, _SIGMA], 0.0),
    )


@dataclass(frozen=True)
class MultiViewTransform:
    """The views of images that a method declares; the same wherever they are computed."""

    views: tuple[ViewSpec, ...]
    seed: int
    size: int
    """side of a view that does not name its own"""

    def crop(
        self, images: list[UInt8[Tensor, "channels _ _"]], epoch: int, ids: Int[Tensor, " batch"]
    ) -> list[UInt8[Tensor, "batch channels _ _"]]:
        """Flipped crops of images of any sizes, for a loader worker: decoded once, cropped often."""
        sizes = torch.tensor([image.shape[1:] for image in images])
        crops = []
        for view in self._each():
            side = view.size or self.size
            address = Address(self.seed, epoch, ids, view.stream)
            boxes = draw_boxes(view, address, *sizes.unbind(1)).tolist()
            flips = draw_flips(view, address).tolist()
            resized = []
            for image, (top, left, height, width), flip in zip(images, boxes, flips, strict=True):
                # Channels last, as they were decoded: the kernel for bytes needs that layout.
                region = image.permute(1, 2, 0)[None, top : top + height, left : left + width]
                patch = F.interpolate(
                    region.permute(0, 3, 1, 2), [side, side], mode="bilinear", antialias=True
                )
                resized.append(patch.flip(3) if flip else patch)
            crops.append(torch.cat(resized))
        return crops

    def finish(
        self,
        images: UInt8[Tensor, "batch height width channels"]
        | list[UInt8[Tensor, "batch channels _ _"]],
        epoch: int,
        ids: Int[Tensor, " batch"],
    ) -> tuple[Float[Tensor, "batch channels _ _"], ...]:
        """The views of a batch of whole images of one size, or of the crops of each view."""
        views = self._each()
        cropped = isinstance(images, list)
        inputs = images if isinstance(images, list) else [images] * len(views)
        finished = []
        for pixels, view in zip(inputs, views, strict=True):
            side = view.size or self.size
            chunk = max(1, PIXELS // side**2) if pixels.device.type == "cpu" else len(ids)
            channels = pixels.shape[1 if cropped else 3]
            output = torch.empty(len(ids), channels, side, side, device=pixels.device)
            parts = (x.split(chunk) for x in (output, pixels, ids))
            for part, some, some_ids in zip(*parts, strict=True):
                address = Address(self.seed, epoch, some_ids, view.stream)
                normalize(self._augment(some, view, address, cropped=cropped), out=part)
            finished.append(output)
        return tuple(finished)

    def _augment(
        self, images: Tensor, view: ViewSpec, address: Address, *, cropped: bool
    ) -> Tensor:
        if cropped:
            output = images.to(torch.float32, memory_format=torch.contiguous_format).div_(255)
        else:
            sizes = torch.tensor(images.shape[1:3]).expand(len(images), 2)
            boxes = draw_boxes(view, address, *sizes.unbind(1))
            output = crop(images, boxes, draw_flips(view, address), view.size or self.size)
        return apply_color(output, draw_colors(view, address)) if view.has_color else output

    def _each(self) -> list[ViewSpec]:
        """The views one by one: those with a `count` have a stream of their own each."""
        return [
            replace(view, stream=rng.view_stream(view.stream, copy), count=1)
            for view in self.views
            for copy in range(view.count)
        ]
