"""One figure of speed: a ratio by turns, its spread, and the goal that it was set."""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

Lap = Callable[[], float]
"""Works once and tells how long it took."""


@dataclass(frozen=True)
class Row:
    """What was compared, a ratio for each turn, and the goal: at least it, or at most."""

    what: str
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


def timed(work: Callable[[], object]) -> Lap:
    """A lap on the clock."""

    def lap() -> float:
        begun = time.perf_counter()
        work()
        return time.perf_counter() - begun

    return lap


def by_turns(
    contenders: Mapping[str, Lap], rounds: int, *, warm: bool = True
) -> dict[str, list[float]]:
    """Seconds of each contender, turn by turn, so that a noisy machine is noisy to all."""
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    if warm:  # the first lap allocates
        for lap in contenders.values():
            lap()
    for _ in range(rounds):
        for name, lap in contenders.items():
            taken[name].append(lap())
    return taken


def installed(package: str) -> bool:
    """Whether a peer can be measured; without it its rows are left out."""
    return importlib.util.find_spec(package) is not None


def over(slower: Iterable[float], faster: Iterable[float]) -> tuple[float, ...]:
    """How many times as long the first took, in each turn."""
    return tuple(a / b for a, b in zip(slower, faster, strict=True))


def describe(rows: Iterable[Row]) -> str:
    """The table as text."""
    lines = [f"{'':76}{'ratio':>8}  {'spread':>14}  {'goal':>7}"]
    for row in rows:
        spread = f"{min(row.ratios):.3g} to {max(row.ratios):.3g}" if len(row.ratios) > 1 else ""
        goal = "" if row.goal is None else f"{'<=' if row.at_most else '>='} {row.goal:g}"
        mark = {True: "  met", False: "  MISSED", None: ""}[row.met]
        lines.append(f"{row.what:76}{row.ratio:8.3g}  {spread:>14}  {goal:>7}{mark}")
        if row.note:
            lines.append(f"    {row.note}")
    return "\n".join(lines)
