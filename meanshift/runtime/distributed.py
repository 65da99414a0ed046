"""Communication between processes; every function also works in a single process on a CPU."""

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
from meanshift.runtime.rank_failure import RankFailure, RankStatus, first_line, is_connection_loss

T = TypeVar("T")


def world_size() -> int:
    """Return the number of processes that `torchrun` started."""
    if distributed.is_initialized():
        return distributed.get_world_size()
    return int(os.environ.get("WORLD_SIZE", 1))


def rank() -> int:
    """Return the number of this process; process 0 writes files and prints."""
    if distributed.is_initialized():
        return distributed.get_rank()
    return int(os.environ.get("RANK", 0)) if world_size() > 1 else 0


def local_device(device: torch.device) -> torch.device:
    """Return this process's own GPU if the device is `cuda` and there are several processes."""
    if device.type == "cuda" and device.index is None and world_size() > 1:
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    return device


@contextmanager
def process_group(device: torch.device, *, timeout: float = 600.0) -> Iterator[None]:
    """Connect the processes that `torchrun` started; does nothing in a single process.

    If a process ends, or the others wait for it for more than `timeout` seconds, they raise a
    `RankFailure` that names it.
    """
    if world_size() == 1 or distributed.is_initialized():
        yield
        return
    store, own_rank, count = _initialize(device, timeout)
    status = RankStatus(store, own_rank, count)
    try:
        yield
        barrier()  # the store may end with process 0, which therefore leaves last
    except BaseException as error:
        if is_connection_loss(error):
            raise RankFailure(status.describe_failure(timeout)) from error
        if not isinstance(error, SharedError):  # which all processes raise
            status.report_failure(error)
        raise
    finally:
        with suppress(RuntimeError):  # other processes may be gone
            distributed.destroy_process_group()
        # Gloo's threads outlive it, since torch keeps the group of DistributedDataParallel. They
        # free the last tensors under Python's lock, and one that still waits for the lock when
        # Python ends aborts the process.
        time.sleep(0.1)


def _initialize(device: torch.device, timeout: float) -> tuple[Any, int, int]:
    """Initialize torch's process group; return (store, rank, world size)."""
    start_timeout = max(60.0, timeout)  # some machines take longer to load programs
    try:
        store, own_rank, count = next(
            rendezvous("env://", timeout=timedelta(seconds=start_timeout))
        )
        store.set_timeout(timedelta(seconds=start_timeout))
        store = _fresh_store(store, own_rank, count, start_timeout)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=own_rank,
            world_size=count,
            timeout=timedelta(seconds=timeout),
        )
    except (RuntimeError, ValueError) as error:
        raise RankFailure(
            f"the {world_size()} processes did not find each other within {start_timeout:g} s "
            f"({first_line(error)}); need as many as WORLD_SIZE says, that reach "
            f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        ) from error
    return store, own_rank, count


def _fresh_store(store: Any, own_rank: int, count: int, timeout: float) -> Any:
    """Return a part of the store that earlier processes did not write to.

    torchrun keeps the store when it restarts processes. Process 0 chooses a prefix and sends it to
    every process that asks, dead ones included, until all living ones have confirmed it.
    """
    token = uuid.uuid4().hex
    deadline = time.monotonic() + timeout
    if own_rank:
        store.set(f"request/{own_rank}", token)
        prefix = store.get(f"reply/{token}").decode()
        store.set(f"{prefix}/confirmed/{own_rank}", "yes")
        return PrefixStore(prefix, store)
    prefix = token
    missing = list(range(1, count))
    while missing:
        for other in missing:
            if store.check([f"request/{other}"]):
                request = store.get(f"request/{other}").decode()
                store.set(f"reply/{request}", prefix)
        missing = [r for r in missing if not store.check([f"{prefix}/confirmed/{r}"])]
        if missing and time.monotonic() > deadline:
            raise RuntimeError(f"process {missing[0]} did not come")
        time.sleep(0.01)
    return PrefixStore(prefix, store)


@contextmanager
def fail_together() -> Iterator[None]:
    """Raise an error of one process in all of them, before another one waits for it."""
    own_error: Exception | None = None
    try:
        yield
    except (ValueError, OSError) as error:
        if world_size() == 1:
            raise
        own_error = error
    messages = all_gather_list(["" if own_error is None else str(own_error)])
    if len(set(messages)) == 1 and messages[0]:
        raise SharedError(messages[0]) from own_error
    errors = [
        f"process {r} of {len(messages)}: {message}"
        for r, message in enumerate(messages)
        if message
    ]
    if errors:
        raise SharedError("\n".join(errors)) from own_error


def shard_range(count: int) -> tuple[int, int]:
    """Return the range (first, end) of this process's share of `count` items."""
    return count * rank() // world_size(), count * (rank() + 1) // world_size()


def data_parallel(module: nn.Module, warm_up: Callable[[nn.Module], Tensor]) -> nn.Module:
    """Wrap a module so that its gradients are means over all processes.

    The first backward pass decides the order in which gradients are added. `warm_up` runs one that
    changes nothing, so that a run that was continued adds in the same order, to the same bits, as
    one that was not interrupted.
    """
    if world_size() == 1:
        return module
    # The option that replaces this one would broadcast all buffers once, sharded banks included.
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
    """Wait until all processes are here."""
    if world_size() > 1:
        distributed.barrier()


# Plain values


def all_gather_list(own: list[T]) -> list[T]:
    """Concatenate the lists of all processes."""
    if world_size() == 1:
        return own
    lists: list[list[T]] = [[] for _ in range(world_size())]
    distributed.all_gather_object(lists, own)
    return [item for part in lists for item in part]


