"""Images as they are judged: whole batches, of one size, without chance."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from jaxtyping import Int, UInt8
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms.v2 import functional as TF

from meanshift.data import Source, UnreadableSample
from meanshift.runtime import distributed

TRANSFORM_VERSION = 1  # raised whenever `prepare` changes, so that older files are not met again


def eval_transform(
    source: Source,
    indices: Int[Tensor, " batch"],
    image_size: int,
    resize: int = 0,
    bad: dict[int, UnreadableSample] | None = None,
    bicubic: bool = False,
) -> UInt8[Tensor, "batch channels _ _"]:
    """Images as they are judged: small ones of one size as they are, others cut from the center.

    The short side is resized to `resize` (0: 256/224 of `image_size`) and the center taken: 256 and
    224 in the authors' code. Small arrays keep their own size, or are enlarged to `image_size`. An
    unreadable image raises, or where `bad` is given it is put there and counts as a gray one.
    """
    way = TF.InterpolationMode.BICUBIC if bicubic else TF.InterpolationMode.BILINEAR
    if source.uniform:
        images = source.gather(indices).permute(0, 3, 1, 2)
        if max(images.shape[2:]) <= max(image_size, 64):
            if max(images.shape[2:]) < image_size:  # trained enlarged, so judged enlarged
                images = TF.resize(images, [image_size, image_size], way, antialias=True)
            return images
        unbound: Iterable[Tensor] = images.unbind(0)
    else:
        unbound = (_readable(source, index, image_size, bad) for index in indices.tolist())
    short, square = [resize or round(image_size * 256 / 224)], [image_size, image_size]
    keep = image_size <= 64  # files of small images are judged as arrays of them are
    return torch.stack(
        [
            one
            if keep and list(one.shape[1:]) == square
            else TF.center_crop(TF.resize(one, short, way, antialias=True), square)
            for one in unbound
        ]
    )


def needs_no_resize(source: Source, image_size: int) -> bool:
    """Whether `prepare` leaves every image of a source alone."""
    if not source.uniform:
        return False
    side = max(source.gather(torch.tensor([0])).shape[1:3])
    return image_size <= side <= max(image_size, 64)


def first_index_of_rank(images: int, batch_size: int) -> int:
    """The first image of this process's part of the batches."""
    return distributed.shard_range(-(-images // batch_size))[0] * batch_size


class EvalDataset(Dataset[tuple[Tensor, dict[int, UnreadableSample]]]):
    """Whole batches of prepared images, with what could not be read.

    Of several processes each has its part of the batches, which are those of one.
    """

    def __init__(
        self, source: Source, image_size: int, resize: int, batch_size: int, bicubic: bool
    ) -> None:
        self.source, self.image_size, self.resize = source, image_size, resize
        self.bicubic = bicubic
        batches = torch.arange(len(source)).split(batch_size)
        self.batches = batches[slice(*distributed.shard_range(len(batches)))]

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, batch: int) -> tuple[Tensor, dict[int, UnreadableSample]]:
        bad: dict[int, UnreadableSample] = {}
        indices = self.batches[batch]
        images = eval_transform(
            self.source, indices, self.image_size, self.resize, bad, bicubic=self.bicubic
        )
        return images.contiguous(), bad


def _readable(
    source: Source, index: int, image_size: int, bad: dict[int, UnreadableSample] | None
) -> Tensor:
    try:
        return source.read(index)
    except UnreadableSample as error:
        if bad is None:
            raise
        bad[index] = error
        return torch.full((3, image_size, image_size), 128, dtype=torch.uint8)
