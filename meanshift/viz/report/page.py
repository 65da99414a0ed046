"""One self-contained page about one or more runs, made from their directories alone."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from meanshift.config import differences, settings
from meanshift.config.recipes import command_for, nearest_recipe, recipe
from meanshift.evaluation import NAMES
from meanshift.runtime.run_directory import write_text
from meanshift.viz.report import sections
from meanshift.viz.run_reader import MissingData, Run, differing, is_number
from meanshift.viz.style import page, thinned

CURVES = {
    "loss": "Loss",
    "20-NN": "20-NN while training, %",
    "1-NN": "1-NN while training, %",
    "purity": "Purity of the neighbors",
    "agreement": "Agreement of the two views",
    "effective_rank": "Effective rank of the embeddings",
    "spread": "Spread of the embeddings",
    "lr": "Learning rate",
    "images_per_second": "Images a second",
}
BASELINES = {"the untrained encoder": "untrained:", "raw pixels": "pixels:"}
ABOUT = {
    "loss": "squared distance of the online embedding to the neighbors; a growing k raises it",
    "20-NN": "held-out images whose 20 nearest training images vote for their class",
    "purity": "share of the neighbors 2 to k in the bank that have the query's class",
    "agreement": "cosine of the two views' embeddings: near 1 early on is a sign of collapse",
    "effective_rank": "directions that the embeddings of a batch really use; it falls in the first "
    "epochs of healthy runs too, and to about 1 in a collapse",
    "spread": "1 where embeddings point everywhere, 0 where all are one",
}
"""What the curves mean, for people who see them for the first time."""
SPANS = {"20-NN": 10, "1-NN": 10, "purity": 0.1, "agreement": 0.1, "spread": 0.1}
"""The least range that a curve's axis shows, so that a small change looks small."""


def write_report(runs: Sequence[Run], out: Path, *, most: int = 1000) -> Path:
    """Write the page; `most` is how many images of each probe it carries."""
    sheets: dict[str, str] = {}
    pages = [_run(run, color, sheets, most) for color, run in enumerate(runs)]
    drawn = {
        "runs": [page.pop("drawn") for page in pages],
        "curves": _curves(runs),
        "sheets": sheets,
    }
    text = page(
        "report.html",
        runs=pages,
        title=" and ".join(run.name for run in runs) if len(runs) < 4 else f"{len(runs)} runs",
        differing={name: list(map(_plain, values)) for name, values in differing(runs).items()},
        tables=_tables(runs),
        about=[(CURVES[name], text) for name, text in ABOUT.items()],
        drawn=json.dumps(drawn, allow_nan=False).replace("<", "\\u003c"),
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, text.encode("utf-8", "replace").decode())  # file names may be any bytes
    return out


def _run(run: Run, color: int, sheets: dict[str, str], most: int) -> dict[str, Any]:
    """All that the page says of one run; a part that lacks something carries its sentence."""
    part = _or_lacking
    seen = part(lambda: sections.seen(run, sheets, most))
    bad = [w for w in run.warnings if w["kind"] == "bad image"]
    config = run.config
    return {
        "name": run.name,
        "color": color % 10,
        "signs": _signs(run),
        "alarms": [w["message"] for w in run.warnings if w["kind"] == "collapse"],
        "notes": [w["message"] for w in run.warnings if w["kind"] not in ("collapse", "bad image")],
        "seen": {key: value for key, value in seen.items() if key != "drawn"},
        "clusters": part(lambda: sections.clusters(run)),
        "views": part(lambda: sections.views(run)),
        "data": part(lambda: sections.data(run)),
        "bad": bad,
        "settings": _settings(run),
        "recipe": nearest_recipe(config),
        "judge": _judge(run),
        "summary": _summary(run),
        "verdict": _verdict(run),
        "began": _typed(run),
        "versions": _versions(run),
        "reproduce": command_for(config, f"{run.folder}-again"),
        "continue": command_for(config, str(run.folder)),
        "folder": shlex.quote(str(run.folder)),
        "drawn": {"name": run.name, "color": color % 10, **seen.get("drawn", {})},
    }


