"""A training step against its two bare encoders, phase by phase."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import torch

from meanshift.config import MSF, Config, Data, Encoder, Train, Views
from meanshift.reproduce.cost import PhaseTimer, TimedStep
from meanshift.runtime.device import autocast, pick_precision
from meanshift.runtime.malloc import keep_memory

STEP = Config(
    data=Data(image_size=32),
    views=Views(blur=0.0),
    encoder=Encoder(name="resnet18", stem="small"),
    method=MSF(bank_size=65_536),
    train=Train(batch_size=256),
)
"""the step that is measured by default"""

HALF_WIDTH = STEP.with_overrides({"encoder.stem": "small-stride2", "encoder.width": 0.5})


class BareStep(TimedStep):
    """A timed step, and the part of it that the two encoders and their optimizer need alone."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        size = config.data.image_size
        view = torch.randn(config.train.batch_size, 3, size, size)
        self.view = view.to(self.device, memory_format=self.layout)

    def bare_step(self, timer: PhaseTimer) -> None:
        """Online forward and backward pass, target forward pass, optimizer; nothing else."""

        def work() -> None:
            with autocast(self.device, self.precision):
                v = self.method.predict(self.method.embed(self.view))
                u = self.method.project(self.view)
            self.optimizer.zero_grad(set_to_none=True)
            (2 - 2 * (v * u).sum(1)).mean().backward()
            self.optimizer.step()

        timer.time("bare", work)


def measure_steps(*, rounds: int, cpu_time: bool = False) -> Iterator[str]:
    """The tables of both steps, in float32 and in the precision that is native here.

    With `cpu_time` the CPU time of one thread is measured, which other work on the machine hardly
    changes.
    """
    keep_memory()
    clock = time.process_time if cpu_time else time.perf_counter
    threads = torch.get_num_threads()
    native = pick_precision("auto", torch.device("cpu"))
    precisions = ["float32"] if native == torch.float32 else ["float32", "auto"]
    try:
        torch.set_num_threads(1 if cpu_time else threads)
        for config, count in ((HALF_WIDTH, 3 * rounds), (STEP, rounds)):
            for precision in precisions:
                measured = config.with_overrides({"train.precision": precision})
                yield measure_step(measured, rounds=count, clock=clock)
    finally:
        torch.set_num_threads(threads)


def measure_step(
    config: Config, *, rounds: int, clock: Callable[[], float] = time.perf_counter
) -> str:
    """The fraction of each phase of a step, and its cost against its two bare encoders."""
    timed_step = BareStep(config)
    bare = PhaseTimer(clock=clock)
    whole = PhaseTimer(clock=clock)
    timed_step.step(PhaseTimer())  # the first step allocates memory
    for _ in range(rounds):  # alternately, so that a noisy machine disturbs both alike
        timed_step.bare_step(bare)
        timed_step.step(whole)
    encoder = config.encoder
    phases = whole.medians()
    total = sum(phases.values())
    steps = map(sum, zip(*whole.seconds.values(), strict=True))
    ratios = [step / bare for step, bare in zip(steps, bare.seconds["bare"], strict=True)]
    return "\n".join(
        [
            f"{encoder.name} {encoder.stem} x{encoder.width:g}, {config.data.image_size} px, "
            f"batch {config.train.batch_size}, k {getattr(config.method, 'k', None)}, "
            f"bank {getattr(config.method, 'bank_size', None)}, "
            f"{str(timed_step.precision).removeprefix('torch.')}, {timed_step.device}, "
            f"{torch.get_num_threads()} threads, median of {rounds} rounds",
            "",
            *(f"  {name:22}{seconds / total:7.1%}" for name, seconds in phases.items()),
            "",
            f"step / two bare encoders with their optimizer: {statistics.median(ratios):.3f} "
            f"({min(ratios):.3f} to {max(ratios):.3f})",
        ]
    )
