"""All talk with other processes; every call is valid in one process on a CPU."""

from __future__ import annotations

import os
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from meanshift.runtime.errors import SharedError
from meanshift.runtime.rank_failure import AddressBook, RankFailure, first_line, is_connection_loss

T = TypeVar("T")


def world_size() -> int:
    """How many processes run this program together, as `torchrun` tells it."""
    if distributed.is_initialized():
        return distributed.get_world_size()
    return int(os.environ.get("WORLD_SIZE", 1))


def rank() -> int:
    """Which of them this one is; the first does the writing and the talking."""
    if distributed.is_initialized():
        return distributed.get_rank()
    return int(os.environ.get("RANK", 0)) if world_size() > 1 else 0


def local_device(device: torch.device) -> torch.device:
    """Of several GPUs on a machine each process takes its own."""
    if device.type == "cuda" and device.index is None and world_size() > 1:
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    return device


@contextmanager
def process_group(device: torch.device, *, timeout: float = 600.0) -> Iterator[None]:
    """Work together with the other processes that `torchrun` started, if it did.

    One that does not come for `timeout` seconds while others wait for it, or that left, is named.
    """
    if world_size() == 1 or distributed.is_initialized():
        yield
        return
    patience = timedelta(seconds=timeout)
    start = max(60.0, timeout)  # some machines take longer to load programs
    try:
        store, own, count = next(rendezvous("env://", timeout=timedelta(seconds=start)))
        store.set_timeout(timedelta(seconds=start))
        store = _of_this_start(store, own, count, start)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        distributed.init_process_group(
            backend, store=store, rank=own, world_size=count, timeout=patience
        )
    except (RuntimeError, ValueError) as error:
        raise RankFailure(
            f"the {world_size()} processes did not find each other within {start:g} s "
            f"({first_line(error)}); need as many as WORLD_SIZE says, that reach "
            f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        ) from error
    book = AddressBook(store, own, count)
    try:
        yield
        barrier()  # the first keeps the address book: it leaves when all have done
    except BaseException as error:
        if not is_connection_loss(error):
            if not isinstance(error, SharedError):  # of which all know
                book.leave(error)
            raise
        raise RankFailure(book.who_is_missing(timeout)) from error
    finally:
        with suppress(RuntimeError):  # whoever is gone cannot say goodbye
            distributed.destroy_process_group()


def _of_this_start(store: Any, own: int, count: int, seconds: float) -> Any:
    """The part of a store that no earlier processes wrote to: torchrun keeps it over restarts.

    The first answers whoever asks, also the dead, until all who live have read its answer.
    """
    token, until = uuid.uuid4().hex, time.monotonic() + seconds
    if own:
        store.set(f"asks/{own}", token)
        token = store.get(f"answer/{token}").decode()
        store.set(f"{token}/has/{own}", "yes")
    missing = [] if own else list(range(1, count))
    while missing:
        for one in missing:
            if store.check([f"asks/{one}"]):
                store.set(f"answer/{store.get(f'asks/{one}').decode()}", token)
        missing = [one for one in missing if not store.check([f"{token}/has/{one}"])]
        if missing and time.monotonic() > until:
            raise RuntimeError(f"process {missing[0]} did not come")
        time.sleep(0.01)
    return PrefixStore(token, store)


@contextmanager
def fail_together() -> Iterator[None]:
    """What fails in one process fails in all, with one message, before anyone waits for it."""
    problem: Exception | None = None
    try:
        yield
    except (ValueError, OSError) as error:
        if world_size() == 1:
            raise
        problem = error
    told = all_gather_list(["" if problem is None else str(problem)])
    if len(set(told)) == 1 and told[0]:
        raise SharedError(told[0]) from problem
    wrong = [f"process {r} of {len(told)}: {text}" for r, text in enumerate(told) if text]
    if wrong:
        raise SharedError("\n".join(wrong)) from problem


def shard_range(count: int) -> tuple[int, int]:
    """The part of so many things that is this process's: from which to which."""
    return count * rank() // world_size(), count * (rank() + 1) // world_size()


def data_parallel(module: nn.Module, warm_up: Callable[[nn.Module], Tensor]) -> nn.Module:
    """A module whose gradients are means over all processes; the module itself, in one.

    Its first backward pass decides in which order gradients are added up from then on. `warm_up`
    runs one that changes nothing, so that a run that was continued adds in the same order, to the
    same bits, as one that was not.
    """
    if world_size() == 1:
        return module
    # The successor of this option would broadcast all buffers once, banks in parts among them.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*broadcast_buffers", FutureWarning)
        wrapped = DistributedDataParallel(
            module, broadcast_buffers=False, gradient_as_bucket_view=True
        )
    training = module.training
    module.eval()
    warm_up(wrapped).backward()
    module.zero_grad(set_to_none=True)
    module.train(training)
    return wrapped


