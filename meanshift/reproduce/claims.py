"""The paper's claims, and whether our metrics support them: paired differences over seeds.

Two variants are compared seed by seed, since the runs of one seed share their images, their order
and their initial weights. The interval of the mean difference is that of Student's t-test for
paired samples, with a confidence of 95%.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Outcome = Literal["holds", "does not hold", "cannot be told"]
HOLDS: Outcome = "holds"
FAILS: Outcome = "does not hold"
UNKNOWN: Outcome = "cannot be told"

CONFIDENCE = 0.95
NOT_RUN = "not run"


@dataclass(frozen=True)
class Measurement:
    """A metric of each seed, and the paper's value."""

    values: tuple[float, ...] = ()
    paper: float | None = None
    seeds: tuple[int, ...] = ()
    """the seed of each value; by default 0, 1, 2, ..."""

    @property
    def by_seed(self) -> dict[int, float]:
        return dict(zip(self.seeds or range(len(self.values)), self.values, strict=True))

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
        std = f" ± {self.std:.{self.digits}f}" if self.std > 0 else ""
        return f"{self.mean:.{self.digits}f}{std}"

    @property
    def digits(self) -> int:
        """Decimals that are worth printing."""
        return 1 if abs(self.mean) >= 1 else 3 if abs(self.mean) >= 0.01 else 5


@dataclass(frozen=True)
class Interval:
    """The mean of differences between paired runs, and the half width of its interval."""

    mean: float
    half_width: float
    pairs: int

    @staticmethod
    def of(differences: Sequence[float]) -> Interval:
        """The interval of Student's t-test; it needs two or more differences."""
        from scipy import stats

        n = len(differences)
        quantile = float(stats.t.ppf((1 + CONFIDENCE) / 2, n - 1))
        error = statistics.stdev(differences) / math.sqrt(n)
        return Interval(statistics.fmean(differences), quantile * error, n)

    @property
    def low(self) -> float:
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        return self.mean + self.half_width


Table = Mapping[str, Mapping[str, Measurement]]
"""measurements by variant, then by column"""


@dataclass(frozen=True)
class Comparison:
    """The outcome of a claim for one metric."""

    metric: str
    values: str
    """ours, of both variants"""
    outcome: Outcome
    note: str = ""
    """the reason, if there is no outcome"""
    difference: str = ""
    """with its interval"""
    paper: str = ""
    """the paper's values of both variants"""

    def __str__(self) -> str:
        text = f"{self.metric} {self.values}".strip()
        if self.paper:
            text += f" (the paper has {self.paper})"
        if self.difference:
            return f"{text}, difference {self.difference}" + (f", {self.note}" if self.note else "")
        return f"{text}: {self.note}" if self.note else text


