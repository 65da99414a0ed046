"""Batched image operators: crop, resized crop, color jitter, grayscale, blur, solarize, normalize.

Each image of a batch has its own parameters, and no loop runs over the images. The operators are
named after those of `torchvision.transforms.v2.functional` and give the same results.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.nn import functional as F

from meanshift.config.samples import IMAGENET_MEAN, IMAGENET_STD

_GRAY_WEIGHTS = (0.2989, 0.587, 0.114)  # of red, green and blue, as in torchvision
_CONTRAST, _SATURATION, _HUE = 1, 2, 3  # columns of the factors; brightness is 0
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class ColorParameters:
    """The color operators of a strong view, for each image of a batch."""

    factors: Float[Tensor, "batch 4"]
    """brightness, contrast, saturation (1 is unchanged) and hue shift (0 is unchanged)"""
    sequence: Int[Tensor, "batch 4"]
    """the order in which these four are applied"""
    jittered: Bool[Tensor, " batch"]
    grayed: Bool[Tensor, " batch"]
    sigma: Float[Tensor, " batch"]
    """standard deviation of the blur in pixels; 0 is no blur"""
    solarized: Bool[Tensor, " batch"]


def cut_to_aspect(
    images: Shaped[Tensor, "*batch height width"], most: int
) -> Shaped[Tensor, "*batch _ _"]:
    """The middle of images whose long side is more than `most` times the short one."""
    height, width = images.shape[-2:]
    cut_height, cut_width = min(height, most * width), min(width, most * height)
    top, left = (height - cut_height) // 2, (width - cut_width) // 2
    return images[..., top : top + cut_height, left : left + cut_width]


def to_unit(images: Shaped[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Values in [0, 1]: bytes are divided by 255, floats are there already."""
    return images.float().div_(255) if images.dtype == torch.uint8 else images


def resized_crop(
    images: Shaped[Tensor, "batch height width channels"],
    boxes: Int[Tensor, "batch 4"],
    flips: Bool[Tensor, " batch"],
    size: int,
) -> Float[Tensor, "batch channels size size"]:
    """Crop, resize (bilinear, antialiased) and flip each image of a batch; values are in [0, 1].

    A box is (top, left, height, width). Resampling is a product with two banded matrices per image.
    """
    device = images.device
    image_height, image_width = images.shape[1:3]
    top, left, height, width = boxes.to(device, torch.float32, non_blocking=True).unbind(1)
    vertical = _resize_matrix(top, height, image_height, size)
    horizontal = _resize_matrix(left, width, image_width, size)
    flips = flips.to(device, non_blocking=True)[:, None, None]
    horizontal = torch.where(flips, horizontal.flip(1), horizontal)
    # The channels of a row follow one another, so that each image is two products and no copy.
    rows = to_unit(images.permute(0, 1, 3, 2))
    resized = rows.flatten(1, 2) @ horizontal.mT
    crops = vertical @ resized.view(len(resized), image_height, -1)
    return crops.view(len(crops), size, -1, size).permute(0, 2, 1, 3).contiguous()


def cut_patches(
    images: Float[Tensor, "batch channels height width"],
    corners: Int[Tensor, "batch patches 2"],
    flips: Bool[Tensor, "batch patches"],
    size: int,
) -> Float[Tensor, "batch_patches channels size size"]:
    """Cut patches from each image, with their top left corners at (top, left); flip some of them.

    The patches of an image follow one another.
    """
    device = images.device
    corners = corners.to(device, non_blocking=True)
    flips = flips.to(device, non_blocking=True)[:, :, None]
    pixel = torch.arange(size, device=device)
    rows = corners[:, :, :1] + pixel
    columns = corners[:, :, 1:] + torch.where(flips, pixel.flip(0), pixel)
    image = torch.arange(len(images), device=device)[:, None, None, None]
    patches = images.permute(0, 2, 3, 1)[image, rows[..., None], columns[:, :, None]]
    return patches.permute(0, 1, 4, 2, 3).flatten(0, 1).contiguous()


def apply_color(
    images: Float[Tensor, "batch channels height width"], parameters: ColorParameters
) -> Float[Tensor, "batch channels height width"]:
    """Apply color jitter, grayscale and blur in the order of MoCo v2, then solarize as BYOL.

    Saturation, hue and grayscale are for RGB images; others are left as they are by them.
    """
    images = color_jitter(images, parameters)
    if images.shape[1] == 3:
        images = to_grayscale(images, parameters.grayed)
    return solarize(gaussian_blur(images, parameters.sigma), parameters.solarized)


