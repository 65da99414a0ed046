"""Steps in 1, 2 and 4 processes on this machine, beside what a simple model of their cost says."""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.table import Row
from benchmarks.training import HALF
from meanshift.config import Config
from meanshift.models.sync_batch_norm import convert_sync_batch_norm
from meanshift.runtime import distributed
from meanshift.runtime.device import autocast, pick_precision
from meanshift.runtime.malloc import keep_memory
from meanshift.training.loop import build_method

CONFIG = HALF.with_overrides({"train.batch_size": 64, "method.bank_size": 16_384})
WORLDS = (1, 2, 4)
VARIANTS: dict[str, dict[str, Any]] = {
    "shuffle": {"train.batch_norm": "shuffle"},
    "shuffle, bank in parts": {"train.batch_norm": "shuffle", "method.bank_layout": "sharded"},
    "local": {"train.batch_norm": "local"},
    "sync": {"train.batch_norm": "sync"},
}


@dataclass(frozen=True)
class Load:
    """What the cost of a step depends on, beside the machine."""

    world: int
    batch: int
    dim: int
    k: int
    parameters: int
    side: int
    sharded: bool = False
    batch_norm: str = "shuffle"
    channels: int = 0
    """of all batch norms together, of both encoders and the predictor"""
    element: int = 4
    """bytes of a value in the bank"""

    def received(self) -> dict[str, float]:
        """Bytes that a process receives in a step, by their cause."""
        others = (self.world - 1) / self.world
        told = {"gradients": 2 * 4 * self.parameters * others}
        if self.k > 1:
            told["bank"] = self.batch * (self.dim * self.element + 16) * others
        if self.k > 1 and self.sharded:
            found = (self.k - 1) * self.batch / self.world
            told["queries"] = self.batch * (self.dim * 4 + 8) * others  # and the slots left out
            told["finds"] = found * (8 + 4) * self.world * others
            told["rows"] = found * (8 + self.dim * self.element + 16) * others
        if self.batch_norm == "shuffle":
            own = self.batch / self.world
            told["shuffle"] = own * (3 * 4 * self.side**2 + 4 * self.dim) * others
        if self.batch_norm == "sync":  # twice the online ones: forward and backward
            told["statistics"] = 2 * 8 * 2 * self.channels * others
        return told

    def search(self, rows: int) -> float:
        """Multiplications of the search in a process: the same, whichever way the bank lies."""
        return self.batch / self.world * rows * self.dim


def rows(rounds: int) -> Iterator[Row]:
    told = {
        (world, name): started(world, more, rounds)
        for world in WORLDS
        for name, more in VARIANTS.items()
        if world > 1 or name == "shuffle"
    }
    alone = told[1, "shuffle"]
    cores = os.cpu_count() or 1
    threaded = started(1, {}, rounds, threads=cores)
    ratio = alone["step"] / threaded["step"]
    yield Row(f"step of 1 process with 1 thread / with {cores}", (ratio,))
    for world in WORLDS[1:]:
        one = told[world, "shuffle"]
        faster = alone["step"] / one["step"]
        yield Row(f"step of 1 process / of {world}, one thread each", (faster,),
                  note=f"{min(world, cores)} would be all that {cores} cores allow")  # fmt: skip
        for name in list(VARIANTS)[1:]:
            ratio = told[world, name]["step"] / one["step"]
            yield Row(f"step of {world} processes, {name} / shuffle", (ratio,))
    for (world, name), one in told.items():
        if world > 1:
            sent = sum(one["predicted"].values())
            yield Row(f"{world} processes, {name}: bytes received / the model's",
                      (one["bytes"] / sent,))  # fmt: skip
    for (world, name), one in told.items():
        if not one["modeled"]:
            continue
        ratio = one["modeled"] / one["step"]
        yield Row(f"{world} processes, {name}: the model's time / the step's", (ratio,))
    for world in WORLDS[1:]:
        part = told[world, "shuffle, bank in parts"]["bank"] / alone["bank"]
        yield Row(f"memory of a bank in {world} parts / of a whole one", (part,),
                  note="" if world < WORLDS[-1] else NOT_SHOWN)  # fmt: skip


NOT_SHOWN = (
    "not shown by one machine: a network, its latency and its other users; GPUs, whose compute and "
    "talk overlap; more processes than cores can run; slow disks and slow neighbors"
)


