"""The results of evaluations as tables: one per protocol and data, one row per encoder."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from meanshift.evaluation import PROTOCOLS
from meanshift.evaluation.accuracy import Accuracy, best_of, stored_arrays
from meanshift.evaluation.verdict import METRICS, baseline_name
from meanshift.viz.report import sections
from meanshift.viz.run_reader import Run, is_number

NOT_RANKED = ("mean squared distance", "empty clusters", "best top-1, chosen on test")
"""metrics of which no value is marked as the best"""


def result_tables(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """All results of all runs, in the order of the protocols."""
    tables: dict[tuple[str, str], dict[str, Any]] = {}
    for run in runs:
        for name, result in run.results.items():
            protocol = result["card"].get("protocol")
            data = result["card"].get("data")
            if not protocol or not data or not all(map(is_number, result["metrics"].values())):
                continue
            if re.match("transfer-(?!of-)", protocol):  # one dataset: the table of all contains it
                continue
            table = tables.setdefault(
                (protocol, data), {"protocol": protocol, "data": data, "columns": {}, "rows": []}
            )
            row = _row(run, name, result, prefix=f"{run.name}: " if len(runs) > 1 else "")
            table["columns"] |= dict.fromkeys(row["metrics"])
            if not any(_equal(row, known) for known in table["rows"]):
                table["rows"].append(row)
    for table in tables.values():
        _distinguish(table["rows"])
        _mark_best(table)
        table["rows"].sort(key=lambda row: not row["own"])
        table["columns"] = list(table["columns"])
    order = {name: place for place, name in enumerate(PROTOCOLS)}
    return sorted(
        tables.values(), key=lambda table: order.get(table["protocol"].split("-")[0], len(order))
    )


def _row(run: Run, name: str, result: Mapping[str, Any], *, prefix: str) -> dict[str, Any]:
    """One result: of the run itself (`own`), of one of its checkpoints, a baseline or others.

    The card tells whose it is. The name of the file also has the data and the options.
    """
    card = result["card"]
    suffix = name.removeprefix(card["protocol"]).strip("-")
    encoder = str(card.get("encoder"))
    spec, _, description = encoder.partition(": ")
    of_run = not suffix or re.fullmatch(r"(?!exported by ).*, step \d+", description) is not None
    baseline = baseline_name(encoder)
    if baseline:
        title = baseline if spec == "pixels" else prefix + baseline
    elif of_run:
        title = ", ".join(filter(None, [run.name, run.outdated(result)]))
    else:
        title = spec
    arrays = stored_arrays(run.directory.results / f"{name}.npz")
    return {
        "name": title,
        "own": of_run and not baseline and not spec.endswith(".pt"),
        "suffix": suffix,
        "metrics": _format_metrics(result["metrics"]),
        "values": result["metrics"],
        "best": set(),
        "accuracies": {
            metric: Accuracy.of_result(title, metric, result["metrics"], card, arrays)
            for metric in result["metrics"]
            if metric in METRICS
        },
        "card": [(key, format_value(value)) for key, value in card.items()],
        "image": sections.result_image(run, name),
    }


def _mark_best(table: Mapping[str, Any]) -> None:
    """Mark the best value of each metric, and accuracies that cannot be told from the best."""
    rows = table["rows"]
    if len(rows) < 2 or table["protocol"] == "rank":  # a higher rank is not always better
        return
    for metric in table["columns"]:
        known = [row for row in rows if metric in row["metrics"]]
        if metric in NOT_RANKED or len(known) < 2:
            continue
        values = [row["values"][metric] for row in known]
        best = [value == max(values) for value in values]
        if all(metric in row["accuracies"] for row in known):
            best = best_of([row["accuracies"][metric] for row in known])
        for row, is_best in zip(known, best, strict=True):
            if is_best:
                row["best"].add(metric)


def _distinguish(rows: Sequence[dict[str, Any]]) -> None:
    """Add to rows of one name what distinguishes their files: checkpoint, options."""
    names = Counter(row["name"] for row in rows)
    for row in rows:
        if names[row["name"]] > 1 and row["suffix"]:
            row["name"] += f" ({row['suffix']})"


def _equal(row: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two rows are the same baseline, evaluated beside each of two runs."""
    return not row["own"] and (row["name"], row["metrics"]) == (other["name"], other["metrics"])


def _format_metrics(metrics: Mapping[str, float]) -> dict[str, str]:
    """Metrics as text, each with its std where there is one: `55.2 ± 0.4`."""
    formatted = {name: format_number(value) for name, value in metrics.items()}
    for name in metrics:
        if f"{name} std" in formatted:
            formatted[name] += f" ± {formatted.pop(f'{name} std')}"
    return formatted


def format_number(value: float) -> str:
    """A number with a sensible number of digits."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"


def format_value(value: Any) -> str:
    """Any value of a card or a setting as text."""
    if value is None:
        return "–"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {format_value(item)}" for key, item in value.items() if item != "")
    if isinstance(value, list | tuple):
        return " ".join(map(format_value, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
