"""The results of a study: a table of our metrics beside the paper's, and verdicts on its claims."""

from __future__ import annotations

import csv
import functools
import io
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from meanshift.reproduce import label_free
from meanshift.reproduce.claims import (
    NOT_RUN,
    Claim,
    Measurement,
    Table,
    Verdict,
    paired_interval,
)
from meanshift.reproduce.jobs import Job
from meanshift.reproduce.studies import Study
from meanshift.viz.run_reader import Run

_EVALUATED = {  # column: protocol and its metric
    "1-NN": ("knn", "1-NN"),
    "20-NN": ("knn", "20-NN"),
    "linear": ("linear", "top-1"),
    "1% of labels": ("semi", "1% top-1"),
    "10% of labels": ("semi", "10% top-1"),
    **{measure: ("rank", measure) for measure in label_free.MEASURES},
}
_LOGGED = {  # column: kind of record in metrics.jsonl and its metric, of the last epoch
    "purity": ("train", "purity"),
    "rank": ("train", "effective_rank"),
    "agreement": ("train", "agreement"),
    "purity, weak views": ("snapshot", "purity_weak"),
    "purity, strong views": ("snapshot", "purity_strong"),
}
RANKED_BY = "20-NN"
"""the metric of the validation images by which variants are ranked"""


def protocols(columns: Sequence[str]) -> list[str]:
    """The protocols that fill these columns."""
    return list(dict.fromkeys(_EVALUATED[name][0] for name in columns if name in _EVALUATED))


def metric_of(job: Job, column: str, weights: str = "") -> float | None:
    """A metric of a run; None if the run is not finished, or if `weights` do not have it."""
    run = job.run
    if run is None or not job.finished:
        return None
    if column in _EVALUATED:
        protocol, name = _EVALUATED[column]
        result = job.result(protocol, weights)
        return None if result is None else result["metrics"].get(name)
    if weights:
        return None
    if column == "collapse at epoch":
        collapses = [warning for warning in run.warnings if warning["kind"] == "collapse"]
        epochs = [warning["step"] / run.steps_per_epoch for warning in collapses]
        return min(epochs, default=math.inf)
    kind, name = _LOGGED[column]
    if kind == "train":
        means = run.epoch_means(name)
        return means[max(means)] if means else None
    values = [record[name] for record in run.records(kind) if name in record]
    return values[-1] if values else None


def validation_metric(job: Job) -> float | None:
    """The metric of the validation images at the end of training."""
    if job.run is None or not job.finished:
        return None
    records = job.run.records("monitor")
    return records[-1].get(RANKED_BY) if records else None


class Hardware(NamedTuple):
    """What the CPU time of a run depends on; runs of other hardware are not compared by time."""

    precision: str
    processor: str
    """its name; empty for runs of versions that did not record it"""

    def __str__(self) -> str:
        return f"{self.precision} on {self.processor or 'a processor that was not recorded'}"


def hardware(run: Run) -> Hardware:
    """The precision that a run was trained in, and its processor."""
    precision = str(run.environment.get("precision", "")).removeprefix("torch.")
    return Hardware(precision, run.environment.get("machine", {}).get("cpu", ""))


def cpu_minutes(job: Job, timed_on: Hardware | None) -> float | None:
    """CPU minutes of the training steps; None if not measured, or on other hardware."""
    if job.run is None or not job.finished or hardware(job.run) != timed_on:
        return None
    seconds = [record.get("cpu_seconds", 0.0) for record in job.run.lines("metrics.jsonl")]
    return round(sum(seconds) / 60, 6) or None  # the same for steps and for epochs that are stored


