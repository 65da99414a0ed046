"""The time of a training step by phases, and the cost of the search by the size of the bank."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from meanshift.config import MSF, Config
from meanshift.methods import MeanShift, view_specs
from meanshift.methods.memory_bank import MemoryBank
from meanshift.models.encoder import memory_format
from meanshift.runtime.device import autocast, pick_device, pick_precision
from meanshift.runtime.run_directory import environment
from meanshift.training.optim import build_optimizer
from meanshift.training.session import build_method
from meanshift.transforms.augment import MultiViewTransform

BANK_SIZES = (1_024, 4_096, 16_384, 65_536, 131_072)
"""banks that are searched beside the configuration's own"""


@dataclass
class PhaseTimer:
    """Seconds of each phase, one entry per round."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    clock: Callable[[], float] = time.perf_counter

    def time(self, name: str, work: Callable[[], Tensor | None]) -> Tensor | None:
        """Call `work` and add its seconds to a phase."""
        synchronize()
        start = self.clock()
        result = work()
        synchronize()
        self.seconds.setdefault(name, []).append(self.clock() - start)
        return result

    def medians(self) -> dict[str, float]:
        return {name: statistics.median(seconds) for name, seconds in self.seconds.items()}


def synchronize() -> None:
    """Wait until the GPU has finished, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class TimedStep:
    """A model, its optimizer and one batch of random images, to take timed training steps."""

    def __init__(self, config: Config) -> None:
        method = build_method(config)
        if not isinstance(method, MeanShift) or method.symmetric:
            raise ValueError(
                f"only the asymmetric step of Mean Shift is timed; got the method "
                f"{config.method.name}, need --method.name msf, without --method.symmetric"
            )
        self.device = pick_device(config.train.device)
        self.precision = pick_precision(config.train.precision, self.device)
        self.method: MeanShift = method.to(self.device).train()
        self.layout = memory_format(self.method)
        self.method.to(memory_format=self.layout)
        self.optimizer = build_optimizer(config.optim, self.method)
        size = config.data.image_size
        batch_size = config.train.batch_size
        self.transform = MultiViewTransform(view_specs(config), config.train.seed, size)
        self.ids = torch.arange(batch_size)
        self.images = torch.randint(0, 256, (batch_size, size, size, 3), dtype=torch.uint8)

    def step(self, timer: PhaseTimer) -> None:
        """Take one training step, phase by phase."""
        method = self.method
        tensors: dict[str, Tensor] = {}

        def make_views() -> None:
            images = self.images.to(self.device, non_blocking=True)
            views = self.transform.finish(images, 0, self.ids)
            tensors["target"] = views[0].contiguous(memory_format=self.layout)
            tensors["online"] = views[-1].contiguous(memory_format=self.layout)

        def online_forward() -> None:
            with autocast(self.device, self.precision):
                tensors["v"] = method.predict(method.embed(tensors["online"]))

        def target_forward() -> None:
            with autocast(self.device, self.precision):
                tensors["u"] = method.project(tensors["target"])

        def search_and_loss() -> None:
            ids = self.ids.to(self.device)
            tensors["loss"] = method.compare(tensors["v"], tensors["u"], ids=ids).loss

        def backward() -> None:
            self.optimizer.zero_grad(set_to_none=True)
            tensors["loss"].backward()

        timer.time("views", make_views)
        timer.time("online forward", online_forward)
        timer.time("target forward", target_forward)
        timer.time("search and loss", search_and_loss)
        timer.time("backward", backward)
        timer.time("optimizer", lambda: self.optimizer.step())
        timer.time("moving average", method.after_update)


