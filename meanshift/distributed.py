"""All talk with other processes; every call is valid in one process on a CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import distributed

T = TypeVar("T")


def world_size() -> int:
    """How many processes run this program together, as `torchrun` tells it."""
    if distributed.is_initialized():
        return distributed.get_world_size()
    return int(os.environ.get("WORLD_SIZE", 1))


def rank() -> int:
    """Which of them this one is; the first does the writing and the talking."""
    return distributed.get_rank() if distributed.is_initialized() else 0


def own_device(device: torch.device) -> torch.device:
    """Of several GPUs on a machine each process takes its own."""
    if device.type == "cuda" and device.index is None and world_size() > 1:
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    return device


@contextmanager
def joined(device: torch.device) -> Iterator[None]:
    """Work together with the other processes that `torchrun` started, if it did."""
    if world_size() == 1:
        yield
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield
    finally:
        distributed.destroy_process_group()


def gathered(own: list[T]) -> list[T]:
    """The lists of all processes, one after another, in every process."""
    if world_size() == 1:
        return own
    lists: list[list[T]] = [[] for _ in range(world_size())]
    distributed.all_gather_object(lists, own)
    return [item for part in lists for item in part]


def average(held: torch.Tensor) -> None:
    """The mean over all processes, in place."""
    if world_size() > 1:
        distributed.all_reduce(held)
        held /= world_size()
