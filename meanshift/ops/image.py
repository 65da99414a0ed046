"""Arithmetic on whole batches of images: crop, mirror, jitter, gray, blur, normalize.

Each image of a batch has its own crop, colors and blur, and no loop runs over the images.
Resampling is a product with two small banded matrices an image.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor
from torch.nn import functional as F

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's, as the authors use
_LUMA = (0.2989, 0.587, 0.114)
_CONTRAST, _SATURATION, _HUE = 1, 2, 3  # brightness is 0
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class ColorParameters:
    """What a strong view does to the colors of each image of a batch."""

    factors: Float[Tensor, "batch 4"]
    """brightness, contrast, saturation (1 is unchanged) and hue shift (0 is unchanged)"""
    sequence: Int[Tensor, "batch 4"]
    """the order in which the four are applied"""
    jittered: Bool[Tensor, " batch"]
    grayed: Bool[Tensor, " batch"]
    sigma: Float[Tensor, " batch"]
    """deviation of the blur in pixels; 0 is no blur"""


def crop(
    images: UInt8[Tensor, "batch height width channels"],
    boxes: Int[Tensor, "batch 4"],
    flips: Bool[Tensor, " batch"],
    size: int,
) -> Float[Tensor, "batch channels size size"]:
    """Cut, resize (bilinear, antialiased) and mirror each image of a batch; values in [0, 1]."""
    device, (height, width) = images.device, images.shape[1:3]
    top, left, h, w = (boxes[:, i].to(device, torch.float32, non_blocking=True) for i in range(4))
    down = _resampling(top, h, height, size)
    across = _resampling(left, w, width, size)
    flips = flips.to(device, non_blocking=True)[:, None, None]
    across = torch.where(flips, across.flip(1), across)
    # Rows of all channels side by side, so that each image is two products and no copy.
    rows = images.permute(0, 1, 3, 2).float().div_(255)
    wide = rows.flatten(1, 2) @ across.mT
    cut = down @ wide.view(len(wide), height, -1)
    return cut.view(len(cut), size, -1, size).permute(0, 2, 1, 3).contiguous()


def apply_color(
    images: Float[Tensor, "batch 3 height width"], drawn: ColorParameters
) -> Float[Tensor, "batch 3 height width"]:
    """Jitter, gray and blur, in MoCo v2's order."""
    return blur(to_grayscale(jitter(images, drawn), drawn.grayed), drawn.sigma)


def jitter(
    images: Float[Tensor, "batch 3 height width"], drawn: ColorParameters
) -> Float[Tensor, "batch 3 height width"]:
    """Brightness, contrast, saturation and hue, each image in its own order.

    The first three are one formula, clamp(f x + (1 - f) other), where `other` is black, the mean
    gray or the gray image; so each of three passes serves whichever of them is due, and hue comes
    in before, between or after them.
    """
    images, device = images.clone(), images.device
    hue_at = (drawn.sequence == _HUE).int().argmax(1)
    blends = drawn.sequence[drawn.sequence != _HUE].view(-1, 3)
    factors = torch.where(
        drawn.jittered[:, None], drawn.factors, drawn.factors.new_tensor([1, 1, 1, 0])
    )
    for position in range(4):
        due = (drawn.jittered & (hue_at == position)).nonzero()[:, 0]
        if len(due):
            shift = factors[due, _HUE].to(device, images.dtype, non_blocking=True)
            due = due.to(device, non_blocking=True)
            images.index_copy_(0, due, adjust_hue(images[due], shift))
        if position == 3:
            break
        kind = blends[:, position]
        factor = factors.gather(1, kind[:, None])[:, 0]
        weights = torch.stack(
            [factor, (1 - factor) * (kind == _SATURATION), (1 - factor) * (kind == _CONTRAST)]
        )
        keep, to_gray, to_mean = weights.to(device, images.dtype, non_blocking=True)[
            ..., None, None, None
        ]
        gray_image = luma(images)
        other = to_gray * gray_image + to_mean * gray_image.mean((1, 2, 3), keepdim=True)
        torch.addcmul(other, keep, images, out=images).clamp_(0, 1)
    return images


def luma(images: Float[Tensor, "batch 3 height width"]) -> Float[Tensor, "batch 1 height width"]:
    """The gray of an image, by the weights of torchvision."""
    red, green, blue = images.unbind(1)
    return (_LUMA[0] * red).add_(green, alpha=_LUMA[1]).add_(blue, alpha=_LUMA[2])[:, None]


