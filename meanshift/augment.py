"""The weak and the strong view of the paper, for whole batches at once, on the device.

What a view is made of is drawn from its address (`keyed`); how it is made is arithmetic on the
batch. Resampling and blur are products with small banded matrices, a pair a picture, so that each
picture of a batch can have its own crop and blur without a loop.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor
from torchvision.transforms.v2 import functional as TF

from meanshift import keyed
from meanshift.config import Strength, Views

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's, as the authors use
_LUMA = (0.2989, 0.587, 0.114)
_ATTEMPTS = 10  # of torchvision's RandomResizedCrop, before it falls back to the centre
_BRIGHTNESS, _CONTRAST, _SATURATION, _HUE = range(4)

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
        return keyed.uniform(self.seed, self.epoch, self.ids, self.stream, _COLUMNS)


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
    centre_w = torch.where(aspect > 4 / 3, (heights * 4 / 3).round(), widths)
    centre_h = torch.where(aspect < 3 / 4, (widths / (3 / 4)).round(), heights)
    none = ~fits.any(1)
    w, h = torch.where(none, centre_w, w), torch.where(none, centre_h, h)
    top = torch.where(none, ((heights - h) / 2).floor(), top)
    left = torch.where(none, ((widths - w) / 2).floor(), left)
    return torch.stack([top, left, h, w], 1).long()


def draw_flips(views: Views, address: Address) -> Bool[Tensor, " batch"]:
    """Which views are mirrored."""
    return address.uniform[:, _FLIP] < views.flip


@dataclass(frozen=True)
class Colours:
    """What a strong view does to the colours of each picture of a batch."""

    factors: Float[Tensor, "batch 4"]
    """brightness, contrast, saturation (1 is unchanged) and hue shift (0 is unchanged)"""
    sequence: Int[Tensor, "batch 4"]
    """the order in which the four are applied"""
    jittered: Bool[Tensor, " batch"]
    grayed: Bool[Tensor, " batch"]
    sigma: Float[Tensor, " batch"]
    """deviation of the blur in pixels; 0 is no blur"""


def draw_colours(views: Views, address: Address) -> Colours:
    """Jitter, grey and blur of a strong view, by the rules of ColorJitter and of MoCo v2."""
    u = address.uniform
    reach = torch.tensor(views.jitter_strength, dtype=torch.float64)
    unchanged = torch.tensor([1.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    low, high = views.blur_sigma
    blurred = u[:, _BLURRED] < views.blur
    return Colours(
        factors=unchanged + reach * (2 * u[:, _FACTORS] - 1),
        sequence=u[:, _SEQUENCE].argsort(1),
        jittered=u[:, _JITTERED] < views.jitter,
        grayed=u[:, _GRAYED] < views.gray,
        sigma=torch.where(blurred, low + (high - low) * u[:, _SIGMA], 0.0),
    )


def crop(
    pictures: UInt8[Tensor, "batch height width channels"],
    boxes: Int[Tensor, "batch 4"],
    flips: Bool[Tensor, " batch"],
    size: int,
) -> Float[Tensor, "batch channels size size"]:
    """Cut, resize (bilinear, antialiased) and mirror each picture of a batch; values in [0, 1]."""
    device, (height, width) = pictures.device, pictures.shape[1:3]
    top, left, h, w = (boxes[:, i].to(device, torch.float32, non_blocking=True) for i in range(4))
    down = _resampling(top, h, height, size)
    across = _resampling(left, w, width, size)
    flips = flips.to(device, non_blocking=True)[:, None, None]
    across = torch.where(flips, across.flip(1), across)
    # Rows of all channels side by side, so that each picture is two products and no copy.
    rows = pictures.permute(0, 1, 3, 2).float().div_(255)
    wide = rows.flatten(1, 2) @ across.mT
    cut = down @ wide.view(len(wide), height, -1)
    return cut.view(len(cut), size, -1, size).permute(0, 2, 1, 3).contiguous()


def mirror(
    pictures: Float[Tensor, "batch channels height width"], flips: Bool[Tensor, " batch"]
) -> Float[Tensor, "batch channels height width"]:
    """Mirror the chosen pictures of a batch."""
    chosen = flips.to(pictures.device, non_blocking=True)[:, None, None, None]
    return torch.where(chosen, pictures.flip(3), pictures)


def colour(
    pictures: Float[Tensor, "batch 3 height width"], drawn: Colours
) -> Float[Tensor, "batch 3 height width"]:
    """Jitter, grey and blur, in MoCo v2's order."""
    return blur(grey(jitter(pictures, drawn), drawn.grayed), drawn.sigma)