def _or_lacking(make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return make()
    except MissingData as lacking:
        return {"lacks": str(lacking)}


# The headline


def _summary(run: Run) -> str:
    """What the run is and how far it has come, in a sentence."""
    config, epochs = run.config, run.config.train.epochs
    method = "BYOL" if config.method.k == 1 else f"Mean Shift, k {config.method.k}"
    done = run.done
    told = f"{method}, {run.pair}, {config.encoder.name}, on {config.data.source}: "
    if done >= epochs - 1e-9:
        return told + f"all {epochs} epochs trained."
    return told + f"{done:.1f} of {epochs} epochs so far; what follows is not its end."


def _verdict(run: Run) -> list[str]:
    """What the k-NN figures say when they stand beside their baselines."""
    results = run.results
    own = results.get("knn", {}).get("figures", {})
    name = next((name for name in ("20-NN", "1-NN") if name in own), None)
    if name is None:
        return []
    data, told = results["knn"]["card"].get("data"), []
    for title, spec in BASELINES.items():
        for held in results.values():
            card, figures = held["card"], held["figures"]
            same = card.get("protocol") == "knn" and card.get("data") == data
            if same and str(card.get("judged")).startswith(spec) and name in figures:
                told.append(f"{title} {figures[name]:.1f}")
                break
    beside = f" ({', '.join(told)})" if told else ""
    older = run.older(results["knn"])
    when = f", {older}" if older else ""
    return [f"{name} on {data}: {own[name]:.1f}%{beside}{when}."]


def _judge(run: Run) -> str:
    """How to judge it: by labels where there are any."""
    folder = shlex.quote(str(run.folder))
    try:
        labeled = run.source.labeled
    except MissingData:
        labeled = bool(run.records("monitor"))
    if not labeled:
        return f"meanshift evaluate cluster {folder} --clusters 10"
    return f"meanshift evaluate knn linear cluster {folder} --compare untrained:{folder} pixels"


def _typed(run: Run) -> str:
    """The command line of the last session, unless another program called the training."""
    first, *words = run.environment.get("command") or [""]
    ours = Path(first).name in ("meanshift", "__main__.py")
    return shlex.join(["meanshift", *words]) if ours else ""


def _versions(run: Run) -> list[tuple[str, str]]:
    here = run.environment
    told = {
        "begun" if not here.get("earlier") else "continued": here.get("date"),
        "python": here.get("python"),
        **here.get("versions", {}),
        "machine": here.get("machine"),
        "device": here.get("device"),
        "precision": here.get("precision"),
        "threads": here.get("threads"),
        "commit": here.get("commit"),
    }
    return [(name, _plain(value)) for name, value in told.items() if value]


def _signs(run: Run) -> list[tuple[str, str, str]]:
    """(what, figure, how it came about) of the signs people look for first."""
    told = []
    for name, title in CURVES.items():
        if name not in ("loss", "20-NN", "purity", "effective_rank"):
            continue
        epochs, values = run.series(name)
        if values:
            first = f"first {_figure(values[0])}, epoch {epochs[0]:.2g}" if len(values) > 1 else ""
            told.append((title, _figure(values[-1]), first))
    _, kept = run.series("neighbors_kept")
    if kept:
        told.append(("Neighbors kept since the last snapshot", f"{kept[-1]:.0%}", ""))
    return told


def _tables(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """A table a protocol: those judged, their figures, and the card of each."""
    tables: dict[tuple[str, str], dict[str, Any]] = {}
    for run in runs:
        for stem, held in run.results.items():
            card, figures = held["card"], held["figures"]
            protocol, data = card.get("protocol"), card.get("data")
            if not protocol or not data or not all(map(is_number, figures.values())):
                continue
            if re.match("transfer-(?!of-)", protocol):  # one dataset: the table of all has it
                continue
            table = tables.setdefault(
                (protocol, data), {"protocol": protocol, "data": data, "columns": {}, "rows": []}
            )
            told = {name: _figure(value) for name, value in figures.items()}
            for name in [name for name in told if f"{name} deviation" in told]:
                told[name] += f" ± {told.pop(f'{name} deviation')}"
            table["columns"] |= dict.fromkeys(told)
            name = stem.removeprefix(protocol).strip("-")
            own = not name
            spec = str(card.get("judged"))
            name = next((title for title, at in BASELINES.items() if spec.startswith(at)), name)
            row = {"name": name or run.name, "own": own, "figures": told, "card": _flat(card)}
            if own and run.older(held):
                row["name"] = f"{run.name}, {run.older(held)}"
            if name and len(runs) > 1 and not spec.startswith("pixels"):
                row["name"] = f"{run.name}: {name}"
            row["drawn"] = sections.beside(run, stem)
            table["rows"].append(row)
    for table in tables.values():
        table["rows"].sort(key=lambda row: not row["own"])
        table["columns"] = list(table["columns"])
    order = {name: at for at, name in enumerate(NAMES)}
    return sorted(
        tables.values(), key=lambda table: order.get(table["protocol"].split("-")[0], len(order))
    )


def _curves(runs: Sequence[Run]) -> list[dict[str, Any]]:
    def of(run: Run) -> str:
        return f" of {run.name}" if len(runs) > 1 else ""

    curves = []
    for name, title in CURVES.items():
        series = []
        for color, run in enumerate(runs):
            x, y = thinned(*run.series(name))
            if x:
                series.append({"name": run.name, "color": color % 10, "x": x, "y": y})
        marks = [
            {"x": round(w["step"] / run.steps, 3), "text": f"collapse{of(run)}"}
            for run in runs
            for w in run.warnings
            if w["kind"] == "collapse"
        ]
        if series:
            span = SPANS.get(name, 0)
            curves.append({"title": title, "series": series, "marks": marks, "span": span})
    return curves


# The settings


def _settings(run: Run) -> list[dict[str, Any]]:
    """Every setting with its help; those that differ from the nearest recipe are marked."""
    changed = differences(recipe(nearest_recipe(run.config)), run.config)
    values = run.config.to_dict()
    rows = []
    for name, _, _, text in settings():
        group, _, field = name.partition(".")
        value = _plain(values[group][field])
        rows.append({"name": name, "value": value, "help": text, "changed": name in changed})
    return rows


def _flat(card: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(key, _plain(value)) for key, value in card.items()]


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_plain(held)}" for key, held in value.items() if held != "")
    if isinstance(value, list | tuple):
        return " ".join(map(_plain, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _figure(value: float) -> str:
    """A number as a person would write it."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"


def page_name(runs: Sequence[Run]) -> Path:
    """Where a report goes unless told otherwise: inside the run, or beside several."""
    if len(runs) == 1:
        return runs[0].folder / "report.html"
    words = "-".join(re.sub(r"\W+", "-", run.name) for run in runs)
    return runs[0].folder.parent / f"report-{words[:80]}.html"