def color_jitter(
    images: Float[Tensor, "batch channels height width"], parameters: ColorParameters
) -> Float[Tensor, "batch channels height width"]:
    """Adjust brightness, contrast, saturation and hue, in an order of its own for each image.

    The first three are one formula, clamp(f x + (1 - f) other), where `other` is black, the mean
    gray or the gray image. So each of three passes applies one of them, a different one for each
    image, and the hue is adjusted before, between or after the passes.
    """
    images = images.clone()
    device = images.device
    is_rgb = images.shape[1] == 3
    hue_position = (parameters.sequence == _HUE).int().argmax(1)
    operators = parameters.sequence[parameters.sequence != _HUE].view(-1, 3)
    unchanged = parameters.factors.new_tensor([1, 1, 1, 0])
    factors = torch.where(parameters.jittered[:, None], parameters.factors, unchanged)
    for position in range(4):
        chosen = (parameters.jittered & (hue_position == position)).nonzero()[:, 0]
        if is_rgb and len(chosen):
            shift = factors[chosen, _HUE].to(device, images.dtype, non_blocking=True)
            chosen = chosen.to(device, non_blocking=True)
            images.index_copy_(0, chosen, adjust_hue(images[chosen], shift))
        if position == 3:
            break
        operator = operators[:, position]
        factor = factors.gather(1, operator[:, None])[:, 0]
        if not is_rgb:
            factor = torch.where(operator == _SATURATION, 1.0, factor)
        gray_weight = (1 - factor) * (operator == _SATURATION)
        mean_weight = (1 - factor) * (operator == _CONTRAST)
        weights = torch.stack([factor, gray_weight, mean_weight])
        weights = weights.to(device, images.dtype, non_blocking=True)[..., None, None, None]
        gray = rgb_to_grayscale(images) if is_rgb else images.mean(1, keepdim=True)
        other = weights[1] * gray + weights[2] * gray.mean((1, 2, 3), keepdim=True)
        torch.addcmul(other, weights[0], images, out=images).clamp_(0, 1)
    return images


def rgb_to_grayscale(
    images: Float[Tensor, "batch 3 height width"],
) -> Float[Tensor, "batch 1 height width"]:
    """Return the gray channel of each image, with torchvision's weights."""
    red, green, blue = images.unbind(1)
    red_weight, green_weight, blue_weight = _GRAY_WEIGHTS
    gray = (red_weight * red).add_(green, alpha=green_weight).add_(blue, alpha=blue_weight)
    return gray[:, None]


def adjust_hue(
    images: Float[Tensor, "batch 3 height width"], shift: Float[Tensor, " batch"]
) -> Float[Tensor, "batch 3 height width"]:
    """Rotate the hue of each image by a fraction of the color circle."""
    red, green, blue = images.unbind(1)
    value = torch.maximum(torch.maximum(red, green), blue)
    chroma = value - torch.minimum(torch.minimum(red, green), blue)
    sector = torch.where(  # multiplied by the chroma, so that there is only one division
        value == red,
        green - blue,
        torch.where(
            value == green,
            (blue - red).add_(chroma, alpha=2),
            (red - green).add_(chroma, alpha=4),
        ),
    )
    hue = sector.div_(chroma.mul(6).clamp_(min=_TINY))  # in circles; 0 for gray pixels
    hue += shift[:, None, None] + 1  # never negative
    # The inverse transform in closed form: a channel is below `value` by a fraction of `chroma`.
    fraction = (hue[:, None] + _channel_constant((5 / 6, 3 / 6, 1 / 6), images.device)).frac_()
    fraction = fraction.sub_(1 / 3).abs_().mul_(-6).add_(2).clamp_(0, 1)
    return torch.addcmul(value[:, None], chroma[:, None], fraction, value=-1)


def to_grayscale(
    images: Float[Tensor, "batch 3 height width"], mask: Bool[Tensor, " batch"]
) -> Float[Tensor, "batch 3 height width"]:
    """Convert the images of the mask to gray."""
    chosen = mask.nonzero()[:, 0].to(images.device, non_blocking=True)
    gray = rgb_to_grayscale(images[chosen]).expand(-1, 3, -1, -1)
    return images.index_copy(0, chosen, gray)


