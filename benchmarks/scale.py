"""Steps in 1, 2 and 4 processes on this machine, beside the cost that a simple model predicts."""

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
from torch import Tensor, nn

from benchmarks.step import HALF_WIDTH
from benchmarks.table import Row
from meanshift.config import Config
from meanshift.methods import MeanShift
from meanshift.models.sync_batch_norm import convert_sync_batch_norm
from meanshift.ops.topk import deterministic_neighbors
from meanshift.runtime import distributed
from meanshift.runtime.device import autocast, pick_precision
from meanshift.runtime.malloc import keep_memory
from meanshift.training.session import build_method

CONFIG = HALF_WIDTH.with_overrides({"train.batch_size": 64, "method.bank_size": 16_384})
WORLD_SIZES = (1, 2, 4)
VARIANTS: dict[str, dict[str, Any]] = {
    "shuffle": {"train.batch_norm": "shuffle"},
    "shuffle, sharded bank": {"train.batch_norm": "shuffle", "method.bank_layout": "sharded"},
    "local": {"train.batch_norm": "local"},
    "sync": {"train.batch_norm": "sync"},
}
LIMITS = (
    "not shown by one machine: a network, its latency and its other users; GPUs, whose compute and "
    "communication overlap; more processes than cores can run; slow disks and slow neighbors"
)


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
        sizes = {"gradients": 2 * 4 * self.parameters * others}
        if self.k > 1:
            sizes["bank"] = self.batch * (self.dim * self.element + 16) * others
        if self.k > 1 and self.sharded:
            found = (self.k - 1) * self.batch / self.world
            sizes["queries"] = self.batch * (self.dim * 4 + 8) * others  # and the excluded slots
            sizes["neighbors"] = found * (8 + 4) * self.world * others
            sizes["rows"] = found * (8 + self.dim * self.element + 16) * others
        if self.batch_norm == "shuffle":
            own = self.batch / self.world
            sizes["shuffle"] = own * (3 * 4 * self.side**2 + 4 * self.dim) * others
        if self.batch_norm == "sync":  # twice the online ones: forward and backward
            sizes["statistics"] = 2 * 8 * 2 * self.channels * others
        return sizes

    def small_messages(self) -> int:
        """Collective calls of a step that are too small for their bytes to count."""
        return 3 + (8 if self.sharded else 0) + (3 if self.batch_norm == "shuffle" else 0)


def rows(rounds: int) -> Iterator[Row]:
    measured = {
        (world, name): run_processes(world, changes, rounds)
        for world in WORLD_SIZES
        for name, changes in VARIANTS.items()
        if world > 1 or name == "shuffle"
    }
    single = measured[1, "shuffle"]
    cores = os.cpu_count() or 1
    threaded = run_processes(1, {}, rounds, threads=cores)
    ratio = single["step"] / threaded["step"]
    yield Row(f"step of 1 process with 1 thread / with {cores}", (ratio,))
    for world in WORLD_SIZES[1:]:
        shuffle = measured[world, "shuffle"]
        yield Row(
            f"step of 1 process / of {world}, one thread each",
            (single["step"] / shuffle["step"],),
            note=f"{min(world, cores)} would be all that {cores} cores allow",
        )
        for name in list(VARIANTS)[1:]:
            ratio = measured[world, name]["step"] / shuffle["step"]
            yield Row(f"step of {world} processes, {name} / shuffle", (ratio,))
    yield from _model_rows(measured)
    for world in WORLD_SIZES[1:]:
        ratio = measured[world, "shuffle, sharded bank"]["bank"] / single["bank"]
        yield Row(
            f"memory of a bank in {world} shards / of a replicated one",
            (ratio,),
            note="" if world < WORLD_SIZES[-1] else LIMITS,
        )


def _model_rows(measured: Mapping[tuple[int, str], dict[str, Any]]) -> Iterator[Row]:
    """Bytes and times beside those of the model."""
    for (world, name), each in measured.items():
        if world > 1:
            ratio = each["bytes"] / sum(each["predicted"].values())
            yield Row(f"{world} processes, {name}: bytes received / the model's", (ratio,))
    for (world, name), each in measured.items():
        if each["modeled"]:
            ratio = each["modeled"] / each["step"]
            yield Row(f"{world} processes, {name}: the model's time / the step's", (ratio,))