def adjust_hue(
    images: Float[Tensor, "batch 3 height width"], shift: Float[Tensor, " batch"]
) -> Float[Tensor, "batch 3 height width"]:
    """Turn the hue of each image by a share of the circle."""
    red, green, blue = images.unbind(1)
    value = torch.maximum(torch.maximum(red, green), blue)
    chroma = value - torch.minimum(torch.minimum(red, green), blue)
    sectors = torch.where(  # times chroma: one division serves all three
        value == red,
        green - blue,
        torch.where(
            value == green,
            (blue - red).add_(chroma, alpha=2),
            (red - green).add_(chroma, alpha=4),
        ),
    )
    turn = sectors.div_(chroma.mul(6).clamp_(min=_TINY))  # in circles; 0 where nothing has color
    turn += shift[:, None, None] + 1  # never negative
    # The inverse transform in closed form: a channel falls from `value` by up to `chroma`.
    fall = (turn[:, None] + _constant((5 / 6, 3 / 6, 1 / 6), images.device)).frac_()
    fall = fall.sub_(1 / 3).abs_().mul_(-6).add_(2).clamp_(0, 1)
    return torch.addcmul(value[:, None], chroma[:, None], fall, value=-1)


def to_grayscale(
    images: Float[Tensor, "batch 3 height width"], chosen: Bool[Tensor, " batch"]
) -> Float[Tensor, "batch 3 height width"]:
    """Take the color out of the chosen images."""
    due = chosen.nonzero()[:, 0].to(images.device, non_blocking=True)
    return images.index_copy(0, due, luma(images[due]).expand(-1, 3, -1, -1))


def blur(
    images: Float[Tensor, "batch channels height width"], sigma: Float[Tensor, " batch"]
) -> Float[Tensor, "batch channels height width"]:
    """Gaussian blur, reflected at the borders, where `sigma` is above 0.

    A kernel reaches three of its deviations: up to 13 taps at the paper's largest sigma of 2.
    """
    chosen = (sigma > 0).nonzero()[:, 0]
    if not len(chosen):
        return images
    reach = min(math.ceil(3 * float(sigma.max())), min(images.shape[2:]) - 1)
    sigma = sigma[chosen].to(images.device, images.dtype, non_blocking=True)
    chosen = chosen.to(images.device, non_blocking=True)
    planes = images[chosen].flatten(0, 1)[None]  # every channel of every image has its kernel
    across = _gaussian(sigma, reach).repeat_interleave(images.shape[1], 0)[:, None, None]
    wide = F.conv2d(F.pad(planes, [reach] * 4, mode="reflect"), across, groups=len(across))
    blurred = F.conv2d(wide, across.mT, groups=len(across))
    return images.index_copy(0, chosen, blurred.view(-1, *images.shape[1:]))


def normalize(
    images: Float[Tensor, "batch channels height width"],
    out: Float[Tensor, "batch channels height width"] | None = None,
) -> Float[Tensor, "batch channels height width"]:
    """Values in [0, 1] to ImageNet's zero mean and unit deviation."""
    centered = torch.sub(images, _constant(MEAN, images.device), out=out)
    return centered.div_(_constant(STD, images.device))


@functools.cache
def _constant(values: tuple[float, ...], device: torch.device) -> Tensor:
    """One value a channel, sent to the device once: a copy in each batch would wait for it."""
    return torch.tensor(values, device=device)[:, None, None]


def _resampling(
    start: Float[Tensor, " batch"], length: Float[Tensor, " batch"], inputs: int, outputs: int
) -> Float[Tensor, "batch outputs inputs"]:
    """Triangle weights from the `length` pixels after `start` to `outputs` pixels, antialiased."""
    scale = (length / outputs)[:, None, None]
    center = (torch.arange(outputs, device=start.device)[:, None] + 0.5) * scale
    pixel = torch.arange(inputs, device=start.device) - start[:, None, None]
    weights = (1 - (pixel + 0.5 - center).abs() / scale.clamp(min=1)).clamp_(min=0)
    weights *= (pixel >= 0) & (pixel < length[:, None, None])
    return weights / weights.sum(2, keepdim=True)


def _gaussian(sigma: Float[Tensor, " batch"], reach: int) -> Float[Tensor, "batch taps"]:
    taps = torch.arange(-reach, reach + 1, device=sigma.device)
    kernel = (-0.5 * (taps / sigma[:, None]) ** 2).exp()
    kernel *= taps.abs() <= (3 * sigma[:, None]).ceil()  # its own reach, whatever its batch mates'
    return kernel / kernel.sum(1, keepdim=True)
