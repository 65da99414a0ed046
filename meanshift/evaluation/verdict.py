"""Whether a trained encoder is better than its baselines, by how much, and what to do next."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from meanshift.config import Config
from meanshift.evaluation.accuracy import Accuracy, Difference, Z, difference, stored_arrays
from meanshift.runtime.run_directory import RunDirectory

BASELINES = {
    "untrained:.*, PCA start, before": "its PCA start",
    "untrained:.*, start from .*, before": "the given weights",
    "untrained:": "the untrained encoder",
    "random:": "random weights",
    "pixels: raw values": "raw values",
    "pixels:": "raw pixels",
}
"""a pattern of the encoder on a card, and what tables and sentences call it"""
METRICS = ("20-NN", "1-NN", "top-1")
"""accuracies that a verdict is based on, in this order"""


def baseline_name(encoder: str) -> str:
    """What the baseline on a card is called; empty if it is none."""
    return next((name for pattern, name in BASELINES.items() if re.match(pattern, encoder)), "")


@dataclass(frozen=True)
class Trend:
    """The change of a metric over the second half of a training: of a line fitted to it."""

    metric: str
    first: float
    last: float
    change: float
    error: float
    """half of the 95% interval"""

    @property
    def sign(self) -> int:
        """1 is better and -1 is worse by more than the uncertainty, else 0."""
        if abs(self.change) <= self.error:
            return 0
        return 1 if (self.change > 0) != (self.metric == "loss") else -1

    @property
    def in_words(self) -> str:
        states = {1: "still improving", -1: "getting worse", 0: "no change beyond the noise"}
        digits, unit = 1, " points"
        if self.metric == "loss":  # it rises in good runs too, as with a growing k
            states |= {1: "the loss is still falling", -1: "the loss is rising"}
            digits, unit = 3, ""
        state = states[self.sign]
        return (
            f"{state}: {self.metric} {self.change:+.{digits}f}{unit} (± {self.error:.{digits}f}) "
            f"from epoch {self.first:.3g} to {self.last:.3g}"
        )


def trend(metric: str, epochs: Sequence[float], values: Sequence[float], images: int = 0) -> Trend:
    """Fit a line to the second half of a curve.

    The noise is that of the points around the line. Of an accuracy with fewer than five points it
    is that of a proportion of `images`, which is too large rather than too small, since all epochs
    are evaluated on the same images.
    """
    x, y = np.array(epochs, float), np.array(values, float)
    late = x >= x[-1] / 2
    late[-3:] = True
    x, y = x[late], y[late]
    squares = float(((x - x.mean()) ** 2).sum())
    slope = float(((x - x.mean()) * y).sum()) / squares
    errors = Z
    if images and len(x) < 5:
        p = float(y.mean()) / 100
        noise = 100 * math.sqrt(p * (1 - p) / images)
    else:
        free = max(1, len(x) - 2)
        errors = _student(free)
        rest = y - y.mean() - slope * (x - x.mean())
        noise = math.sqrt(float((rest**2).sum()) / free)
    span = float(x[-1] - x[0])
    return Trend(metric, x[0], x[-1], slope * span, errors * noise * span / math.sqrt(squares))


def _student(free: int) -> float:
    """The 97.5% quantile of Student's t, by the expansion of Cornish and Fisher."""
    return Z + (Z**3 + Z) / (4 * free) + (5 * Z**5 + 16 * Z**3 + 3 * Z) / (96 * free**2)


@dataclass(frozen=True)
class Verdict:
    """What the metrics of an encoder mean, in a few sentences."""

    summary: str
    """the comparison in a few words"""
    details: tuple[str, ...]
    next_step: str
    metric: str = ""
    own: Accuracy | None = None
    differences: tuple[Difference, ...] = ()
    result: str = ""
    """the name of the stored result that it is about; empty if there is none"""

    @property
    def text(self) -> str:
        """The lines that a terminal shows."""
        lines = [f"verdict: {self.summary}", *(f"  {line}" for line in self.details)]
        return "\n".join([*lines, f"next: {self.next_step}"])