def all_max(*own: int) -> list[int]:
    """Return the maximum over all processes of each number."""
    if world_size() == 1:
        return list(own)
    maxima = torch.tensor(own)
    distributed.all_reduce(maxima, op=distributed.ReduceOp.MAX)
    return [int(value) for value in maxima]


# Tensors


def all_sum_(tensor: Tensor) -> None:
    """Replace a tensor by its sum over all processes, in place and without a gradient."""
    if world_size() > 1:
        distributed.all_reduce(tensor)


def all_mean_(tensor: Tensor) -> None:
    """Replace a tensor by its mean over all processes, in place."""
    if world_size() > 1:
        distributed.all_reduce(tensor)
        tensor /= world_size()


def all_sum(tensor: Tensor) -> Tensor:
    """Return the sum over all processes; a gradient flows back to each of them."""
    if world_size() == 1:
        return tensor
    total: Tensor = _Sum.apply(tensor)
    return total


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, tensor: Tensor) -> Tensor:
        total = tensor.clone(memory_format=torch.contiguous_format)
        distributed.all_reduce(total)
        return total

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        total = gradient.clone(memory_format=torch.contiguous_format)
        distributed.all_reduce(total)
        return total


def broadcast(tensors: Iterator[Tensor]) -> None:
    """Overwrite tensors with those of process 0."""
    if world_size() > 1:
        for tensor in tensors:
            distributed.broadcast(tensor, 0)


def all_lengths(own: int) -> list[int]:
    """Return the number of rows of each process."""
    if world_size() == 1:
        return [own]
    lengths = torch.empty(world_size(), dtype=torch.int64)
    distributed.all_gather_into_tensor(lengths, torch.tensor([own]))
    return [int(value) for value in lengths]


def all_gather_rows(own: Tensor, counts: Sequence[int] | None = None) -> Tensor:
    """Concatenate the rows of all processes, which may have different numbers of them."""
    if world_size() == 1:
        return own
    counts = all_lengths(len(own)) if counts is None else counts
    most = max(counts)
    with torch.autocast(own.device.type, enabled=False):  # it refuses to join float16 in bfloat16
        if len(own) < most:
            own = torch.cat([own, own.new_zeros(most - len(own), *own.shape[1:])])
        gathered = own.new_empty(most * len(counts), *own.shape[1:])
        distributed.all_gather_into_tensor(gathered, own.contiguous())
        if min(counts) == most:
            return gathered
        parts = zip(gathered.split(most), counts, strict=True)
        return torch.cat([part[:count] for part, count in parts])


def all_gather_with_gradient(own: Tensor, counts: Sequence[int] | None = None) -> Tensor:
    """Concatenate the rows of all processes; the gradient of a row is the sum over all of them.

    Each process may have another number of rows. torch's own differentiable gather needs equal
    numbers, and its public name is deprecated.
    """
    if world_size() == 1:
        return own
    counts = all_lengths(len(own)) if counts is None else counts
    before = own.new_zeros(sum(counts[: rank()]), *own.shape[1:])
    after = own.new_zeros(sum(counts[rank() + 1 :]), *own.shape[1:])
    with torch.autocast(own.device.type, enabled=False):
        return all_sum(torch.cat([before, own, after]))


def all_to_all(rows: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Tensor:
    """Send rows, ordered by destination process, and return the rows received."""
    if world_size() == 1:
        return rows
    received = rows.new_empty(sum(receive_counts), *rows.shape[1:])
    distributed.all_to_all_single(
        received, rows.contiguous(), list(receive_counts), list(send_counts)
    )
    return received


def all_to_all_counts(send_counts: Sequence[int]) -> list[int]:
    """Send one number to each process and return the numbers received."""
    ones = [1] * len(send_counts)
    return [int(value) for value in all_to_all(torch.tensor(send_counts), ones, ones)]


def apply_shuffled(function: Callable[[Any], Tensor], own: Any, seed: int | None) -> Tensor:
    """Apply a function to rows that are permuted over all processes, and return its rows in order.

    Without a seed nothing is permuted.
    """
    if seed is None:
        return function(own)
    generator = torch.Generator().manual_seed(seed)
    if world_size() == 1:
        order = torch.randperm(len(own), generator=generator)
        output = function(_in_memory_format_of(own, own[_moved(order, own)]))
        return output[_moved(order.argsort(), own)]
    counts = torch.tensor(all_lengths(len(own)))
    ends = counts.cumsum(0)
    own_slice = slice(int(ends[rank()] - counts[rank()]), int(ends[rank()]))
    order = torch.randperm(int(ends[-1]), generator=generator)
    positions = order.argsort()[own_slice]  # where each of the own rows goes
    destinations = torch.bucketize(positions, ends, right=True)
    origins = torch.bucketize(order[own_slice], ends, right=True)
    send_counts = destinations.bincount(minlength=len(counts)).tolist()
    receive_counts = origins.bincount(minlength=len(counts)).tolist()
    send_order = positions.argsort()
    receive_order = origins.argsort(stable=True)
    received = all_to_all(own[_moved(send_order, own)], send_counts, receive_counts)
    shuffled = received[_moved(receive_order.argsort(), own)]
    output = function(_in_memory_format_of(own, shuffled))
    returned = all_to_all(output[_moved(receive_order, own)], receive_counts, send_counts)
    return returned[_moved(send_order.argsort(), own)]


def _moved(indices: Tensor, other: Tensor) -> Tensor:
    return indices.to(other.device, non_blocking=True)


def _in_memory_format_of(own: Tensor, other: Tensor) -> Tensor:
    channels_last = own.ndim == 4 and own.is_contiguous(memory_format=torch.channels_last)
    return other.contiguous(memory_format=torch.channels_last) if channels_last else other