@dataclass(frozen=True)
class Verdict:
    """Whether a claim holds, and the metrics that decided it."""

    outcome: Outcome
    comparisons: Sequence[Comparison]

    @property
    def reason(self) -> str:
        return "; ".join(map(str, self.comparisons))


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper, and how a table decides it."""

    text: str
    decide: Callable[[Table, Sequence[str]], Verdict]
    """called with the table and its columns"""


def higher(text: str, more: str, less: str, *columns: str, across: bool = False) -> Claim:
    """One variant has higher metrics than another one, in every column.

    It holds if the whole interval of the difference is above 0, and does not if it is below 0.
    `across`: two columns are compared with each other instead of two variants.
    """

    def decide(table: Table, all_columns: Sequence[str]) -> Verdict:
        pairs = [columns] if across else [(name, name) for name in columns or all_columns]
        comparisons = []
        for first, second in pairs:
            suffix = f" ({second})" if across else ""
            comparisons.append(
                _compare(first, table[more][first], table[less][second], _sign, suffix)
            )
        return _combine(comparisons)

    return Claim(text, decide)


def similar(text: str, one: str, other: str, within: float, *columns: str) -> Claim:
    """Two variants differ by at most `within`: the whole interval of the difference is in it."""

    def outcome(difference: Interval) -> Outcome:
        if -within <= difference.low and difference.high <= within:
            return HOLDS
        beyond = difference.low > within or difference.high < -within
        return FAILS if beyond else UNKNOWN

    def decide(table: Table, all_columns: Sequence[str]) -> Verdict:
        names = columns or all_columns
        return _combine(
            [
                _compare(name, table[one][name], table[other][name], outcome, within=within)
                for name in names
            ]
        )

    return Claim(text, decide)


def below(text: str, variant: str, column: str, limit: float) -> Claim:
    """A metric is below a limit: the whole interval of its mean, or its only value."""

    def decide(table: Table, _: Sequence[str]) -> Verdict:
        measurement = table[variant][column]
        values = str(measurement)
        if not measurement.values:
            return _combine([Comparison(column, "", UNKNOWN, "not measured")])
        if len(measurement.values) == 1:
            return _combine(
                [Comparison(column, values, HOLDS if measurement.mean < limit else FAILS)]
            )
        outcome = _sign(Interval.of([limit - value for value in measurement.values]))
        doubt = f"the interval reaches {limit:g}" if outcome == UNKNOWN else ""
        return _combine([Comparison(column, values, outcome, doubt)])

    return Claim(text, decide)


def collapses(text: str, variant: str, column: str = "collapse at epoch") -> Claim:
    """Every seed of a variant warned of a collapse; a seed that did not has no epoch."""

    def decide(table: Table, _: Sequence[str]) -> Verdict:
        values = table[variant][column].values
        epochs = [value for value in values if value < math.inf]
        count = f"a collapse was reported in {len(epochs)} of {len(values)} runs"
        if not values:
            return _combine([Comparison("", "", UNKNOWN, NOT_RUN)])
        if len(epochs) == len(values):
            listed = ", ".join(f"{round(epoch, 2):g}" for epoch in epochs)
            return _combine([Comparison("", f"{count}, in epoch {listed}", HOLDS)])
        return _combine([Comparison("", count, UNKNOWN if epochs else FAILS)])

    return Claim(text, decide)


def paired_interval(a: Measurement, b: Measurement) -> Interval | None:
    """The interval of a - b over the seeds that both have; None for fewer than two."""
    ours, theirs = a.by_seed, b.by_seed
    seeds = [seed for seed in ours if seed in theirs]
    return Interval.of([ours[seed] - theirs[seed] for seed in seeds]) if len(seeds) > 1 else None


def _sign(difference: Interval) -> Outcome:
    return HOLDS if difference.low > 0 else FAILS if difference.high < 0 else UNKNOWN


def _compare(
    metric: str,
    a: Measurement,
    b: Measurement,
    decide: Callable[[Interval], Outcome],
    suffix: str = "",
    *,
    within: float | None = None,
) -> Comparison:
    """The outcome for one metric, from the paired difference of two measurements."""
    values = f"{a} against {b}{suffix}"
    if not a.values or not b.values:
        return Comparison(metric, values, UNKNOWN, NOT_RUN)
    digits = a.digits
    paper = ""
    if a.paper is not None and b.paper is not None:
        paper = f"{a.paper:.{digits}f} against {b.paper:.{digits}f}"
    difference = paired_interval(a, b)
    if difference is None:
        note = "one seed, which has no interval"
        return Comparison(metric, values, UNKNOWN, note, paper=paper)
    interval = f"{difference.low:+.{digits}f} to {difference.high:+.{digits}f}"
    outcome = decide(difference)
    note = ""
    if outcome == UNKNOWN and within is not None:
        note = f"partly beyond {within:g} points"
    elif outcome == UNKNOWN:
        note = f"differences above {difference.half_width:.{digits}f} would have been detected"
    return Comparison(
        metric, values, outcome, note, f"{difference.mean:+.{digits}f} ({interval})", paper
    )


def _combine(comparisons: Sequence[Comparison]) -> Verdict:
    """A claim holds, or does not, if all of its metrics agree."""
    outcomes = {comparison.outcome for comparison in comparisons}
    return Verdict(outcomes.pop() if len(outcomes) == 1 else UNKNOWN, comparisons)
