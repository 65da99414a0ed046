"""What the paper claims, and whether our figures bear it out: by deviations that do not overlap."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["holds", "does not hold", "cannot be told"]
HOLDS: Verdict = "holds"
FAILS: Verdict = "does not hold"
OPEN: Verdict = "cannot be told"
Table = Mapping[str, Mapping[str, "Cell"]]
"""cells by variant, then by column"""


@dataclass(frozen=True)
class Cell:
    """What the seeds gave, and the paper's figure."""

    values: tuple[float, ...] = ()
    paper: float | None = None

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values) if self.values else math.nan

    @property
    def deviation(self) -> float:
        """Of one seed it is not known, nor where something never happened."""
        known = len(self.values) > 1 and all(map(math.isfinite, self.values))
        return statistics.stdev(self.values) if known else math.nan

    def __str__(self) -> str:
        if not self.values:
            return "–"
        if math.inf in self.values:
            return f"in {sum(map(math.isfinite, self.values))} of {len(self.values)}"
        digits = 1 if abs(self.mean) >= 1 else 3 if abs(self.mean) >= 0.01 else 5
        beside = f" ± {self.deviation:.{digits}f}" if self.deviation > 0 else ""
        return f"{self.mean:.{digits}f}{beside}"


@dataclass(frozen=True)
class Ruling:
    """A claim's fate, and the figures that decided it."""

    verdict: Verdict
    why: str


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper, and how a table decides it."""

    text: str
    decide: Callable[[Table, Sequence[str]], Ruling]
    """given the table and its columns"""


def higher(text: str, more: str, less: str, *columns: str, across: bool = False) -> Claim:
    """One variant has higher figures than another, in every column.

    `across`: two columns are compared with each other instead of two variants.
    """

    def decide(table: Table, usual: Sequence[str]) -> Ruling:
        names = [columns] if across else [(name, name) for name in columns or usual]
        found = []
        for first, second in names:
            a, b = table[more][first], table[less][second]
            told = f"{first} {a} against {b}" + (f" ({second})" if across else "")
            if lacks := _lacks(a, b):
                found.append((OPEN, told, lacks))
            elif abs(a.mean - b.mean) <= a.deviation + b.deviation:
                found.append((OPEN, told, "the deviations overlap"))
            else:
                found.append((HOLDS if a.mean > b.mean else FAILS, told, ""))
        return _together(found)

    return Claim(text, decide)


def alike(text: str, one: str, other: str, within: float, *columns: str) -> Claim:
    """Two variants differ by no more than so many points; their deviations must allow to say so."""

    def decide(table: Table, usual: Sequence[str]) -> Ruling:
        found = []
        for name in columns or usual:
            a, b = table[one][name], table[other][name]
            told = f"{name} {a} against {b}"
            apart, wide = abs(a.mean - b.mean), a.deviation + b.deviation
            if lacks := _lacks(a, b):
                found.append((OPEN, told, lacks))
            elif apart + wide <= within:
                found.append((HOLDS, told, f"within {within:g}"))
            elif apart - wide > within:
                found.append((FAILS, told, f"more than {within:g} apart"))
            else:
                found.append((OPEN, told, f"too wide to say whether within {within:g}"))
        return _together(found)

    return Claim(text, decide)


def below(text: str, variant: str, column: str, limit: float) -> Claim:
    """A figure is below a limit by more than its deviation."""

    def decide(table: Table, _: Sequence[str]) -> Ruling:
        cell = table[variant][column]
        told, wide = f"{column} {cell}", 0.0 if len(cell.values) == 1 else cell.deviation
        if not cell.values:
            return Ruling(OPEN, "not measured")
        if abs(cell.mean - limit) <= wide:
            return Ruling(OPEN, f"{told}: the deviation reaches {limit:g}")
        return Ruling(HOLDS if cell.mean < limit else FAILS, told)

    return Claim(text, decide)


def warned(text: str, variant: str, column: str = "collapse at epoch") -> Claim:
    """Every seed of a variant raised the collapse alarm; a seed that did not has no epoch."""

    def decide(table: Table, _: Sequence[str]) -> Ruling:
        values = table[variant][column].values
        alarms = [value for value in values if value < math.inf]
        told = f"the alarm rang in {len(alarms)} of {len(values)} runs"
        if not values:
            return Ruling(OPEN, "not run")
        if len(alarms) == len(values):
            return Ruling(HOLDS, f"{told}, in epoch {', '.join(f'{v:.2g}' for v in alarms)}")
        return Ruling(OPEN if alarms else FAILS, told)

    return Claim(text, decide)


def _lacks(one: Cell, other: Cell) -> str:
    if not one.values or not other.values:
        return "not run"
    return "one seed, so no deviation" if min(len(one.values), len(other.values)) == 1 else ""


def _together(found: Sequence[tuple[Verdict, str, str]]) -> Ruling:
    """A claim holds, or does not, where all of its columns say so."""
    verdicts, reasons = {each[0] for each in found}, {each[2] for each in found}
    verdict: Verdict = verdicts.pop() if len(verdicts) == 1 else OPEN
    if len(reasons) == 1:  # said once
        told = "; ".join(each[1] for each in found)
        return Ruling(verdict, ": ".join(filter(None, [told, *reasons])))
    return Ruling(verdict, "; ".join(": ".join(filter(None, each[1:])) for each in found))
