"""Batches at their addresses: the images of each step, read by any number of workers."""

from __future__ import annotations

import atexit
import functools
import signal
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from jaxtyping import Int, Shaped
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from meanshift.data.bad_files import read_or_replace
from meanshift.data.convert import blank
from meanshift.data.source import Source
from meanshift.runtime import distributed, rng
from meanshift.runtime.signals import STOP_SIGNALS

T = TypeVar("T")


@dataclass
class Batch:
    """The images of one step: one tensor of whole ones, or the crops of each view."""

    step: int
    epoch: int
    ids: Int[Tensor, " batch"]
    labels: Int[Tensor, " batch"] | None
    images: Shaped[Tensor, "batch *size channels"] | list[Shaped[Tensor, "..."]]
    bad: list[tuple[str, str]]
    """images that could not be read, as (title, reason)"""

    def pin_memory(self) -> Batch:
        """Called by the DataLoader, so that copies to a GPU need not wait."""
        return self._map(Tensor.pin_memory)

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device, by copies that do not wait; the ids stay on the CPU."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def _map(self, move: Callable[[Tensor], Tensor]) -> Batch:
        if isinstance(self.images, Tensor):
            images: Tensor | list[Tensor] = move(self.images)
        else:
            images = [move(crops) for crops in self.images]
        labels = None if self.labels is None else move(self.labels)
        return replace(self, labels=labels, images=images)


Crop = Callable[[list[Tensor], int, Tensor], list[Tensor]]
"""How a worker crops decoded images: (images, epoch, ids) to the crops of each view."""


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

    With `partial` an epoch ends with an incomplete batch; otherwise it is left out. Of several
    processes each gets its part of every batch, one after another.
    """
    steps = steps_per_epoch(source, batch_size, partial=partial)
    return iterate(
        _BatchDataset(source, crop, seed),
        _StepSampler(source, batch_size, steps, seed, start, stop),
        workers=0 if source.uniform else workers,
        pin_memory=pin_memory,
    )


def steps_per_epoch(source: Source, batch_size: int, *, partial: bool = False) -> int:
    """The number of batches in a source; an incomplete one counts only if `partial`."""
    if partial:
        return -(-len(source) // batch_size)
    if len(source) < batch_size:
        raise ValueError(
            f"{source.name}: {len(source)} images do not fill one batch of {batch_size}; "
            f"use --train.batch_size {max(2, len(source) // 4)} or fewer"
        )
    return len(source) // batch_size


def iterate(
    dataset: Dataset[T],
    sampler: Iterable[Any] | None = None,
    *,
    workers: int = 0,
    pin_memory: bool = False,
) -> Generator[T, None, None]:
    """The items of a dataset, one by one and unchanged, read ahead by worker processes.

    An item is a whole batch, so that a worker's result is one message. `sampler` gives the keys
    of the items (default: 0, 1, ...). The workers end with the generator, also when it ends in an
    error, and at the latest when the program exits.
    """
    loader = DataLoader(
        dataset,
        batch_size=None,
        sampler=sampler,
        collate_fn=_unchanged,
        num_workers=workers,
        pin_memory=pin_memory,
        worker_init_fn=_ignore_signals,
        generator=torch.Generator(),  # its base seed must not come from the global generator
    )
    items = iter(loader)
    stop = functools.partial(_stop_workers, items)
    # A generator that something still refers to at the exit, such as a traceback, is not closed;
    # the exit would wait for its workers, which ignore the signal to end.
    atexit.register(stop)
    try:
        yield from items
    finally:
        atexit.unregister(stop)
        stop()


def _unchanged(item: T) -> T:
    return item


def _ignore_signals(_: int) -> None:
    """Ctrl-C and schedulers signal the whole group; a worker must outlive the step being saved."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _stop_workers(items: Any) -> None:
    """End the workers of a DataLoader's iterator, also those that are busy for long."""
    if hasattr(items, "_shutdown_workers"):
        items._shutdown_workers()
        for worker in items._workers:
            if worker.is_alive():  # it ignored SIGTERM
                worker.kill()
                worker.join()


Request = tuple[int, int, list[int]]
"""step, epoch and ids; plain numbers, for tensors would be sent to a worker by a file descriptor"""


class _StepSampler(Sampler[Request]):
    """The ids of each step's images, in the order of its epoch."""

    def __init__(
        self, source: Source, batch_size: int, steps: int, seed: int, start: int, stop: int
    ) -> None:
        self.source = source
        self.batch_size = batch_size
        self.steps = steps
        self.seed = seed
        self.start = start
        self.stop = stop

    def __len__(self) -> int:
        return self.stop - self.start

    def __iter__(self) -> Iterator[Request]:
        order = torch.empty(0, dtype=torch.int64)
        ordered_epoch = -1
        for step in range(self.start, self.stop):
            epoch, batch = divmod(step, self.steps)
            if epoch != ordered_epoch:
                order = self.source.order(self.seed, epoch)
                ordered_epoch = epoch
            ids = order[batch * self.batch_size : (batch + 1) * self.batch_size]
            low, high = distributed.shard_range(len(ids))
            yield step, epoch, ids[low:high].tolist()


class _BatchDataset(Dataset[Batch]):
    """Reads and crops the images of a step."""

    def __init__(self, source: Source, crop: Crop, seed: int) -> None:
        self.source = source
        self.crop = crop
        self.seed = seed

    def __getitem__(self, request: Request) -> Batch:
        step, epoch, indices = request
        ids = torch.tensor(indices, dtype=torch.int64)
        bad: list[tuple[str, str]] = []
        images: Tensor | list[Tensor]
        if self.source.uniform:
            images = self.source.sample_batch(ids)
        else:
            spec = self.source.sample_spec
            nothing = blank(spec, {"image": [8, 8], "signal": [8], "vector": []}[spec.kind])
            self.source.prefetch(indices)
            samples = [
                read_or_replace(self.source.sample, index, self._replacements(index), blank=nothing)
                for index in indices
            ]
            bad = [(error.title, error.reason) for sample in samples for error in sample.errors]
            ids = torch.tensor([sample.used_index for sample in samples])
            images = self.crop([sample.image for sample in samples], epoch, ids)
        labels = None if self.source.labels is None else self.source.labels[ids]
        return Batch(step, epoch, ids, labels, images, bad)

    def _replacements(self, index: int) -> Iterator[int]:
        """Images to try in place of an unreadable one, which depend on nothing but its id."""
        words = rng.bits(self.seed, 0, torch.tensor([index]), rng.REPLACEMENT, 64)[0]
        yield from (words % len(self.source)).tolist()
