"""What came out: a table a study, our means and deviations beside the paper's, and verdicts."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meanshift.reproduce.claims import Cell, Claim, Ruling, Table
from meanshift.reproduce.jobs import Job
from meanshift.reproduce.studies import Study

_JUDGED = {  # column: protocol and its figure
    "1-NN": ("knn", "1-NN"),
    "20-NN": ("knn", "20-NN"),
    "linear": ("linear", "top-1"),
    "1% of labels": ("semi", "1% top-1"),
    "10% of labels": ("semi", "10% top-1"),
}
_LOGGED = {  # column: kind of record and its figure, the last of the run
    "purity": ("train", "purity"),
    "rank": ("train", "effective_rank"),
    "agreement": ("train", "agreement"),
    "purity, weak views": ("snapshot", "purity_weak"),
    "purity, strong views": ("snapshot", "purity_strong"),
}
CHOSEN_BY = "20-NN"
"""the figure of the validation cut by which variants are ranked"""


def protocols(columns: Sequence[str]) -> list[str]:
    """What must be judged to fill these columns."""
    return list(dict.fromkeys(_JUDGED[name][0] for name in columns if name in _JUDGED))


def figure(job: Job, column: str) -> float | None:
    """A run's figure; None where it is not finished."""
    run = job.look()
    if run is None or not job.trained:
        return None
    if column in _JUDGED:
        protocol, name = _JUDGED[column]
        held = job.result(protocol)
        return None if held is None else held["figures"].get(name)
    if column == "collapse at epoch":
        alarms = [w["step"] / run.steps for w in run.warnings if w["kind"] == "collapse"]
        return min(alarms, default=math.inf)
    kind, name = _LOGGED[column]
    told = [record[name] for record in run.records(kind) if name in record]
    return told[-1] if told else None


def chosen_by(job: Job) -> float | None:
    """The figure of the validation cut at the end of training."""
    run = job.look()
    told = run.records("monitor") if run is not None and job.trained else []
    return told[-1].get(CHOSEN_BY) if told else None


@dataclass(frozen=True)
class Sheet:
    """A study's table, filled as far as its runs have come."""

    name: str
    study: Study
    table: Table
    validation: Mapping[str, Cell]
    """20-NN on the cut held out from training; empty where the table itself is of that cut"""

    @staticmethod
    def of(name: str, study: Study, jobs: Mapping[str, Sequence[Job]], *, apart: bool) -> Sheet:
        """The figures of runs by variant; `apart`: they are of other images than the cut's."""

        def cells(variant: str, find: Any, paper: float | None = None) -> Cell:
            values = (find(job) for job in jobs[variant])
            return Cell(tuple(v for v in values if v is not None), paper)

        table = {
            each.title: {
                column: cells(
                    each.title, lambda job, c=column: figure(job, c), each.paper.get(column)
                )
                for column in study.columns
            }
            for each in study.variants
        }
        ranked = {each.title: cells(each.title, chosen_by) for each in study.variants}
        return Sheet(name, study, table, ranked if apart else {})

    def rulings(self) -> list[tuple[Claim, Ruling]]:
        return [(each, each.decide(self.table, self.study.columns)) for each in self.study.claims]

    def best(self) -> str:
        """Which variant the validation cut would choose, in a sentence."""
        seen = {title: cell for title, cell in self.validation.items() if cell.values}
        if len(seen) < 2:
            return ""
        first, second = sorted(seen, key=lambda title: -seen[title].mean)[:2]
        a, b = seen[first], seen[second]
        wide = a.deviation + b.deviation
        clear = "" if a.mean - b.mean > wide else "; by less than the deviations, or of one seed"
        told = f"{first} is best ({CHOSEN_BY} {a}), before {second} ({b})"
        return f"On the validation cut {told}{clear}."

    def markdown(self) -> str:
        """The table for a document: ours, and the paper's in brackets."""
        head = ["", *self.study.columns]
        rows = [[t, *(_beside(c) for c in cells.values())] for t, cells in self.table.items()]
        if self.validation:
            head.append(f"validation {CHOSEN_BY}")
            for row in rows:
                row.append(str(self.validation[row[0]]))
        lines = [f"| {' | '.join(cells)} |" for cells in [head, *rows]]
        lines.insert(1, "| --- |" + " --: |" * (len(head) - 1))
        claims = [f"- {c.text}: **{r.verdict}** ({r.why})." for c, r in self.rulings()]
        best = ["", self.best()] if self.best() else []
        return "\n".join([f"### {self.study.title}", "", *lines, "", *claims, *best]) + "\n"

    def csv(self) -> str:
        """A row a cell, with the figure of every seed."""
        text = io.StringIO()
        out = csv.writer(text, lineterminator="\n")
        out.writerow(["study", "variant", "figure", "mean", "deviation", "paper", "seeds"])
        for title, cells in self.table.items():
            for column, cell in cells.items():
                shown = [_number(v) for v in (cell.mean, cell.deviation, cell.paper)]
                out.writerow([self.name, title, column, *shown, *map(_number, cell.values)])
        return text.getvalue()


def _beside(cell: Cell) -> str:
    if cell.paper is None:
        return str(cell)
    return f"{cell} ({cell.paper:.1f})" if cell.paper >= 10 else f"{cell} ({cell.paper:g})"


def _number(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{value:.6g}"
