"""One row of a speed table: ratios of alternating measurements, their range, and a goal."""

from __future__ import annotations

import importlib.util
import resource
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

Measure = Callable[[], float]
"""Works once and returns its seconds."""


@dataclass(frozen=True)
class Row:
    """What was compared, a ratio per round, and the goal: at least it, or at most."""

    title: str
    ratios: tuple[float, ...]
    goal: float | None = None
    at_most: bool = False
    note: str = ""

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def met(self) -> bool | None:
        if self.goal is None:
            return None
        return self.ratio <= self.goal if self.at_most else self.ratio >= self.goal

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": self.ratio, "met": self.met}


def timed(work: Callable[[], object], clock: Measure = time.perf_counter) -> Measure:
    """A function that calls `work` and returns the seconds that it took."""

    def measure() -> float:
        start = clock()
        work()
        return clock() - start

    return measure


def cpu_seconds() -> float:
    """CPU time of this process and of its workers that have ended.

    Unlike elapsed time it hardly depends on what else the machine does.
    """
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def alternate(
    contenders: Mapping[str, Measure], rounds: int, *, warm_up: bool = True
) -> dict[str, list[float]]:
    """Seconds of each contender, measured alternately: a noisy machine disturbs all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    if warm_up:  # the first call allocates memory
        for measure in contenders.values():
            measure()
    for _ in range(rounds):
        for name, measure in contenders.items():
            seconds[name].append(measure())
    return seconds


def installed(package: str) -> bool:
    """Whether a library can be measured; without it its rows are left out."""
    return importlib.util.find_spec(package) is not None


def ratios(slower: Iterable[float], faster: Iterable[float]) -> tuple[float, ...]:
    """How many times as long the first took, in each round."""
    return tuple(a / b for a, b in zip(slower, faster, strict=True))


def format_rows(rows: Iterable[Row]) -> str:
    """The table as text."""
    lines = [f"{'':76}{'ratio':>8}  {'range':>14}  {'goal':>7}"]
    for row in rows:
        several = len(row.ratios) > 1
        between = f"{min(row.ratios):.3g} to {max(row.ratios):.3g}" if several else ""
        goal = "" if row.goal is None else f"{'<=' if row.at_most else '>='} {row.goal:g}"
        mark = {True: "  met", False: "  MISSED", None: ""}[row.met]
        lines.append(f"{row.title:76}{row.ratio:8.3g}  {between:>14}  {goal:>7}{mark}")
        if row.note:
            lines.append(f"    {row.note}")
    return "\n".join(lines)