@dataclass(frozen=True)
class StudyResult:
    """The table of a study, as far as its runs are finished."""

    name: str
    study: Study
    table: Table
    validation: Mapping[str, Measurement]
    """20-NN on the validation images; empty if the table itself is of these images"""
    without_labels: Table = field(default_factory=dict)
    """measures without labels of the variants that learn without them"""
    cpu_minutes: Mapping[str, Measurement] = field(default_factory=dict)
    """of the training steps, of the runs on the hardware that most runs have"""
    hardware: Sequence[tuple[Hardware, int]] = ()
    """precisions and processors of all runs and how many have it, the most frequent one first"""

    @staticmethod
    def collect(
        name: str, study: Study, jobs: Mapping[str, Sequence[Job]], *, has_test_split: bool
    ) -> StudyResult:
        """The metrics of the runs of each variant."""

        def measure(
            variant: str, metric: Callable[[Job], float | None], paper: float | None = None
        ) -> Measurement:
            found = {job.config.train.seed: metric(job) for job in jobs[variant]}
            known = {seed: value for seed, value in found.items() if value is not None}
            return Measurement(tuple(known.values()), paper, tuple(known))

        table: dict[str, dict[str, Measurement]] = {}
        validation: dict[str, Measurement] = {}
        unlabeled: dict[str, dict[str, Measurement]] = {}
        minutes: dict[str, Measurement] = {}
        every = {id(job): job for runs in jobs.values() for job in runs}.values()
        runs = [job.run for job in every if job.run is not None and job.finished]
        used = Counter(map(hardware, runs)).most_common()
        timed_on = used[0][0] if used else None
        for variant in study.variants:
            row = table[variant.title] = {}
            for column in study.columns:
                paper = variant.paper.get(column)
                metric = functools.partial(metric_of, column=column, weights=variant.weights)
                row[column] = measure(variant.title, metric, paper)
            if has_test_split and not variant.weights:
                validation[variant.title] = measure(variant.title, validation_metric)
            if not variant.weights:
                time = functools.partial(cpu_minutes, timed_on=timed_on)
                minutes[variant.title] = measure(variant.title, time)
            if not variant.weights and variant.changes.get("method.name") != "supervised":
                unlabeled[variant.title] = {
                    name: measure(variant.title, functools.partial(metric_of, column=name))
                    for name in label_free.MEASURES
                }
        return StudyResult(name, study, table, validation, unlabeled, minutes, used)

    def verdicts(self) -> list[tuple[Claim, Verdict]]:
        columns = self.study.columns
        return [(claim, claim.decide(self.table, columns)) for claim in self.study.claims]

    def best(self) -> str:
        """A sentence on the variant that the validation images, or measures, would choose.

        Training with all labels is no choice: its row shows what the encoder can learn.
        """
        if tuple(self.study.columns) == label_free.MEASURES:
            return label_free.sentence(self.table)
        known = {
            title: each
            for title, each in self.validation.items()
            if each.values and title in self.without_labels
        }
        if len(known) < 2:
            return ""
        first, second = sorted(known, key=lambda title: -known[title].mean)[:2]
        a, b = known[first], known[second]
        difference = paired_interval(a, b)
        is_clear = difference is not None and difference.low > 0
        doubt = "" if is_clear else "; the interval of their difference contains 0"
        if difference is None:
            doubt = "; one seed cannot tell them apart"
        return (
            f"On the validation images {first} is best ({RANKED_BY} {a}), before {second} "
            f"({b}){doubt}."
        )

    def choices(self) -> list[label_free.Choice]:
        """What would be chosen without labels, compared with the accuracy of the table."""
        if RANKED_BY not in self.study.columns:
            return []
        accuracy = {title: row[RANKED_BY] for title, row in self.table.items()}
        return label_free.choices(self.without_labels, accuracy)

    def further_columns(self) -> dict[str, Mapping[str, Measurement]]:
        """Columns beside those of the study, by title: measurements by variant."""
        found = {f"validation {RANKED_BY}": self.validation, "CPU minutes": self.cpu_minutes}
        return {
            title: measurements
            for title, measurements in found.items()
            if any(each.values for each in measurements.values())
        }

    def markdown(self) -> str:
        """The table for a document: our metrics, and the paper's in brackets.

        Variants without a finished run are named below it.
        """
        head = ["", *self.study.columns]
        finished = {
            title: row
            for title, row in self.table.items()
            if any(each.values for each in row.values())
        }
        missing = [title for title in self.table if title not in finished]
        rows = [
            [title, *(with_paper(each) for each in row.values())] for title, row in finished.items()
        ]
        for title, measurements in self.further_columns().items():
            head.append(title)
            for row in rows:
                row.append(str(measurements.get(row[0], "–")))
        head.append("seeds")
        for row, cells in zip(rows, finished.values(), strict=True):
            row.append(str(max(len(each.values) for each in cells.values())))
        lines = [f"| {' | '.join(cells)} |" for cells in [head, *rows]]
        lines.insert(1, "| --- |" + " --: |" * (len(head) - 1))
        parts = [
            f"### {self.study.title}",
            "\n".join(lines),
            f"Not run yet: {', '.join(missing)}." if missing else "",
            self.hardware_note(),
            self._claims_table(),
            self.best(),
            label_free.markdown(self.choices(), RANKED_BY),
        ]
        return "\n\n".join(filter(None, parts)) + "\n"

    @property
    def timed_on(self) -> Hardware | None:
        """The hardware whose runs the CPU minutes are of."""
        return self.hardware[0][0] if self.hardware else None

    def hardware_note(self) -> str:
        """A sentence on runs of different hardware; empty if all have the same."""
        if len(self.hardware) < 2:
            return ""
        counts = "; ".join(f"{count} in {used}" for used, count in self.hardware)
        return f"Runs of several machines: {counts}. CPU minutes are those of the first of these."

    def _claims_table(self) -> str:
        """A row for each metric of each claim, with its own outcome.

        Claims whose variants were not run are left out.
        """
        lines = [
            "| claim | metric | ours | difference (95% interval) | the paper's | |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
        decided = [
            (claim, verdict)
            for claim, verdict in self.verdicts()
            if any(each.note != NOT_RUN for each in verdict.comparisons)
        ]
        for claim, verdict in decided:
            title = f"{claim.text}: **{verdict.outcome}**"
            for each in verdict.comparisons:
                outcome = f"{each.outcome}: {each.note}" if each.note else each.outcome
                cells = [title, each.metric, each.values, each.difference, each.paper, outcome]
                lines.append(f"| {' | '.join(cells)} |")
                title = ""
        return "\n".join(lines) if decided else ""

    def csv(self) -> str:
        """A row per measurement, with a column for the metric of each run."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        runs = max(len(each.values) for row in self.table.values() for each in row.values())
        numbers = [f"run {number + 1}" for number in range(runs)]
        writer.writerow(["study", "variant", "metric", "mean", "std", "paper", *numbers])
        for title, row in self.table.items():
            for column, each in row.items():
                missing = [None] * (runs - len(each.values))
                values = [each.mean, each.std, each.paper, *each.values, *missing]
                writer.writerow([self.name, title, column, *map(_number, values)])
        return text.getvalue()


def with_paper(measurement: Measurement) -> str:
    """A cell of a table: our metric, and the paper's in brackets."""
    paper = measurement.paper
    if paper is None:
        return str(measurement)
    return f"{measurement} ({paper:.1f})" if paper >= 10 else f"{measurement} ({paper:g})"


def _number(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{value:.6g}"
