"""Batches of a detector: decoded images by index, in a seeded order, with their targets."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import Dataset

from meanshift.config.samples import RGB
from meanshift.data.bad_files import (
    MAX_BAD_FRACTION_BOXES,
    ReadSample,
    read_or_replace,
    refuse_too_many,
)
from meanshift.data.convert import blank
from meanshift.data.loader import iterate
from meanshift.data.voc import DetectionDataset
from meanshift.evaluation.detection.settings import DetectionSettings
from meanshift.runtime import distributed, rng


class DecodedBatches(Dataset[list[ReadSample]]):
    """Images by lists of indices; the next readable image replaces one that cannot be read."""

    def __init__(self, dataset: DetectionDataset) -> None:
        self.dataset = dataset

    def __getitem__(self, indices: list[int]) -> list[ReadSample]:
        return [self._read(index) for index in indices]

    def _read(self, index: int) -> ReadSample:
        size = len(self.dataset)
        others = ((index + more) % size for more in range(1, size))
        return read_or_replace(self.dataset.read, index, others, blank=blank(RGB, [32, 32]))


def train_batches(
    train: DetectionDataset,
    settings: DetectionSettings,
    *,
    seed: int,
    start: int,
    stop: int,
    workers: int,
) -> Iterator[tuple[int, list[ReadSample]]]:
    """This process's part of the batches of steps `start` to `stop`, each with its step.

    Every image occurs once per epoch, in a new order; a batch may extend over two epochs.
    """
    rank, world = distributed.rank(), distributed.world_size()
    size = len(train)
    orders: dict[int, list[int]] = {}
    batches = []
    for step in range(start, stop):
        first = step * settings.batch_size
        indices = []
        for position in range(first + rank, first + settings.batch_size, world):
            epoch, place = divmod(position, size)
            if epoch not in orders:
                orders = {other: orders[other] for other in orders if other == epoch - 1}
                orders[epoch] = rng.permutation(seed, epoch, size).tolist()
            indices.append(orders[epoch][place])
        batches.append(indices)
    samples = iterate(DecodedBatches(train), batches, workers=workers)
    yield from zip(range(start, stop), samples, strict=True)


def inputs(
    train: DetectionDataset,
    samples: list[ReadSample],
    settings: DetectionSettings,
    *,
    seed: int,
    step: int,
    device: torch.device,
) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Images in 0..1 and their targets, half of them flipped.

    Seeds the global generator too: from it torchvision draws sizes, and the regions to learn from.
    """
    rank, world = distributed.rank(), distributed.world_size()
    torch.manual_seed(rng.derive_seed(seed, step * world + rank, rng.NETWORK))
    positions = step * settings.batch_size + rank + world * torch.arange(len(samples))
    flips = rng.uniform(seed, 0, positions, rng.ONLINE, 1)[:, 0] < 0.5
    images = []
    targets = []
    for (image, index, _), flip in zip(samples, flips.tolist(), strict=True):
        boxes = train.images[index].boxes
        labels = train.images[index].labels
        if flip:
            width = image.shape[2]
            image = image.flip(2)
            left, top, right, bottom = boxes.unbind(1)
            boxes = torch.stack([width - right, top, width - left, bottom], 1)
        images.append(image.to(device, non_blocking=True).float().div_(255))
        targets.append({"boxes": boxes.to(device), "labels": labels.to(device) + 1})
    return images, targets


def check_unreadable(bad: dict[str, str], dataset: DetectionDataset) -> None:
    """Refuse a dataset with too many unreadable images, given as title: reason."""
    refuse_too_many(
        len(bad),
        len(dataset),
        max_fraction=MAX_BAD_FRACTION_BOXES,
        spare=1,
        name=dataset.name,
        first=next((f"{title} ({reason})" for title, reason in bad.items()), ""),
        advice="repair them, or take them off the list",
    )
