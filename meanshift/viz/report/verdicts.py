"""The verdict on each run of a report; baselines and bands of charts."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from meanshift.evaluation.accuracy import Accuracy, best_of, difference
from meanshift.evaluation.knn import MONITOR_IMAGES
from meanshift.evaluation.verdict import (
    Training,
    Verdict,
    baseline_name,
    of_monitor,
    of_results,
    without_accuracy,
)
from meanshift.ops.collapse import PARTIAL_RANK, lowest_rank
from meanshift.viz.report.tables import format_number
from meanshift.viz.run_reader import MissingData, Run

KNN = ("20-NN", "1-NN")


def run_verdict(run: Run) -> Verdict:
    """What the results of a run mean: stored ones, else the k-NN while training, else neither."""
    training = Training(
        folder=run.folder,
        config=run.config,
        records=run.lines("metrics.jsonl"),
        collapsed=any(warning["kind"] == "collapse" for warning in run.warnings),
        steps=int(run.environment.get("steps") or 0),
        images=_monitor_images(run),
    )
    stored = of_results(training, run.results, run.directory.results)
    if stored is not None:
        note = run.outdated(run.results[stored.result])
        return replace(stored, details=(*stored.details, note)) if note else stored
    return of_monitor(training) or without_accuracy(training, labeled=is_labeled(run))


def comparison(verdict: Verdict) -> list[dict[str, Any]]:
    """The baselines of a verdict as rows: accuracy, difference, interval and its place on a scale.

    Places are in percent of the scale, which contains zero and all intervals.
    """
    known = [each for each in verdict.differences if each.known]
    low = min([0.0, *(each.low for each in known)])
    scale = max([0.0, *(each.high for each in known)]) - low or 1.0
    return [
        {
            "name": each.other.name,
            "accuracy": f"{each.other.value:.1f}%",
            "difference": f"{each.value:+.1f}",
            "interval": f"{each.low:+.1f} to {each.high:+.1f}" if each.known else "unknown",
            "sign": {1: "better", -1: "worse", 0: "unclear"}[each.sign],
            "unpaired": each.known and not each.paired,
            "zero": round(100 * -low / scale, 1),
            "start": round(100 * (each.low - low) / scale, 1) if each.known else 0,
            "width": round(100 * (each.high - each.low) / scale, 1) if each.known else 0,
            "point": round(100 * (each.value - low) / scale, 1) if each.known else 0,
        }
        for each in verdict.differences
    ]


def split_commands(text: str) -> list[str]:
    """Text and the commands in it, by turns."""
    return re.split(r"(meanshift [a-z]+ [^;]+)", text)


def outcome_rows(runs: Sequence[Run], verdicts: Sequence[Verdict]) -> list[dict[str, Any]]:
    """What the settings of several runs did: one row per metric, one cell per run.

    `best` tells which cells are marked. Accuracies are compared if they are of one metric on the
    same images.
    """
    own = [verdict.own for verdict in verdicts if verdict.own is not None]
    metrics = {(v.metric, v.own.test_images if v.own else "") for v in verdicts}
    if len(own) == len(runs) and len(metrics) == 1:
        best = max(own, key=lambda accuracy: accuracy.value)
        against = [_against(one, best) for one in own]
        rows = {f"{verdicts[0].metric}, % (95% interval)": list(map(_with_interval, own))}
        rows["against the best, points (95% interval)"] = against
        marks = best_of(own)
    else:
        texts = [f"{v.metric} {_with_interval(v.own)}" if v.own else "–" for v in verdicts]
        rows = {"accuracy, % (95% interval)": texts}
        marks = [False] * len(runs)
    means = {name: [run.epoch_means(name) for run in runs] for name in ("loss", "purity")}
    for name, by_run in means.items():
        rows[f"{name}, mean of the last epoch"] = [_last(list(one.values())) for one in by_run]
    rows["effective rank, last"] = [_last(run.series("effective_rank")[1]) for run in runs]
    return [
        {"name": name, "cells": texts, "best": marks if number == 0 else []}
        for number, (name, texts) in enumerate(rows.items())
        if set(texts) != {"–"}
    ]


def _last(values: Sequence[float]) -> str:
    return format_number(values[-1]) if values else "–"


def _against(accuracy: Accuracy, best: Accuracy) -> str:
    if accuracy is best:
        return "the best"
    found = difference(accuracy, best)
    interval = f" ({found.low:+.1f} to {found.high:+.1f})" if found.known else ""
    return f"{found.value:+.1f}{interval}"


def _with_interval(accuracy: Accuracy) -> str:
    if accuracy.interval is None:
        return f"{accuracy.value:.1f}"
    low, high = accuracy.interval
    return f"{accuracy.value:.1f} ({low:.1f} to {high:.1f})"


def baseline_lines(runs: Sequence[Run], metric: str) -> list[dict[str, Any]]:
    """Accuracies to compare a k-NN curve with: the start, raw pixels, chance; equal ones once."""
    lines: dict[tuple[str, str], float] = {}
    curves = {run.name: run.series(metric) for run in runs}
    starts = {name: values[0] for name, (epochs, values) in curves.items() if epochs[:1] == [0]}
    for name, value in starts.items():
        same = len({f"{start:.1f}" for start in starts.values()}) == 1
        lines["start" if same else f"start of {name}", f"{value:.1f}"] = value
    for run in runs:
        data = run.results.get("knn", {"card": {}})["card"].get("data")
        for result in run.results.values():
            card = result["card"]
            name = baseline_name(str(card.get("encoder")))
            comparable = card.get("protocol") == "knn" and card.get("data") == data
            if name.startswith("raw") and comparable and metric in result["metrics"]:
                value = result["metrics"][metric]
                lines.setdefault((name, f"{value:.1f}"), value)
        if (chance := _chance(run)) is not None:
            lines.setdefault(("chance", f"{chance:.1f}"), chance)
    return [{"y": value, "text": f"{name} {text}"} for (name, text), value in lines.items()]


def _chance(run: Run) -> float | None:
    """The accuracy of always answering the most frequent class of the validation images."""
    try:
        labels = None if run.validation is None else run.validation.labels
    except MissingData:
        return None
    known = None if labels is None else labels[labels >= 0]
    if known is None or not len(known):
        return None
    return 100 * int(known.bincount().max()) / len(known)


def _monitor_images(run: Run) -> int:
    """The validation images of the k-NN while training; 0 if they are not there."""
    try:
        validation = run.validation
    except MissingData:
        return 0
    return 0 if validation is None else min(len(validation), MONITOR_IMAGES)


def is_labeled(run: Run) -> bool:
    """Whether the images of a run have labels; if they are not there, whether k-NN was computed."""
    try:
        return run.source.labeled
    except MissingData:
        return bool(run.records("monitor"))


def rank_bands(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Where the effective rank is that of a collapse; nothing if the runs have other dimensions."""
    dims = {dimensions(run) for run in runs}
    dim = dims.pop()
    if dims or dim < 4 * PARTIAL_RANK:
        return []
    low = round(lowest_rank(dim), 1)
    return [
        {"from": 0, "to": PARTIAL_RANK, "text": "collapsed", "kind": "bad"},
        {"from": PARTIAL_RANK, "to": low, "text": "low", "kind": "poor"},
        {"from": low, "to": dim, "text": f"good ({dim} dimensions)", "kind": "good"},
    ]


def dimensions(run: Run) -> int:
    """The dimensions of the embeddings; 0 if they are not known."""
    dim = int(run.setting("method.dim") or 0)
    if not dim and run.snapshot_epochs:  # the authors' rule: a quarter of the features
        with contextlib.suppress(MissingData):
            dim = run.snapshot(run.snapshot_epochs[-1]).features.shape[1] // 4
    return dim
