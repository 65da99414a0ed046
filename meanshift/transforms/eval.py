"""The evaluation transform: images of one size, resized and center-cropped, without randomness."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from jaxtyping import Int, UInt8
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms.v2 import functional as TF

from meanshift.data import Source, UnreadableSample
from meanshift.data.bad_files import read_or_replace
from meanshift.runtime import distributed

TRANSFORM_VERSION = 1
"""raise it when `eval_transform` changes, so that no older feature cache is used"""


def eval_transform(
    source: Source,
    indices: Int[Tensor, " batch"],
    image_size: int,
    resize: int = 0,
    bad: dict[int, UnreadableSample] | None = None,
    bicubic: bool = False,
) -> UInt8[Tensor, "batch channels _ _"]:
    """Read images as they are evaluated: small ones of one size unchanged, others center-cropped.

    The short side is resized to `resize` (0: 256/224 of `image_size`) before the crop: 256 and 224
    in the authors' code. Small arrays keep their own size, or are enlarged to `image_size`. An
    unreadable image raises an error, or if `bad` is given it is added there and replaced by a gray
    image.
    """
    interpolation = TF.InterpolationMode.BICUBIC if bicubic else TF.InterpolationMode.BILINEAR
    images: Iterable[Tensor]
    if source.uniform:
        batch = source.read_batch(indices).permute(0, 3, 1, 2)
        side = max(batch.shape[2:])
        if side < image_size:  # training enlarged them too
            batch = TF.resize(batch, [image_size, image_size], interpolation, antialias=True)
        if side <= max(image_size, 64):
            return batch
        images = batch.unbind(0)
    else:
        images = (_read(source, index, image_size, bad) for index in indices.tolist())
    short_side = [resize or round(image_size * 256 / 224)]
    square = [image_size, image_size]
    views = []
    for image in images:
        # Files of small images are evaluated like arrays of them.
        if image_size > 64 or list(image.shape[1:]) != square:
            image = TF.resize(image, short_side, interpolation, antialias=True)
            image = TF.center_crop(image, square)
        views.append(image)
    return torch.stack(views)


def needs_no_resize(source: Source, image_size: int) -> bool:
    """Whether `eval_transform` leaves every image of a source unchanged."""
    if not source.uniform:
        return False
    side = max(source.read_batch(torch.tensor([0])).shape[1:3])
    return image_size <= side <= max(image_size, 64)


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
        return source.read(index)
    image, _, errors = read_or_replace(source, index, gray_size=image_size)
    if errors:
        bad[index] = errors[0]
    return image