def jitter(
    pictures: Float[Tensor, "batch 3 height width"], drawn: Colours
) -> Float[Tensor, "batch 3 height width"]:
    """Brightness, contrast, saturation and hue, each picture in its own order.

    The first three are one formula, clamp(f x + (1 - f) other), where `other` is black, the mean
    grey or the grey picture; so each of three passes serves whichever of them is due, and hue comes
    in before, between or after them.
    """
    device = pictures.device
    hue_at = (drawn.sequence == _HUE).int().argmax(1)
    blends = drawn.sequence[drawn.sequence != _HUE].view(-1, 3)
    factors = torch.where(
        drawn.jittered[:, None], drawn.factors, drawn.factors.new_tensor([1, 1, 1, 0])
    )
    for position in range(4):
        due = (drawn.jittered & (hue_at == position)).nonzero()[:, 0]
        if len(due):
            shift = factors[due, _HUE].to(device, pictures.dtype, non_blocking=True)
            due = due.to(device, non_blocking=True)
            pictures = pictures.index_copy(0, due, turn_hue(pictures[due], shift))
        if position == 3:
            break
        kind = blends[:, position]
        factor = factors.gather(1, kind[:, None])[:, 0]
        weights = torch.stack(
            [factor, (1 - factor) * (kind == _SATURATION), (1 - factor) * (kind == _CONTRAST)]
        )
        keep, to_grey, to_mean = weights.to(device, pictures.dtype, non_blocking=True)[
            ..., None, None, None
        ]
        grey_picture = luma(pictures)
        other = to_grey * grey_picture + to_mean * grey_picture.mean((1, 2, 3), keepdim=True)
        pictures = torch.addcmul(other, keep, pictures).clamp_(0, 1)
    return pictures


def luma(pictures: Float[Tensor, "batch 3 height width"]) -> Float[Tensor, "batch 1 height width"]:
    """The grey of a picture, by the weights of torchvision."""
    red, green, blue = pictures.unbind(1)
    return (_LUMA[0] * red).add_(green, alpha=_LUMA[1]).add_(blue, alpha=_LUMA[2])[:, None]


def turn_hue(
    pictures: Float[Tensor, "batch 3 height width"], shift: Float[Tensor, " batch"]
) -> Float[Tensor, "batch 3 height width"]:
    """Turn the hue of each picture by a share of the circle."""
    red, green, blue = pictures.unbind(1)
    value = torch.maximum(torch.maximum(red, green), blue)
    chroma = value - torch.minimum(torch.minimum(red, green), blue)
    scale = torch.where(chroma > 0, chroma, 1).reciprocal_()
    sector = torch.where(
        value == red,
        (green - blue) * scale,
        torch.where(value == green, 2 + (blue - red) * scale, 4 + (red - green) * scale),
    )
    turn = sector.div_(6).add_(shift[:, None, None] + 1)  # in circles, and never negative
    # The inverse transform in closed form: a channel falls from `value` by up to `chroma`.
    fall = (turn[:, None] + _constant((5 / 6, 3 / 6, 1 / 6), pictures.device)).frac_().mul_(6)
    fall = torch.minimum(fall, 4 - fall).clamp_(0, 1)
    return value[:, None] - chroma[:, None] * fall


def grey(
    pictures: Float[Tensor, "batch 3 height width"], chosen: Bool[Tensor, " batch"]
) -> Float[Tensor, "batch 3 height width"]:
    """Take the colour out of the chosen pictures."""
    chosen = chosen.to(pictures.device, non_blocking=True)[:, None, None, None]
    return torch.where(chosen, luma(pictures), pictures)