def measure_cost(
    config: Config, *, rounds: int, sizes: Sequence[int] = BANK_SIZES
) -> dict[str, Any]:
    """The fraction of a step that the search takes, by the size of the bank, as a result."""
    method = config.method
    if rounds < 1:
        raise ValueError(f"--rounds: got {rounds}, need 1 or more")
    if not isinstance(method, MSF) or method.k < 2:
        raise ValueError(
            f"the cost of the search needs a method with a memory bank; got {method.name} with k "
            f"{getattr(method, 'k', None)}, need --method.name msf and --method.k 2 or more"
        )
    batch_size = config.train.batch_size
    least = max(batch_size, method.k)
    sizes = sorted({size for size in sizes if size >= least} | {method.bank_size})
    without_bank = replace(method, k=1, k_start=1)
    timed_step = TimedStep(replace(config, method=without_bank))
    search = _Search(timed_step, method, batch_size, sizes[-1])
    step_timer = PhaseTimer()
    search_timers: dict[int, PhaseTimer] = {}
    for round_ in range(rounds + 1):
        if round_ == 1:  # the first round allocates memory
            step_timer = PhaseTimer()
            search_timers = {}
        timed_step.step(step_timer)
        for size in sizes:
            timer = search_timers.setdefault(size, PhaseTimer())
            timer.time("search", lambda size=size: search(size))  # type: ignore[misc]
    rest = sum(step_timer.medians().values())
    table = []
    for size in sizes:
        seconds = search_timers[size].medians()["search"]
        table.append({"bank": size, "fraction": seconds / (seconds + rest), **search.cost(size)})
    return {
        "metrics": {f"bank {row['bank']}, %": 100 * row["fraction"] for row in table},
        "card": _card(config, method, timed_step, table, rounds),
    }


class _Search:
    """The search of a batch in a bank of random rows."""

    def __init__(self, timed_step: TimedStep, method: MSF, batch_size: int, bank_size: int) -> None:
        device = timed_step.device
        dim = timed_step.method.dim
        dtype = getattr(torch, method.bank_dtype)
        self.method = method
        self.bank = MemoryBank(bank_size, dim, dtype=dtype).to(device)
        queries = torch.randn(batch_size, dim, device=device)
        self.queries = torch.nn.functional.normalize(queries, dim=1)
        self.ids = torch.arange(batch_size, device=device)

    def __call__(self, size: int) -> Tensor:
        """Search the first `size` rows, and gather the neighbors."""
        self.bank.written = size  # only filled rows are searched
        slots, _ = self.bank.search(
            self.queries,
            self.method.k - 1,
            exclude_slots=self.ids,
            exclude_ids=self.ids if self.method.same_image == "skip" else None,
            filled_only=True,
        )
        return self.bank.rows[slots].to(self.queries.dtype)

    def cost(self, size: int) -> dict[str, float]:
        """Arithmetic of the search of a batch, and memory of the bank."""
        batch_size, dim = self.queries.shape
        return {
            "gflops": 2e-9 * size * dim * batch_size,
            "bytes": size * dim * self.bank.rows.element_size(),
        }


def _card(
    config: Config, method: MSF, timed_step: TimedStep, table: list[dict[str, Any]], rounds: int
) -> dict[str, Any]:
    encoder = config.encoder
    return {
        "protocol": "cost",
        "settings": {
            "table": table,
            "bank": method.bank_size,
            "dtype": method.bank_dtype,
            "dim": timed_step.method.dim,
            "k": method.k,
            "batch": config.train.batch_size,
            "image_size": config.data.image_size,
            "encoder": f"{encoder.name} {encoder.stem} x{encoder.width:g}",
            "rounds": rounds,
            "fraction": "search and gather / (search and gather + the other phases of a step)",
        },
        "device": str(timed_step.device),
        "precision": str(timed_step.precision),
        "threads": torch.get_num_threads(),
        **environment(),
    }


def describe_cost(result: Mapping[str, Any]) -> str:
    """The table of a result as text."""
    card = result["card"]
    settings = card["settings"]
    lines = [
        f"{settings['encoder']}, {settings['image_size']} px, batch {settings['batch']}, "
        f"k {settings['k']}, {settings['dim']} dimensions, {card['device']}, "
        f"{card['threads']} threads, median of {settings['rounds']} rounds",
        "",
        f"  {'bank':>9}{'fraction of a step':>20}{'GFLOPs per batch':>18}{'MB':>9}",
    ]
    for row in settings["table"]:
        bank, fraction = f"{row['bank']:>9,}", f"{row['fraction']:>20.2%}"
        lines.append(f"  {bank}{fraction}{row['gflops']:>18.2f}{row['bytes'] / 1e6:>9.1f}")
    return "\n".join(lines)