@dataclass(frozen=True)
class Training:
    """What a run directory records of the training."""

    folder: Path
    config: Config
    records: Sequence[Mapping[str, Any]]
    """the lines of metrics.jsonl"""
    collapsed: bool
    steps: int
    """of the whole training; 0 if it is not known"""
    images: int = 0
    """validation images of the k-NN while training; 0 if it is not known"""

    @classmethod
    def read(cls, folder: Path | str, *, images: int = 0) -> Training:
        directory = RunDirectory.open(Path(folder))
        warnings = directory.read("warnings.jsonl")
        return cls(
            folder=Path(folder),
            config=directory.config,
            records=directory.read("metrics.jsonl"),
            collapsed=any(warning["kind"] == "collapse" for warning in warnings),
            steps=int(directory.environment.get("steps") or 0),
            images=images,
        )

    @property
    def kind(self) -> str:
        """What a sample is: image, signal or vector."""
        return self.config.data.sample_spec.kind

    @property
    def finished(self) -> bool:
        return max((record["step"] for record in self.records), default=0) >= self.steps

    def series(self, metric: str, kind: str) -> tuple[list[float], list[float]]:
        """A metric as (epochs, values); the epochs of lines within an epoch are fractional."""
        per_epoch = self.steps / self.config.train.epochs
        found = [r for r in self.records if r["kind"] == kind and metric in r]
        epochs = [r["step"] / per_epoch if per_epoch else float(r["epoch"]) for r in found]
        return epochs, [float(r[metric]) for r in found]

    @property
    def monitored(self) -> str:
        """The k-NN metric that was evaluated while training; empty if there is none."""
        return next((name for name in METRICS[:2] if self.series(name, "monitor")[1]), "")

    @property
    def start_name(self) -> str:
        """What the encoder before the first step is called."""
        if self.config.encoder.weights:
            return "the given weights"
        return "its PCA start" if self.config.encoder.init == "pca" else "the untrained encoder"

    def trend(self) -> Trend | None:
        """The trend of the k-NN accuracy, or of the loss where there is none."""
        epochs, values = self.series(self.monitored, "monitor")
        if len(values) > 2:
            return trend(self.monitored, epochs, values, self.images)
        epochs, values = self.series("loss", "train")
        return trend("loss", epochs, values) if len(values) > 2 else None


def compare(
    metric: str, own: Accuracy, others: Sequence[Accuracy], training: Training | None = None
) -> Verdict:
    """The verdict on an accuracy beside those of other encoders."""
    differences = tuple(difference(own, other) for other in others)
    summary = _summarize(differences)
    kind = "sample" if training is None else training.kind
    images = f" on {own.images:,} test {kind}s" if own.images else ""
    accuracies = [f"{metric} {own.value:.1f}%{images}", *map(_describe, differences)]
    details = ["; ".join(accuracies)]
    change = None if training is None else training.trend()
    if change is not None:
        details.append(change.in_words)
    step = _next_step(differences, change, training)
    return Verdict(summary, tuple(details), step, metric, own, differences)


def _summarize(differences: Sequence[Difference]) -> str:
    """Better than these, worse than those."""
    parts = []
    for sign, words in ((1, "better than"), (-1, "worse than"), (0, "not distinguishable from")):
        if names := [each.other.name for each in differences if each.sign == sign]:
            *others, last = names
            listed = f"{', '.join(others)} and {last}" if others else last
            parts.append(f"{words} {listed}")
    return "; ".join(parts) or "not compared with a baseline yet"


def _describe(each: Difference) -> str:
    """The other accuracy, the difference and its interval."""
    kind = "95% interval" if each.paired else "unpaired 95% interval"
    interval = f", {kind} {each.low:+.1f} to {each.high:+.1f}" if each.known else ""
    return f"{each.other.name} {each.other.value:.1f}% ({each.value:+.1f} points{interval})"