def barrier() -> None:
    """Until all processes are here."""
    if world_size() > 1:
        distributed.barrier()


# Plain values


def all_gather_list(own: list[T]) -> list[T]:
    """The lists of all processes, one after another, in every process."""
    if world_size() == 1:
        return own
    lists: list[list[T]] = [[] for _ in range(world_size())]
    distributed.all_gather_object(lists, own)
    return [item for part in lists for item in part]


def all_max(*own: int) -> list[int]:
    """The largest that any process has, of each of these numbers."""
    if world_size() == 1:
        return list(own)
    held = torch.tensor(own)
    distributed.all_reduce(held, op=distributed.ReduceOp.MAX)
    return [int(value) for value in held]


# Tensors


def all_mean_(held: Tensor) -> None:
    """The mean over all processes, in place."""
    if world_size() > 1:
        distributed.all_reduce(held)
        held /= world_size()


def all_sum(own: Tensor) -> Tensor:
    """The sum over all processes; a gradient flows back to each of them."""
    if world_size() == 1:
        return own
    total: Tensor = _Sum.apply(own)
    return total


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, own: Tensor) -> Tensor:
        total = own.clone(memory_format=torch.contiguous_format)
        distributed.all_reduce(total)
        return total

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        total = gradient.clone(memory_format=torch.contiguous_format)
        distributed.all_reduce(total)
        return total


def broadcast(tensors: Iterator[Tensor]) -> None:
    """Give every process what the first has, in place."""
    if world_size() > 1:
        for held in tensors:
            distributed.broadcast(held, 0)


def all_lengths(own: int) -> list[int]:
    """How many rows each process has."""
    if world_size() == 1:
        return [own]
    held = torch.empty(world_size(), dtype=torch.int64)
    distributed.all_gather_into_tensor(held, torch.tensor([own]))
    return [int(value) for value in held]


def all_gather_rows(own: Tensor, counts: Sequence[int] | None = None) -> Tensor:
    """The rows of all processes, one after another; each may have another number of them."""
    if world_size() == 1:
        return own
    counts = all_lengths(len(own)) if counts is None else counts
    widest = max(counts)
    if len(own) < widest:
        own = torch.cat([own, own.new_zeros(widest - len(own), *own.shape[1:])])
    every = own.new_empty(widest * len(counts), *own.shape[1:])
    distributed.all_gather_into_tensor(every, own.contiguous())
    if min(counts) == widest:
        return every
    return torch.cat([part[:n] for part, n in zip(every.split(widest), counts, strict=True)])


def all_to_all(rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    """Rows in the order of the processes they are for, so many each; those for this one."""
    if world_size() == 1:
        return rows
    into = rows.new_empty(sum(received), *rows.shape[1:])
    distributed.all_to_all_single(into, rows.contiguous(), list(received), list(sent))
    return into


def all_to_all_counts(own: Sequence[int]) -> list[int]:
    """One number for each process; those that each of them has for this one."""
    held = all_to_all(torch.tensor(own), [1] * len(own), [1] * len(own))
    return [int(value) for value in held]


def apply_shuffled(function: Callable[[Any], Tensor], own: Any, seed: int | None) -> Tensor:
    """`function` of rows that were permuted over all processes; what it gives comes back.

    Without a seed nothing is permuted.
    """
    if world_size() == 1 or seed is None:
        return function(own)
    counts = torch.tensor(all_lengths(len(own)))
    ends = counts.cumsum(0)
    mine = slice(int(ends[rank()] - counts[rank()]), int(ends[rank()]))
    order = torch.randperm(int(ends[-1]), generator=torch.Generator().manual_seed(seed))
    place = order.argsort()[mine]  # where each of the own rows goes
    owner = torch.bucketize(place, ends, right=True)
    sender = torch.bucketize(order[mine], ends, right=True)
    out, come = (w.bincount(minlength=len(counts)).tolist() for w in (owner, sender))
    leaving, arriving = place.argsort(), sender.argsort(stable=True)
    strange = all_to_all(own[leaving.to(own.device)], out, come)
    given = function(_like(own, strange[arriving.argsort().to(own.device)]))
    back = all_to_all(given[arriving.to(own.device)], come, out)
    return back[leaving.argsort().to(own.device)]


def _like(own: Tensor, other: Tensor) -> Tensor:
    last = own.ndim == 4 and own.is_contiguous(memory_format=torch.channels_last)
    return other.contiguous(memory_format=torch.channels_last) if last else other
