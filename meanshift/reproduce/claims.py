"""The paper's claims, and whether our metrics support them: std ranges that do not overlap."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Outcome = Literal["holds", "does not hold", "inconclusive"]
HOLDS: Outcome = "holds"
FAILS: Outcome = "does not hold"
INCONCLUSIVE: Outcome = "inconclusive"


@dataclass(frozen=True)
class Measurement:
    """A metric of each seed, and the paper's value."""

    values: tuple[float, ...] = ()
    paper: float | None = None

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values) if self.values else math.nan

    @property
    def std(self) -> float:
        """Unknown (nan) for one seed, and where an event did not happen in some seed."""
        known = len(self.values) > 1 and all(map(math.isfinite, self.values))
        return statistics.stdev(self.values) if known else math.nan

    def __str__(self) -> str:
        if not self.values:
            return "–"
        if math.inf in self.values:
            return f"in {sum(map(math.isfinite, self.values))} of {len(self.values)}"
        digits = 1 if abs(self.mean) >= 1 else 3 if abs(self.mean) >= 0.01 else 5
        std = f" ± {self.std:.{digits}f}" if self.std > 0 else ""
        return f"{self.mean:.{digits}f}{std}"


Table = Mapping[str, Mapping[str, Measurement]]
"""measurements by variant, then by column"""


@dataclass(frozen=True)
class Verdict:
    """Whether a claim holds, and the metrics that decided it."""

    outcome: Outcome
    reason: str


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper, and how a table decides it."""

    text: str
    decide: Callable[[Table, Sequence[str]], Verdict]
    """called with the table and its columns"""


@dataclass(frozen=True)
class _Comparison:
    """What one column says about a claim."""

    outcome: Outcome
    values: str
    reason: str = ""


def higher(text: str, more: str, less: str, *columns: str, across: bool = False) -> Claim:
    """One variant has higher metrics than another one, in every column.

    `across`: two columns are compared with each other instead of two variants.
    """

    def decide(table: Table, all_columns: Sequence[str]) -> Verdict:
        pairs = [columns] if across else [(name, name) for name in columns or all_columns]
        comparisons = []
        for first, second in pairs:
            a, b = table[more][first], table[less][second]
            values = f"{first} {a} against {b}" + (f" ({second})" if across else "")
            if missing := _missing(a, b):
                comparison = _Comparison(INCONCLUSIVE, values, missing)
            elif abs(a.mean - b.mean) <= a.std + b.std:
                comparison = _Comparison(INCONCLUSIVE, values, "the standard deviations overlap")
            else:
                comparison = _Comparison(HOLDS if a.mean > b.mean else FAILS, values)
            comparisons.append(comparison)
        return _combine(comparisons)

    return Claim(text, decide)


def similar(text: str, one: str, other: str, within: float, *columns: str) -> Claim:
    """Two variants differ by at most `within` points, with their standard deviations counted in."""

    def decide(table: Table, all_columns: Sequence[str]) -> Verdict:
        comparisons = []
        for name in columns or all_columns:
            a, b = table[one][name], table[other][name]
            values = f"{name} {a} against {b}"
            distance = abs(a.mean - b.mean)
            uncertainty = a.std + b.std
            if missing := _missing(a, b):
                comparison = _Comparison(INCONCLUSIVE, values, missing)
            elif distance + uncertainty <= within:
                comparison = _Comparison(HOLDS, values, f"within {within:g}")
            elif distance - uncertainty > within:
                comparison = _Comparison(FAILS, values, f"more than {within:g} apart")
            else:
                reason = f"the standard deviations are too large to decide within {within:g}"
                comparison = _Comparison(INCONCLUSIVE, values, reason)
            comparisons.append(comparison)
        return _combine(comparisons)

    return Claim(text, decide)


def below(text: str, variant: str, column: str, limit: float) -> Claim:
    """A metric is below a limit by more than its standard deviation."""

    def decide(table: Table, _: Sequence[str]) -> Verdict:
        measurement = table[variant][column]
        values = f"{column} {measurement}"
        uncertainty = 0.0 if len(measurement.values) == 1 else measurement.std
        if not measurement.values:
            return Verdict(INCONCLUSIVE, "not measured")
        if abs(measurement.mean - limit) <= uncertainty:
            return Verdict(INCONCLUSIVE, f"{values}: the standard deviation reaches {limit:g}")
        return Verdict(HOLDS if measurement.mean < limit else FAILS, values)

    return Claim(text, decide)


def collapses(text: str, variant: str, column: str = "collapse at epoch") -> Claim:
    """Every seed of a variant warned of a collapse; a seed that did not has no epoch."""

    def decide(table: Table, _: Sequence[str]) -> Verdict:
        values = table[variant][column].values
        epochs = [value for value in values if value < math.inf]
        count = f"a collapse was reported in {len(epochs)} of {len(values)} runs"
        if not values:
            return Verdict(INCONCLUSIVE, "not run")
        if len(epochs) == len(values):
            listed = ", ".join(f"{round(epoch, 2):g}" for epoch in epochs)
            return Verdict(HOLDS, f"{count}, in epoch {listed}")
        return Verdict(INCONCLUSIVE if epochs else FAILS, count)

    return Claim(text, decide)


def _missing(one: Measurement, other: Measurement) -> str:
    """What two measurements lack to be compared; empty if nothing."""
    if not one.values or not other.values:
        return "not run"
    seeds = min(len(one.values), len(other.values))
    return "one seed, so the std is unknown" if seeds == 1 else ""


def _combine(comparisons: Sequence[_Comparison]) -> Verdict:
    """A claim holds, or does not, if all of its columns agree."""
    outcomes = {comparison.outcome for comparison in comparisons}
    reasons = {comparison.reason for comparison in comparisons}
    outcome = outcomes.pop() if len(outcomes) == 1 else INCONCLUSIVE
    if len(reasons) == 1:  # given once, for all columns
        values = "; ".join(comparison.values for comparison in comparisons)
        return Verdict(outcome, ": ".join(filter(None, [values, *reasons])))
    parts = [": ".join(filter(None, [each.values, each.reason])) for each in comparisons]
    return Verdict(outcome, "; ".join(parts))
