"""Training views of whole batches, computed on the device.

The parameters of a view are drawn from its address (`runtime.rng`); the image operators are those
of `ops.image`, on a CPU their compiled form (`ops.image_kernel`). So any part of a batch can be
computed alone, with the same result up to the rounding of float32: sums over parts of other sizes
may differ by about 1e-6.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.nn import functional as F

from meanshift.config import SampleSpec, ViewSpec
from meanshift.config.samples import RGB
from meanshift.ops import image_kernel
from meanshift.ops.image import (
    ColorParameters,
    add_noise,
    apply_color,
    cut_patches,
    drop_channels,
    normalize,
    resized_crop,
    to_unit,
)
from meanshift.runtime import rng

PIXELS = 2**19
"""pixels of a view that are computed at a time on a CPU, so that they stay in its cache"""

# Columns of the uniform numbers at an address. All views crop by the same columns. More columns do
# not change the earlier ones, so new operators are appended.
_PLACE = 0  # of a jigsaw patch, which has no area of its own
_AREA = slice(0, 10)
_RATIO = slice(10, 20)
_TOP = 20
_LEFT = 21
_FLIP = 22
_JITTERED = 23
_FACTORS = slice(24, 28)
_SEQUENCE = slice(28, 32)
_GRAYED = 32
_BLURRED = 33
_SIGMA = 34
_SOLARIZED = 35
_NOISE = 36
_COLUMNS = 37


@dataclass(frozen=True)
class Address:
    """The address of the randomness of a batch of views."""

    seed: int
    epoch: int
    ids: Int[Tensor, " batch"]
    stream: int

    @functools.cached_property
    def uniform(self) -> Float[Tensor, "batch 37"]:
        """The uniform random numbers at this address."""
        return rng.uniform(self.seed, self.epoch, self.ids, self.stream, _COLUMNS)

    def many(self, count: int, use: int) -> Float[Tensor, "batch count"]:
        """Any number of uniform random numbers for each sample, of a stream for this use."""
        stream = 10_000_000 * use + self.stream
        return rng.uniform(self.seed, self.epoch, self.ids, stream, count)

    def normal(self, shape: tuple[int, ...]) -> Float[Tensor, "batch *shape"]:
        """Normally distributed numbers, in float32."""
        u = self.many(math.prod(shape), NOISE)
        numbers: Tensor = torch.special.ndtri(u.clamp_(min=1e-12)).float()
        return numbers.view(-1, *shape)


NOISE, DROPOUT, MIX = 1, 2, 3
"""uses of `Address.many`"""


@dataclass(frozen=True)
class PatchAddress(Address):
    """The addresses of jigsaw patches: each patch of an image has a stream of its own."""

    patches: int
    """patches of an image; they follow one another"""

    @functools.cached_property
    def uniform(self) -> Float[Tensor, "batch_patches 37"]:
        streams = [1_000_000 * (self.stream + 1) + patch for patch in range(self.patches)]
        return self._draw(streams, _COLUMNS)

    def many(self, count: int, use: int) -> Float[Tensor, "batch_patches count"]:
        offset = 10_000_000 * use + 1_000_000 * (self.stream + 1)
        return self._draw([offset + patch for patch in range(self.patches)], count)

    def _draw(self, streams: list[int], count: int) -> Tensor:
        numbers = [rng.uniform(self.seed, self.epoch, self.ids, s, count) for s in streams]
        return torch.stack(numbers, 1).flatten(0, 1)


def draw_boxes(
    view: ViewSpec, address: Address, heights: Int[Tensor, " batch"], widths: Int[Tensor, " batch"]
) -> Int[Tensor, "batch 4"]:
    """Draw crop boxes (top, left, height, width) by the rule of torchvision's RandomResizedCrop.

    Of ten attempts the first that fits the image is taken, else the largest central crop of an
    allowed aspect ratio.
    """
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
    top = ((heights - h + 1) * u[:, _TOP]).floor()
    left = ((widths - w + 1) * u[:, _LEFT]).floor()
    aspect = widths / heights
    center_w = torch.where(aspect > 4 / 3, (heights * 4 / 3).round(), widths)
    center_h = torch.where(aspect < 3 / 4, (widths / (3 / 4)).round(), heights)
    none = ~fits.any(1)
    w, h = torch.where(none, center_w, w), torch.where(none, center_h, h)
    top = torch.where(none, ((heights - h) / 2).floor(), top)
    left = torch.where(none, ((widths - w) / 2).floor(), left)
    return torch.stack([top, left, h, w], 1).long()


def draw_flips(view: ViewSpec, address: Address) -> Bool[Tensor, " batch"]:
    """Draw which crops are flipped horizontally; jigsaw patches are flipped instead of theirs."""
    return address.uniform[:, _FLIP] < (0.0 if view.jigsaw else view.flip)


def draw_patches(
    view: ViewSpec, address: PatchAddress, crop_side: int
) -> tuple[Int[Tensor, "batch patches 2"], Bool[Tensor, "batch patches"]]:
    """Draw the corners (top, left) of jigsaw patches in a crop, and which are flipped."""
    u = address.uniform.unflatten(0, (-1, address.patches))
    order = u[:, :, _PLACE].argsort(1)
    cell_side = crop_side // view.jigsaw
    cells = torch.stack([order // view.jigsaw, order % view.jigsaw], 2) * cell_side
    free = cell_side - patch_side(view, crop_side)
    return cells + ((free + 1) * u[:, :, [_TOP, _LEFT]]).long(), u[:, :, _FLIP] < view.flip


def patch_side(view: ViewSpec, crop_side: int) -> int:
    """The side of a jigsaw patch: 64 pixels for a crop of 255, as in VISSL."""
    return max(1, round(0.75 * (crop_side // view.jigsaw)))


def draw_colors(view: ViewSpec, address: Address) -> ColorParameters:
    """Draw the color operators of a view by the rules of MoCo v2, and of BYOL for solarize."""
    u = address.uniform
    strength = torch.tensor(view.jitter_strength, dtype=torch.float64)
    unchanged = torch.tensor([1.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    low, high = view.blur_sigma
    blurred = u[:, _BLURRED] < view.blur
    return ColorParameters(
        factors=unchanged + strength * (2 * u[:, _FACTORS] - 1),
        sequence=u[:, _SEQUENCE].argsort(1),
        jittered=u[:, _JITTERED] < view.jitter,
        grayed=u[:, _GRAYED] < view.gray,
        sigma=torch.where(blurred, low + (high - low) * u[:, _SIGMA], 0.0),
        solarized=u[:, _SOLARIZED] < view.solarize,
    )


def crop_one_by_one(
    images: Sequence[Shaped[Tensor, "channels _ _"]],
    boxes: Int[Tensor, "batch 4"],
    flips: Bool[Tensor, " batch"],
    side: int,
) -> Shaped[Tensor, "batch channels side side"]:
    """Crop, resize (bilinear, antialiased) and flip images of any sizes."""
    resized = []
    for image, (top, left, height, width), flip in zip(
        images, boxes.tolist(), flips.tolist(), strict=True
    ):
        # Channels last, as they were decoded: the kernel for bytes needs that layout.
        region = image.permute(1, 2, 0)[None, top : top + height, left : left + width]
        patch = F.interpolate(
            region.permute(0, 3, 1, 2), [side, side], mode="bilinear", antialias=True
        )
        resized.append(patch.flip(3) if flip else patch)
    return torch.cat(resized)


def _is_compiled(view: ViewSpec, images: Shaped[Tensor, "batch channels _ _"]) -> bool:
    """Whether the compiled operators can compute a view of images that are cropped."""
    return not view.channel_dropout and not view.noise and image_kernel.can_color(images)


@dataclass(frozen=True)
class MultiViewTransform:
    """The views of images that a method declares; the same wherever they are computed."""

    views: tuple[ViewSpec, ...]
    seed: int
    size: int
    """side of the views that do not have a size of their own"""
    samples: SampleSpec = RGB

    def crop(
        self, images: list[Shaped[Tensor, "channels _ _"]], epoch: int, ids: Int[Tensor, " batch"]
    ) -> list[Shaped[Tensor, "batch channels _ _"]]:
        """Return flipped crops of images of any sizes, one tensor per view.

        A loader worker calls this, so that an image is decoded once for all of its views.
        """
        sizes = torch.tensor([image.shape[1:] for image in images])
        compiled = image_kernel.can_crop(images)
        crops = []
        for view in self.single_views():
            address = Address(self.seed, epoch, ids, view.stream)
            boxes = draw_boxes(view, address, *sizes.unbind(1))
            flips = draw_flips(view, address)
            crop = image_kernel.crop if compiled else crop_one_by_one
            crops.append(crop(images, boxes, flips, self.crop_side(view)))
        return crops

    def finish(
        self,
        images: Shaped[Tensor, "batch height width channels"]
        | list[Shaped[Tensor, "batch channels _ _"]],
        epoch: int,
        ids: Int[Tensor, " batch"],
    ) -> tuple[Float[Tensor, "batch ..."], ...]:
        """Return the views of whole images of one size, or of the crops that `crop` returned.

        A view is a tensor (batch, channels, side, side), with jigsaw patches (batch, patches,
        channels, side, side).
        """
        views = self.single_views()
        if isinstance(images, Tensor) and type(self).crop is not MultiViewTransform.crop:
            images = self.crop(list(images.movedim(3, 1)), epoch, ids)  # of `views.module`
        cropped = isinstance(images, list)
        inputs = images if isinstance(images, list) else [images] * len(views)
        outputs = []
        for pixels, view in zip(inputs, views, strict=True):
            chunk = max(1, PIXELS // self.crop_side(view) ** 2)
            whole = cropped and not view.jigsaw and _is_compiled(view, pixels)
            if whole or pixels.device.type != "cpu":
                chunk = len(ids)
            shape = self.shape(view)
            output = torch.empty(len(ids), *shape, device=pixels.device)
            parts = (tensor.split(chunk) for tensor in (output, pixels, ids))
            for output_part, pixels_part, ids_part in zip(*parts, strict=True):
                address = Address(self.seed, epoch, ids_part, view.stream)
                output_part = output_part.view(-1, *shape[-3:])
                self._augment(pixels_part, view, address, cropped=cropped, out=output_part)
            outputs.append(output)
        return tuple(outputs)

    def _augment(
        self, images: Tensor, view: ViewSpec, address: Address, *, cropped: bool, out: Tensor
    ) -> None:
        output = images
        if not cropped:
            heights, widths = torch.tensor(images.shape[1:3]).expand(len(images), 2).unbind(1)
            boxes = draw_boxes(view, address, heights, widths)
            flips = draw_flips(view, address)
            compiled = image_kernel.can_resized_crop(images)
            crop = image_kernel.resized_crop if compiled else resized_crop
            output = crop(images, boxes, flips, self.crop_side(view))
        if view.jigsaw:
            address = PatchAddress(
                address.seed, address.epoch, address.ids, address.stream, view.jigsaw**2
            )
            corners, flips = draw_patches(view, address, self.crop_side(view))
            output = cut_patches(to_unit(output), corners, flips, self.side(view))
        colors = draw_colors(view, address) if view.has_color else None
        mean, std = self.samples.mean, self.samples.std
        if _is_compiled(view, output):
            image_kernel.color(output, colors, mean, std, out=out)
            return
        output = to_unit(output.contiguous())
        if colors is not None:
            output = apply_color(output, colors)
        if view.channel_dropout:
            dropped = address.many(output.shape[1], DROPOUT) < view.channel_dropout
            output = drop_channels(output, dropped)
        if view.noise:
            amount = (view.noise * address.uniform[:, _NOISE]).float()[:, None, None, None]
            output = add_noise(output, amount * address.normal(tuple(output.shape[1:])))
        normalize(output, mean, std, out=out)

    def single_views(self) -> list[ViewSpec]:
        """The views one by one, in the order of the output."""
        return [single for view in self.views for single in view.expand()]

    def side(self, view: ViewSpec) -> int:
        """The side in pixels of what a network sees: a view, or a patch of it."""
        crop_side = self.crop_side(view)
        return patch_side(view, crop_side) if view.jigsaw else crop_side

    def crop_side(self, view: ViewSpec) -> int:
        """The side of a view in pixels, before patches are cut from it."""
        return view.size or round(view.scale * self.size)

    def shape(self, view: ViewSpec) -> tuple[int, ...]:
        """The shape of an image in a view."""
        square = (self.samples.channels, self.side(view), self.side(view))
        return (view.jigsaw**2, *square) if view.jigsaw else square