def run_processes(
    world: int, changes: Mapping[str, Any], rounds: int, threads: int = 1
) -> dict[str, Any]:
    """The measurements of the first of `world` fresh processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "benchmarks.scale", json.dumps(dict(changes)), str(rounds)]
    common = {
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": str(threads),
    }
    processes = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(world)
    ]
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError(f"{world} processes: one of them failed; its error is above")
    measured: dict[str, Any] = json.loads(outputs[0])
    return measured


class DistributedStep:
    """A step of this process among the others, and the same without communication."""

    def __init__(self, config: Config) -> None:
        self.cpu = torch.device("cpu")
        self.precision = pick_precision(config.train.precision, self.cpu)
        method = build_method(config).train()
        assert isinstance(method, MeanShift)
        if config.train.batch_norm == "sync":
            convert_sync_batch_norm(method, self.cpu)
        elif config.train.batch_norm == "shuffle":
            method.shuffle_seed = 1
        self.method = method.to(memory_format=torch.channels_last)
        side = config.data.image_size
        first, last = distributed.shard_range(config.train.batch_size)
        views = torch.randn(2, last - first, 3, side, side)
        self.online, self.target = (
            view.contiguous(memory_format=torch.channels_last) for view in views
        )
        black = torch.zeros(2, 3, side, side)
        self.module = distributed.data_parallel(method, lambda wrapped: wrapped(black, black).loss)
        self.ids = torch.arange(first, last)
        self.load = self._load(config)

    def _load(self, config: Config) -> Load:
        method = self.method
        norms = [
            module
            for module in method.modules()
            if isinstance(module, nn.modules.batchnorm._BatchNorm)
        ]
        channels = sum(norm.num_features for norm in norms)
        trained = sum(norm.num_features for norm in norms if norm.weight.requires_grad)
        return Load(
            world=distributed.world_size(),
            batch=config.train.batch_size,
            dim=method.dim,
            k=method.k,
            parameters=sum(p.numel() for p in method.parameters() if p.requires_grad),
            side=config.data.image_size,
            sharded=method.bank is not None and method.bank.sharded,
            batch_norm=config.train.batch_norm,
            channels=channels + trained,
        )

    def step(self) -> None:
        with autocast(self.cpu, self.precision):
            loss = self.module(self.online, self.target, ids=self.ids).loss
        loss.backward()
        self.method.zero_grad(set_to_none=True)

    def step_without_communication(self) -> None:
        method = self.method
        with autocast(self.cpu, self.precision):
            v = method.predict(method.embed(self.online))
            with torch.no_grad():
                u = nn.functional.normalize(method.target(self.target).float(), dim=1)
            z = u if method.bank is None else self._mean_neighbor(u)
        (v * z).sum().backward()
        method.zero_grad(set_to_none=True)

    def _mean_neighbor(self, u: Tensor) -> Tensor:
        """With as many comparisons as a process makes in a step."""
        bank = self.method.bank
        assert bank is not None
        queries = u.repeat(distributed.world_size(), 1) if bank.sharded else u
        slots, _ = deterministic_neighbors(queries, bank.rows, self.method.k - 1)
        return bank.rows[slots].float().mean(1)[: len(u)]


def measure(config: Config, rounds: int) -> dict[str, Any]:
    """Medians of a step and of its parts, in this process among the others."""
    keep_memory()
    world = distributed.world_size()
    distributed_step = DistributedStep(config)
    load = distributed_step.load
    distributed_step.step()
    distributed.barrier()
    before = _loopback_bytes()
    for _ in range(4):
        distributed_step.step()
    distributed.barrier()
    received = (_loopback_bytes() - before) / 4 / world
    predicted = load.received() if world > 1 else {}
    parts: dict[str, Callable[[], None]] = {"step": distributed_step.step}
    if config.train.batch_norm != "sync":  # whose layers cannot be run alone
        parts["alone"] = distributed_step.step_without_communication
        if world > 1:
            parts["bytes"] = _all_reduce(sum(predicted.values()))
            parts["message"] = _all_reduce(8.0)
    seconds = measure_together(parts, 3 * rounds)
    modeled = 0.0
    if "alone" in seconds:
        messages = load.small_messages() * seconds.get("message", 0.0)
        modeled = seconds["alone"] + seconds.get("bytes", 0.0) + messages
    bank = distributed_step.method.bank
    return {
        "step": seconds["step"],
        "bytes": received,
        "predicted": predicted,
        "modeled": modeled,
        "bank": 0 if bank is None else bank.rows.nbytes,
    }


def _all_reduce(size: float) -> Callable[[], None]:
    """A sum over the processes in which each receives so many bytes."""
    world = distributed.world_size()
    buffer = torch.zeros(max(world, int(size / 8 * world / (world - 1))))

    def reduce() -> None:
        torch.distributed.all_reduce(buffer)

    return reduce


def measure_together(parts: Mapping[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Median seconds of each part, which all processes begin together."""
    seconds: dict[str, list[float]] = {name: [] for name in parts}
    for round_ in range(rounds + 1):
        for name, work in parts.items():
            distributed.barrier()
            start = time.perf_counter()
            work()
            if round_:  # the first round allocates memory
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(each) for name, each in seconds.items()}


def _loopback_bytes() -> float:
    """Bytes that have passed between the processes of this machine."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return float(next(line.split()[1] for line in lines if line.strip().startswith("lo:")))


if __name__ == "__main__":
    config = CONFIG.with_overrides(json.loads(sys.argv[1]))
    with distributed.process_group(torch.device("cpu")):
        result = measure(config, int(sys.argv[2]))
    if distributed.rank() == 0:
        print(json.dumps(result))