def started(world: int, more: Mapping[str, Any], rounds: int, threads: int = 1) -> dict[str, Any]:
    """What the first of `world` fresh processes tells."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = [sys.executable, "-m", "benchmarks.scale", json.dumps(dict(more)), str(rounds)]
    common = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
              "OMP_NUM_THREADS": str(threads)}  # fmt: skip
    processes = [
        subprocess.Popen(
            given, stdout=subprocess.PIPE, text=True,
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(world)
    ]  # fmt: skip
    texts = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError(f"{world} processes: one of them failed; its error is above")
    told: dict[str, Any] = json.loads(texts[0])
    return told


def work(config: Config, rounds: int) -> dict[str, Any]:
    """Medians of a step and of its parts, in this process among the others."""
    keep_memory()
    cpu, world = torch.device("cpu"), distributed.world_size()
    precision = pick_precision(config.train.precision, cpu)
    method = build_method(config).train()
    if config.train.batch_norm == "sync":
        convert_sync_batch_norm(method, cpu)
    elif config.train.batch_norm == "shuffle":
        method.shuffle = 1
    method.to(memory_format=torch.channels_last)
    side, batch = config.data.image_size, config.train.batch_size
    low, high = distributed.shard_range(batch)
    views = torch.randn(2, high - low, 3, side, side)
    online, target = (view.contiguous(memory_format=torch.channels_last) for view in views)
    black = torch.zeros(2, 3, side, side)
    stepping = distributed.data_parallel(method, lambda wrapped: wrapped(black, black).loss)
    ids = torch.arange(low, high)

    def step() -> None:
        with autocast(cpu, precision):
            loss = stepping(online, target, ids=ids).loss
        loss.backward()
        method.zero_grad(set_to_none=True)

    def alone() -> None:
        """The same without a word to the others."""
        with autocast(cpu, precision):
            v, u = method.predict(online), method._encode(method.target, target).detach()
            z = u.float() if method.bank is None else _found(method, u)
        (v * z).sum().backward()
        method.zero_grad(set_to_none=True)

    bank, parameters = method.bank, sum(p.numel() for p in method.parameters() if p.requires_grad)
    norms = [m for m in method.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)]
    trained = sum(n.num_features for n in norms if n.weight.requires_grad)
    load = Load(
        world, batch, method.dim, method.k, parameters, side, bank is not None and bank.sharded,
        config.train.batch_norm, 2 * trained + sum(n.num_features for n in norms) - trained,
    )  # fmt: skip
    step()
    distributed.barrier()
    before = _loopback()
    for _ in range(4):
        step()
    distributed.barrier()
    crossed = (_loopback() - before) / 4 / world
    predicted = load.received() if world > 1 else {}
    sent = sum(predicted.values())
    parts: dict[str, Callable[[], None]] = {"step": step}
    if config.train.batch_norm != "sync":  # whose layers cannot be run alone
        parts["alone"] = alone
        if world > 1:
            parts |= {"bytes": _reduce(sent), "word": _reduce(8.0)}
    taken = by_turns(parts, 3 * rounds)
    words = _messages(load) * taken.get("word", 0.0)
    return {
        "step": taken["step"],
        "bytes": crossed,
        "predicted": predicted,
        "modeled": taken["alone"] + taken.get("bytes", 0.0) + words if "alone" in parts else 0.0,
        "bank": 0 if bank is None else bank.rows.numel() * bank.rows.element_size(),
    }


def _found(method: Any, u: torch.Tensor) -> torch.Tensor:
    """The neighbors' mean, of as many comparisons as a process makes in a step."""
    from meanshift.ops.topk import exact_neighbors

    bank, world = method.bank, distributed.world_size()
    queries = u.float().repeat(world, 1) if bank.sharded else u.float()
    slots, _ = exact_neighbors(queries, bank.rows, method.k - 1)
    return torch.Tensor(bank.rows[slots].float().mean(1)[: len(u)])


def _messages(load: Load) -> int:
    """Collective calls of a step that are too small for their bytes to count."""
    return 3 + (8 if load.sharded else 0) + (3 if load.batch_norm == "shuffle" else 0)


def _reduce(size: float) -> Callable[[], None]:
    """A sum over the processes in which each receives so many bytes."""
    world = distributed.world_size()
    held = torch.zeros(max(world, int(size / 8 * world / (world - 1))))

    def reduce() -> None:
        torch.distributed.all_reduce(held)

    return reduce


def by_turns(parts: Mapping[str, Callable[[], None]], turns: int) -> dict[str, float]:
    """Medians of each part's seconds, begun together by all processes."""
    taken: dict[str, list[float]] = {name: [] for name in parts}
    for turn in range(turns + 1):
        for name, once in parts.items():
            distributed.barrier()
            begun = time.perf_counter()
            once()
            if turn:  # the first allocates
                taken[name].append(time.perf_counter() - begun)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def _loopback() -> float:
    """Bytes that have passed between the processes of this machine."""
    told = Path("/proc/net/dev").read_text().splitlines()
    return float(next(line.split()[1] for line in told if line.strip().startswith("lo:")))


if __name__ == "__main__":
    config = CONFIG.with_overrides(json.loads(sys.argv[1]))
    with distributed.process_group(torch.device("cpu")):
        result = work(config, int(sys.argv[2]))
    if distributed.rank() == 0:
        print(json.dumps(result))
