"""The evaluation transform: images of one size, resized and center-cropped, without randomness."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from jaxtyping import Int, Shaped
from torch import Tensor
from torch.utils.data import Dataset

from meanshift.data import Source, UnreadableSample
from meanshift.data.bad_files import read_or_replace
from meanshift.data.convert import blank
from meanshift.ops.image import cut_to_aspect
from meanshift.runtime import distributed
from meanshift.transforms.signals import window

TRANSFORM_VERSION = 2
"""raise it when `eval_transform` changes, so that no older feature cache is used"""
_MAX_ASPECT = 16  # of an image that is resized as a whole; one pixel high and 60,000 wide: 12 GB


def eval_transform(
    source: Source,
    indices: Int[Tensor, " batch"],
    image_size: int,
    resize: int = 0,
    bad: dict[int, UnreadableSample] | None = None,
    bicubic: bool = False,
) -> Shaped[Tensor, "batch channels *size"]:
    """Read images as they are evaluated: resized and center-cropped to `image_size`.

    The short side is resized to `resize` before the crop. Without it: to 256/224 of `image_size`,
    which is 256 and 224 in the authors' code; arrays of exactly `image_size`, and files up to 64
    pixels, stay as they are, and smaller arrays are enlarged. An unreadable image raises an error,
    or if `bad` is given it is added there and replaced by a gray image.
    """
    square = [image_size, image_size]

    def fit_image(images: Tensor) -> Tensor:
        size = list(images.shape[-2:])
        if not resize and size == square and (source.uniform or image_size <= 64):
            return images
        target = [short_side(image_size, resize)]
        if not resize and source.uniform and max(size) < image_size:  # as training enlarges them
            target = square
        from torchvision.transforms.v2 import functional as TF  # slow to import

        interpolation = TF.InterpolationMode.BICUBIC if bicubic else TF.InterpolationMode.BILINEAR
        images = cut_to_aspect(images, _MAX_ASPECT)
        images = TF.resize(images, target, interpolation, antialias=True)
        cropped: Tensor = TF.center_crop(images, square)
        return cropped

    fit: Callable[[Tensor], Tensor] = fit_image
    if source.sample_spec.kind == "signal":
        fit = functools.partial(window, size=image_size, place=0.5)
    elif source.sample_spec.kind == "vector":
        fit = _as_it_is
    elif source.uniform:
        return fit(source.sample_batch(indices).permute(0, 3, 1, 2))
    source.prefetch(indices.tolist())
    return torch.stack([fit(_read(source, i, image_size, bad)) for i in indices.tolist()])


def _as_it_is(sample: Tensor) -> Tensor:
    return sample


def short_side(image_size: int, resize: int) -> int:
    """The short side before the crop to `image_size`; a smaller one would need black borders."""
    if resize and resize < image_size:
        raise ValueError(
            f"--resize {resize}: is below the image size of {image_size}; need at least that, or "
            f"a smaller --image-size too"
        )
    return resize or round(image_size * 256 / 224)


def needs_no_resize(source: Source, image_size: int, resize: int = 0) -> bool:
    """Whether `eval_transform` leaves every image of a source unchanged."""
    if source.sample_spec.kind != "image":
        return True
    if not source.uniform or resize not in (0, image_size):
        return False
    size = source.read_batch(torch.tensor([0])).shape[1:3]
    return tuple(size) == (image_size, image_size)


def rank_batches(images: int, batch_size: int) -> tuple[Int[Tensor, " batch"], ...]:
    """The indices of this process's batches; the batches are the same for any process count."""
    batches: tuple[Tensor, ...] = torch.arange(images).split(batch_size)
    first, last = distributed.shard_range(len(batches))
    return batches[first:last]


class EvalDataset(Dataset[tuple[Tensor, Tensor, dict[int, UnreadableSample]]]):
    """Whole batches: (indices, evaluation views, unreadable images).

    Several processes share the batches, unless each of them needs all (`shared=False`).
    """

    def __init__(
        self,
        source: Source,
        image_size: int,
        *,
        resize: int,
        bicubic: bool,
        batch_size: int,
        shared: bool = True,
    ) -> None:
        self.source = source
        self.image_size = image_size
        short_side(image_size, resize)  # an error here, and not in a worker
        self.resize = resize
        self.bicubic = bicubic
        self.batches = (
            rank_batches(len(source), batch_size)
            if shared
            else torch.arange(len(source)).split(batch_size)
        )

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, batch: int) -> tuple[Tensor, Tensor, dict[int, UnreadableSample]]:
        indices = self.batches[batch]
        bad: dict[int, UnreadableSample] = {}
        images = eval_transform(
            self.source, indices, self.image_size, self.resize, bad, bicubic=self.bicubic
        )
        return indices, images.contiguous(), bad


def _read(
    source: Source, index: int, image_size: int, bad: dict[int, UnreadableSample] | None
) -> Tensor:
    if bad is None:
        return source.sample(index)
    sides = {"image": 2, "signal": 1, "vector": 0}[source.sample_spec.kind]
    nothing = blank(source.sample_spec, [image_size] * sides)
    image, _, errors = read_or_replace(source.sample, index, blank=nothing)
    if errors:
        bad[index] = errors[0]
    return image