def without_accuracy(training: Training, *, labeled: bool) -> Verdict:
    """What can be said of a run without an accuracy: of collapse, loss and neighbors."""
    folder = shlex.quote(str(training.folder))
    details = []
    newest = {name: value for record in training.records for name, value in record.items()}
    if "effective_rank" in newest:
        dim = getattr(training.config.method, "dim", 0)
        of = f" of {dim}" if dim else ""
        details.append(f"effective rank {newest['effective_rank']:.1f}{of}")
    if "neighbors_kept" in newest:
        kept = newest["neighbors_kept"]
        details.append(f"{kept:.0%} of the neighbors are those of the snapshot before")
    change = training.trend()
    lines = ["; ".join(details)] if details else []
    if change is not None:
        lines.append(change.in_words)
    reason = "it was not evaluated yet" if labeled else "there are no labels to evaluate with"
    summary = f"no accuracy, since {reason}"
    if training.collapsed:
        summary = f"collapsed; {summary}"
    step = _next_step((), change, training)
    if not labeled and training.finished and not training.collapsed:
        step = (
            f"look at the neighbors: meanshift explore {folder}; for an accuracy label some "
            f"{training.kind}s: meanshift evaluate knn {folder} --labels FILE.csv --compare "
            f"untrained: pixels"
        )
    return Verdict(summary, tuple(lines), step)


def _next_step(
    differences: Sequence[Difference], change: Trend | None, training: Training | None
) -> str:
    """What to type next; a command ends with the line or before a semicolon."""
    if training is None:
        return "other protocols: meanshift evaluate --help"
    folder = shlex.quote(str(training.folder))
    config = shlex.quote(str(training.folder / "config.json"))
    continued = f"meanshift pretrain --config {config} --out {folder}"
    longer = f"{continued} --train.epochs {2 * training.config.train.epochs}"
    if not training.finished:
        return f"the training is not finished; continue it: {continued}"
    if training.collapsed:
        return "the run has collapsed: change what its warning names, and train again"
    if not differences:
        return f"compare it: meanshift evaluate knn {folder} --compare untrained: pixels"
    direction = 0 if change is None else change.sign
    if direction > 0:
        return f"train longer: {longer}"
    worst = min(each.sign for each in differences)
    if worst > 0:
        return f"look at the neighbors: meanshift explore {folder}; or train longer: {longer}"
    if worst == 0 and direction == 0:
        return f"train longer: {longer}; or evaluate it on more {training.kind}s"
    source = shlex.quote(training.config.data.source)
    return f"try another recipe, as advised by: meanshift doctor {source}"


def of_results(
    training: Training, results: Mapping[str, Mapping[str, Any]], folder: Path
) -> Verdict | None:
    """The verdict on the stored results of a run, by the first protocol that has an accuracy.

    `folder` contains the arrays of the results. None if the run itself was not evaluated.
    """
    for metric in METRICS:
        for name, own in results.items():
            protocol, data = own["card"].get("protocol"), own["card"].get("data")
            if name != protocol or metric not in own["metrics"]:
                continue
            others: dict[str, Accuracy] = {}
            for other_name, other in results.items():
                card = other["card"]
                baseline = baseline_name(str(card.get("encoder")))
                comparable = (card.get("protocol"), card.get("data")) == (protocol, data)
                if baseline and comparable and metric in other["metrics"]:
                    arrays = stored_arrays(folder / f"{other_name}.npz")
                    metrics = other["metrics"]
                    others[baseline] = Accuracy.of_result(baseline, metric, metrics, card, arrays)
            arrays = stored_arrays(folder / f"{name}.npz")
            run = training.folder.name
            accuracy = Accuracy.of_result(run, metric, own["metrics"], own["card"], arrays)
            ordered = [others[title] for title in BASELINES.values() if title in others]
            return replace(compare(metric, accuracy, ordered, training), result=name)
    return None


def of_monitor(
    training: Training,
    *,
    newest: Mapping[str, Any] | None = None,
    first: Mapping[str, Any] | None = None,
    baselines: Mapping[str, Mapping[str, Any]] | None = None,
) -> Verdict | None:
    """The verdict on the k-NN while training: the last epoch, the start, and other baselines.

    The arguments are, for each metric, which validation images are classified correctly.
    """
    metric = training.monitored
    epochs, values = training.series(metric, "monitor")
    if not values:
        return None
    images = training.images
    rows = (newest or {}).get(metric)
    own = Accuracy.of_rows(training.folder.name, values[-1], rows, images=images)
    others = []
    if epochs[0] == 0 and len(values) > 1:
        rows = (first or {}).get(metric)
        others.append(Accuracy.of_rows(training.start_name, values[0], rows, images=images))
    for name, correct in (baselines or {}).items():
        value = 100 * float(np.mean(np.asarray(correct[metric])))
        others.append(Accuracy.of_rows(name, value, correct[metric]))
    return compare(metric, own, others, training)
