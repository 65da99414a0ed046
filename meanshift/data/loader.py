"""Batches at their addresses: the images of each step, read by any number of workers."""

from __future__ import annotations

import signal
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Int, UInt8
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from meanshift.data.source import Source, UnreadableSample
from meanshift.runtime import distributed, rng


@dataclass
class Batch:
    """The images of one step: one tensor of whole ones, or the crops of each view."""

    step: int
    epoch: int
    ids: Int[Tensor, " batch"]
    labels: Int[Tensor, " batch"] | None
    images: UInt8[Tensor, "batch height width channels"] | list[UInt8[Tensor, "batch channels _ _"]]
    bad: list[tuple[str, str]]
    """images that could not be read, as (title, reason)"""

    def pin_memory(self) -> Batch:
        """Called by the DataLoader, so that copies to a GPU need not wait."""
        return self._each(Tensor.pin_memory)

    def to(self, device: torch.device) -> Batch:
        """The same batch on the device, by copies that do not wait; addresses (ids) stay behind."""
        return self._each(lambda held: held.to(device, non_blocking=True))

    def _each(self, move: Callable[[Tensor], Tensor]) -> Batch:
        held = self.images
        images = move(held) if isinstance(held, Tensor) else [move(crops) for crops in held]
        labels = None if self.labels is None else move(self.labels)
        return replace(self, labels=labels, images=images)


Crop = Callable[[list[Tensor], int, Tensor], list[Tensor]]
"""How a worker cuts decoded images: (images, epoch, ids) to the crops of each view."""


def batches(
    source: Source,
    crop: Crop,
    *,
    batch_size: int,
    seed: int,
    start: int,
    stop: int,
    partial: bool = False,
    workers: int = 0,
    pin_memory: bool = False,
) -> Generator[Batch, None, None]:
    """The batches of steps `start` to `stop`; a step's batch depends on nothing but its number.

    An epoch ends with an incomplete batch where `partial` is wished, else it leaves it out. Of
    several processes each gets its part of every batch, one after another.
    """
    steps = steps_per_epoch(source, batch_size, partial=partial)
    loader = DataLoader(
        _Reader(source, crop, seed),
        batch_size=None,
        sampler=_Steps(source, batch_size, steps, seed, start, stop),
        num_workers=0 if source.uniform else workers,
        prefetch_factor=2 if workers and not source.uniform else None,
        pin_memory=pin_memory,
        worker_init_fn=ignore_signals,
        generator=torch.Generator(),  # its base seed must not come from the global generator
    )
    return iterate(loader)


def steps_per_epoch(source: Source, batch_size: int, *, partial: bool = False) -> int:
    """Whole batches in a source; an incomplete one is left to later epochs, or counts as well."""
    if partial:
        return -(-len(source) // batch_size)
    if len(source) < batch_size:
        raise ValueError(
            f"{source.name}: {len(source)} images do not fill one batch of {batch_size}; "
            f"use --train.batch_size {max(2, len(source) // 4)} or fewer"
        )
    return len(source) // batch_size


def iterate(loader: DataLoader[Any]) -> Generator[Any, None, None]:
    """What a loader gives; its workers end with it, also when it ends in an error.

    Workers ignore the signals that would end them, so nobody may be left to wait for them.
    """
    items = iter(loader)
    try:
        yield from items
    finally:
        getattr(items, "_shutdown_workers", lambda: None)()


def ignore_signals(_: int) -> None:
    """Ctrl-C and schedulers signal the whole group; a worker must outlive the step being saved."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


Request = tuple[int, int, Tensor]  # step, epoch, ids


class _Steps(Sampler[Request]):
    def __init__(
        self, source: Source, batch_size: int, steps: int, seed: int, start: int, stop: int
    ) -> None:
        self.source, self.batch_size, self.steps, self.seed = source, batch_size, steps, seed
        self.start, self.stop = start, stop

    def __len__(self) -> int:
        return self.stop - self.start

    def __iter__(self) -> Iterator[Request]:
        order, ordered = torch.empty(0), -1
        for step in range(self.start, self.stop):
            epoch, batch = divmod(step, self.steps)
            if epoch != ordered:
                order, ordered = self.source.order(self.seed, epoch), epoch
            ids = order[batch * self.batch_size : (batch + 1) * self.batch_size]
            low, high = distributed.shard_range(len(ids))
            yield step, epoch, ids[low:high]


class _Reader(Dataset[Batch]):
    """Makes whole batches, so that a worker's work is one message."""

    def __init__(self, source: Source, crop: Crop, seed: int) -> None:
        self.source, self.crop, self.seed = source, crop, seed

    def __getitem__(self, request: Request) -> Batch:
        step, epoch, ids = request
        bad: list[tuple[str, str]] = []
        images: Tensor | list[Tensor]
        if self.source.uniform:
            images = self.source.gather(ids)
        else:
            read = [self._readable(int(index), bad) for index in ids]
            ids = torch.tensor([index for index, _ in read])
            images = self.crop([image for _, image in read], epoch, ids)
        labels = None if self.source.labels is None else self.source.labels[ids]
        return Batch(step, epoch, ids, labels, images, bad)

    def _readable(self, index: int, bad: list[tuple[str, str]]) -> tuple[int, Tensor]:
        """The image, or a stand-in that depends on nothing but its id."""
        try:
            return index, self.source.read(index)
        except UnreadableSample as error:
            bad.append((error.title, error.why))
        stand_ins = rng.bits(self.seed, 0, torch.tensor([index]), rng.REPLACEMENT, 64)[0]
        for candidate in (stand_ins % len(self.source)).tolist():
            try:
                return candidate, self.source.read(candidate)
            except UnreadableSample as error:
                bad.append((error.title, error.why))
        return index, torch.full((3, 8, 8), 128, dtype=torch.uint8)  # the count will stop the run