def gaussian_blur(
    images: Float[Tensor, "batch channels height width"], sigma: Float[Tensor, " batch"]
) -> Float[Tensor, "batch channels height width"]:
    """Blur the images whose `sigma` is above 0, with reflection at the borders.

    A kernel has a radius of three standard deviations: 13 taps at the paper's largest sigma of 2.
    """
    chosen = (sigma > 0).nonzero()[:, 0]
    if not len(chosen):
        return images
    radius = min(math.ceil(3 * float(sigma.max())), min(images.shape[2:]) - 1)
    sigma = sigma[chosen].to(images.device, images.dtype, non_blocking=True)
    chosen = chosen.to(images.device, non_blocking=True)
    planes = images[chosen].flatten(0, 1)[None]  # every channel of every image has its kernel
    kernels = _gaussian_kernels(sigma, radius)
    kernels = kernels.repeat_interleave(images.shape[1], 0)[:, None, None]
    padded = F.pad(planes, [radius] * 4, mode="reflect")
    blurred = F.conv2d(padded, kernels, groups=len(kernels))
    blurred = F.conv2d(blurred, kernels.mT, groups=len(kernels))
    return images.index_copy(0, chosen, blurred.view(-1, *images.shape[1:]))


def solarize(
    images: Float[Tensor, "batch channels height width"],
    mask: Bool[Tensor, " batch"],
    threshold: float = 0.5,
) -> Float[Tensor, "batch channels height width"]:
    """Invert the values at or above the threshold in the images of the mask."""
    chosen = mask.nonzero()[:, 0]
    if not len(chosen):
        return images
    chosen = chosen.to(images.device, non_blocking=True)
    values = images[chosen]
    return images.index_copy(0, chosen, torch.where(values < threshold, values, 1 - values))


def add_noise(
    images: Float[Tensor, "batch channels *size"],
    noise: Float[Tensor, "batch channels *size"],
) -> Float[Tensor, "batch channels *size"]:
    """Add noise to values in [0, 1], which stay there."""
    return (images + noise.to(images.device, images.dtype, non_blocking=True)).clamp_(0, 1)


def drop_channels(
    images: Float[Tensor, "batch channels height width"], dropped: Bool[Tensor, "batch channels"]
) -> Float[Tensor, "batch channels height width"]:
    """Replace the dropped channels of each image by their mean."""
    mask = dropped.to(images.device, non_blocking=True)[:, :, None, None]
    return torch.where(mask, images.mean((2, 3), keepdim=True), images)


def normalize(
    images: Float[Tensor, "batch channels *size"],
    mean: tuple[float, ...] = IMAGENET_MEAN,
    std: tuple[float, ...] = IMAGENET_STD,
    *,
    out: Float[Tensor, "batch channels *size"] | None = None,
) -> Float[Tensor, "batch channels *size"]:
    """Normalize values in [0, 1] by the mean and the standard deviation of each channel."""
    dims = images.ndim - 2
    centered = torch.sub(images, _channel_constant(mean, images.device, dims), out=out)
    return centered.div_(_channel_constant(std, images.device, dims))


@functools.cache
def _channel_constant(values: tuple[float, ...], device: torch.device, dims: int = 2) -> Tensor:
    """One value per channel on the device; cached, since a copy per batch would wait for it."""
    return torch.tensor(values, device=device).view(-1, *[1] * dims)


def _resize_matrix(
    start: Float[Tensor, " batch"], length: Float[Tensor, " batch"], inputs: int, outputs: int
) -> Float[Tensor, "batch outputs inputs"]:
    """Triangle filters that resize the `length` pixels after `start` to `outputs` pixels."""
    scale = (length / outputs)[:, None, None]
    center = (torch.arange(outputs, device=start.device)[:, None] + 0.5) * scale
    pixel = torch.arange(inputs, device=start.device) - start[:, None, None]
    weights = (1 - (pixel + 0.5 - center).abs() / scale.clamp(min=1)).clamp_(min=0)
    weights *= (pixel >= 0) & (pixel < length[:, None, None])
    return weights / weights.sum(2, keepdim=True)


def _gaussian_kernels(sigma: Float[Tensor, " batch"], radius: int) -> Float[Tensor, "batch taps"]:
    taps = torch.arange(-radius, radius + 1, device=sigma.device)
    kernels = (-0.5 * (taps / sigma[:, None]) ** 2).exp()
    # Each kernel has its own radius, so that it does not depend on the rest of the batch.
    kernels *= taps.abs() <= (3 * sigma[:, None]).ceil()
    return kernels / kernels.sum(1, keepdim=True)
