"""The results of evaluations as tables: one per protocol and data, one row per encoder."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from meanshift.evaluation import PROTOCOLS
from meanshift.viz.report import sections
from meanshift.viz.run_reader import Run, is_number

BASELINES = {
    "untrained:.*, PCA start, before": "its PCA start",
    "untrained:.*, start from .*, before": "the given weights",
    "untrained:": "the untrained encoder",
    "random:": "random weights",
    "pixels: raw values": "raw values",
    "pixels:": "raw pixels",
}
"""a pattern of the encoder on a card, and what a table calls it"""


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
    baseline = _baseline(encoder)
    if baseline:
        title = baseline if spec == "pixels" else prefix + baseline
    elif of_run:
        title = ", ".join(filter(None, [run.name, run.outdated(result)]))
    else:
        title = spec
    return {
        "name": title,
        "own": of_run and not baseline and not spec.endswith(".pt"),
        "suffix": suffix,
        "metrics": _format_metrics(result["metrics"]),
        "card": [(key, format_value(value)) for key, value in card.items()],
        "image": sections.result_image(run, name),
    }


def _distinguish(rows: Sequence[dict[str, Any]]) -> None:
    """Add to rows of one name what distinguishes their files: checkpoint, options."""
    names = Counter(row["name"] for row in rows)
    for row in rows:
        if names[row["name"]] > 1 and row["suffix"]:
            row["name"] += f" ({row['suffix']})"


def _equal(row: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two rows are the same baseline, evaluated beside each of two runs."""
    return not row["own"] and (row["name"], row["metrics"]) == (other["name"], other["metrics"])


def _baseline(encoder: str) -> str:
    titles = (title for pattern, title in BASELINES.items() if re.match(pattern, encoder))
    return next(titles, "")


def _format_metrics(metrics: Mapping[str, float]) -> dict[str, str]:
    """Metrics as text, each with its std where there is one: `55.2 ± 0.4`."""
    formatted = {name: format_number(value) for name, value in metrics.items()}
    for name in metrics:
        if f"{name} std" in formatted:
            formatted[name] += f" ± {formatted.pop(f'{name} std')}"
    return formatted


def headline(run: Run) -> str:
    """The k-NN accuracy beside that of the baselines, as a sentence; empty if there is none."""
    results = run.results
    own = results.get("knn", {"metrics": {}})
    name = next((name for name in ("20-NN", "1-NN") if name in own["metrics"]), None)
    if name is None:
        return ""
    data = own["card"].get("data")
    baselines: dict[str, str] = {}
    for result in results.values():
        card = result["card"]
        title = _baseline(str(card.get("encoder")))
        comparable = card.get("protocol") == "knn" and card.get("data") == data
        if title and comparable and name in result["metrics"]:
            baselines.setdefault(title, f"{title} {result['metrics'][name]:.1f}")
    beside = [baselines[title] for title in BASELINES.values() if title in baselines]
    sentence = f"{name} on {data}: {own['metrics'][name]:.1f}%"
    if beside:
        sentence += f" ({', '.join(beside)})"
    outdated = run.outdated(own)
    return f"{sentence}, {outdated}." if outdated else f"{sentence}."


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
