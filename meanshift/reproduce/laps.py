"""Seconds of contenders that take turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Laps:
    """Seconds of each phase, one entry a round."""

    taken: dict[str, list[float]] = field(default_factory=dict)

    def time(self, name: str, work: Callable[[], Tensor | None]) -> Tensor | None:
        wait()
        begun = time.perf_counter()
        result = work()
        wait()
        self.taken.setdefault(name, []).append(time.perf_counter() - begun)
        return result

    def medians(self) -> dict[str, float]:
        return {name: statistics.median(times) for name, times in self.taken.items()}


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