def blur(
    pictures: Float[Tensor, "batch channels height width"], sigma: Float[Tensor, " batch"]
) -> Float[Tensor, "batch channels height width"]:
    """Gaussian blur, reflected at the borders, where `sigma` is above 0.

    A kernel reaches three of its deviations: up to 13 taps at the paper's largest sigma of 2.
    """
    chosen = (sigma > 0).nonzero()[:, 0]
    if not len(chosen):
        return pictures
    reach = -(-3 * float(sigma.max()) // 1)
    sigma = sigma[chosen].to(pictures.device, pictures.dtype, non_blocking=True)
    chosen = chosen.to(pictures.device, non_blocking=True)
    height, width = pictures.shape[2:]
    down, across = _blurring(sigma, height, int(reach)), _blurring(sigma, width, int(reach))
    blurred = down[:, None] @ (pictures[chosen] @ across[:, None].mT)
    return pictures.index_copy(0, chosen, blurred)


def normalise(
    pictures: Float[Tensor, "batch channels height width"],
) -> Float[Tensor, "batch channels height width"]:
    """Values in [0, 1] to ImageNet's zero mean and unit deviation."""
    return (pictures - _constant(MEAN, pictures.device)) / _constant(DEVIATION, pictures.device)


@dataclass(frozen=True)
class TwoViews:
    """The target's and the online view of pictures, from a config: the same wherever it is made."""

    views: Views
    seed: int
    size: int

    def crop(
        self, pictures: list[UInt8[Tensor, "channels _ _"]], epoch: int, ids: Int[Tensor, " batch"]
    ) -> list[UInt8[Tensor, "batch channels size size"]]:
        """The crops of large pictures of any sizes, in a loader worker: decoded once, cut twice."""
        sizes, crops = torch.tensor([picture.shape[1:] for picture in pictures]), []
        for stream, _ in self._roles():
            boxes = draw_boxes(self.views, Address(self.seed, epoch, ids, stream), *sizes.unbind(1))
            pairs, square = zip(pictures, boxes.tolist(), strict=True), [self.size, self.size]
            cut = [TF.resized_crop(one, *box, square, antialias=True) for one, box in pairs]
            crops.append(torch.stack(cut))
        return crops

    def finish(
        self,
        pictures: UInt8[Tensor, "batch height width channels"]
        | list[UInt8[Tensor, "batch channels _ _"]],
        epoch: int,
        ids: Int[Tensor, " batch"],
    ) -> tuple[Float[Tensor, "batch channels _ _"], Float[Tensor, "batch channels _ _"]]:
        """(target view, online view) of a batch of whole pictures of one size, or of crops."""
        made = []
        for role, (stream, strength) in enumerate(self._roles()):
            address = Address(self.seed, epoch, ids, stream)
            flips = draw_flips(self.views, address)
            if isinstance(pictures, list):
                view = mirror(pictures[role].float().div_(255), flips)
            else:
                sizes = torch.tensor(pictures.shape[1:3]).expand(len(ids), 2)
                boxes = draw_boxes(self.views, address, *sizes.unbind(1))
                view = crop(pictures, boxes, flips, self.size)
            if strength == "strong":
                view = colour(view, draw_colours(self.views, address))
            made.append(normalise(view))
        return made[0], made[-1]

    def _roles(self) -> list[tuple[int, Strength]]:
        online: tuple[int, Strength] = (keyed.ONLINE, self.views.online)
        return [online] if self.views.same_view else [(keyed.TARGET, self.views.target), online]


@functools.cache
def _constant(values: tuple[float, ...], device: torch.device) -> Tensor:
    """One value a channel, sent to the device once: a copy in each batch would wait for it."""
    return torch.tensor(values, device=device)[:, None, None]


def _resampling(
    start: Float[Tensor, " batch"], length: Float[Tensor, " batch"], inputs: int, outputs: int
) -> Float[Tensor, "batch outputs inputs"]:
    """Triangle weights from the `length` pixels after `start` to `outputs` pixels, antialiased."""
    scale = (length / outputs)[:, None, None]
    centre = (torch.arange(outputs, device=start.device)[:, None] + 0.5) * scale
    pixel = torch.arange(inputs, device=start.device) - start[:, None, None]
    weights = (1 - (pixel + 0.5 - centre).abs() / scale.clamp(min=1)).clamp_(min=0)
    weights *= (pixel >= 0) & (pixel < length[:, None, None])
    return weights / weights.sum(2, keepdim=True)


def _blurring(
    sigma: Float[Tensor, " batch"], size: int, reach: int
) -> Float[Tensor, "batch size size"]:
    """Gaussian weights as a matrix, with the border reflected."""
    reach = min(reach, size - 1)
    taps = torch.arange(-reach, reach + 1, device=sigma.device)
    kernel = (-0.5 * (taps / sigma[:, None]) ** 2).exp()
    kernel *= taps.abs() <= (3 * sigma[:, None]).ceil()  # its own reach, whatever its batch mates'
    kernel = kernel / kernel.sum(1, keepdim=True)
    source = (torch.arange(size, device=sigma.device)[:, None] + taps).abs()
    source = torch.where(source >= size, 2 * (size - 1) - source, source)
    matrix = kernel.new_zeros(len(sigma), size, size)
    return matrix.scatter_add_(
        2, source.expand(len(sigma), -1, -1), kernel[:, None].expand(-1, size, -1)
    )
