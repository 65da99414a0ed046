"""The report: one self-contained HTML page about one or more runs, from their directories alone."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from meanshift.config import differences, settings
from meanshift.config.recipes import command_for, nearest_recipe, recipe
from meanshift.runtime.files import write_text
from meanshift.viz.analysis import metric_series, smooth_curve, thin_curve, view_title
from meanshift.viz.report import sections, tables, verdicts
from meanshift.viz.report.template import render
from meanshift.viz.run_reader import MissingData, Run, differing_settings, group_name

CURVES = {
    "loss": "Loss",
    "20-NN": "20-NN while training, %",
    "1-NN": "1-NN while training, %",
    "purity": "Purity of the neighbors",
    "agreement": "Agreement of the views",
    "effective_rank": "Effective rank of the targets",
    "rankme": "RankMe of the targets",
    "spread": "Spread of the targets",
    "lr": "Learning rate",
    "images_per_second": "Images per second",
}
"""metrics that are shown first, with their titles; others that vary follow below them"""
EXPLANATIONS = {
    "loss": "what the method minimizes; it rises where the task gets harder, as with a growing k",
    "20-NN": "validation images whose 20 nearest training images vote for their class",
    "purity": "fraction of the neighbors in the memory bank (without the query itself) that have "
    "the query's class",
    "agreement": "cosine of the embeddings of the views; near 1 early on is a sign of collapse",
    "effective_rank": "number of directions in which the last 1,024 target embeddings vary, before "
    "any whitening; it falls in the first epochs of healthy runs too. Below 4 for a quarter of the "
    "run is reported as a partial collapse; below a third of the dimensions (at most 24) as a "
    "collapse if the views agree perfectly",
    "rankme": "the same by the definition of RankMe, which also counts directions of little "
    "variance and the mean",
    "spread": "1 if the target embeddings point everywhere, 0 if all are the same; before any "
    "whitening",
}
STEP_METRICS = ("loss", "purity")
"""metrics of single steps, whose values above the curves are means over an epoch"""
SMOOTHED = (*STEP_METRICS, "agreement", "effective_rank", "rankme", "spread", "images_per_second")
"""curves that are also shown as a running mean"""
HIGHLIGHTS = ("loss", "20-NN", "purity", "effective_rank")
MIN_RANGES = {
    "20-NN": 10,
    "1-NN": 10,
    "purity": 0.1,
    "purity_weak": 0.1,
    "purity_strong": 0.1,
    "agreement": 0.1,
    "spread": 0.1,
    "neighbors_kept": 0.1,
}
"""smallest range of a curve's axis, so that a small change looks small"""


def write_report(runs: Sequence[Run], out: Path, *, max_images: int = 1000) -> Path:
    """Write the page; it contains up to `max_images` of the snapshot images of each run."""
    sheets: dict[str, str] = {}
    found = [verdicts.run_verdict(run) for run in runs]
    contexts = [
        _run_context(run, color, sheets, max_images=max_images) for color, run in enumerate(runs)
    ]
    for context, verdict in zip(contexts, found, strict=True):
        context["verdict"] = verdict
        context["comparison"] = verdicts.comparison(verdict)
        context["next_step"] = verdicts.split_commands(verdict.next_step)
    curves = _curves(runs)
    data = {
        "runs": [context.pop("data") for context in contexts],
        "curves": curves,
        "sheets": sheets,
    }
    titles = {curve["title"] for curve in curves}
    text = render(
        "report.html",
        runs=contexts,
        title=" and ".join(run.name for run in runs) if len(runs) < 4 else f"{len(runs)} runs",
        differing={
            name: list(map(tables.format_value, values))
            for name, values in differing_settings(runs).items()
        },
        outcome=verdicts.outcome_rows(runs, found),
        tables=tables.result_tables(runs),
        explanations=[
            (CURVES[name], text) for name, text in EXPLANATIONS.items() if CURVES[name] in titles
        ],
        has_other_curves=not all(curve["main"] for curve in curves),
        data=json.dumps(data, allow_nan=False).replace("<", "\\u003c"),
    )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_text(out, text.encode("utf-8", "replace").decode())  # file names may be any bytes
    except OSError as error:
        raise OSError(f"{out}: could not be written ({error}); choose another --out FILE") from None
    return out


def default_path(runs: Sequence[Run]) -> Path:
    """Where a report is written by default: in the run, or beside several runs."""
    if len(runs) == 1:
        return runs[0].folder / "report.html"
    return runs[0].folder.parent / f"report-{group_name(runs)}.html"


def _run_context(
    run: Run, color: int, sheets: dict[str, str], *, max_images: int
) -> dict[str, Any]:
    """All that the page shows of one run; a part whose data are missing contains the reason."""
    map_part = _or_missing(lambda: sections.map_section(run, sheets, max_images=max_images))
    notes = [w for w in run.warnings if w["kind"] not in ("collapse", "bad image")]
    config = run.config
    return {
        "name": run.name,
        "color": color % 10,
        "summary": _summary(run),
        "highlights": _highlights(run),
        "alarms": [w["message"] for w in run.warnings if w["kind"] == "collapse"],
        "notes": [warning["message"] for warning in notes],
        "bad_images": [w for w in run.warnings if w["kind"] == "bad image"],
        "map": {key: value for key, value in map_part.items() if key != "data"},
        "clusters": _or_missing(lambda: sections.clusters_section(run)),
        "views": _or_missing(lambda: sections.views_section(run)),
        "images": _or_missing(lambda: sections.data_section(run)),
        "settings": _settings(run),
        "recipe": nearest_recipe(config),
        "folder": shlex.quote(str(run.folder)),
        "continue_command": command_for(config, str(run.folder)),
        "reproduce_command": command_for(config, f"{run.folder}-again"),
        "evaluate_command": _evaluate_command(run),
        "typed_command": _typed_command(run),
        "environment": _environment(run),
        "data": {"name": run.name, "color": color % 10, **map_part.get("data", {})},
    }


def _or_missing(section: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return section()
    except MissingData as error:
        return {"missing": str(error)}


def _summary(run: Run) -> str:
    """What the run is and how far it is, in a sentence."""
    config = run.config
    epochs = config.train.epochs
    facts = [run.method]
    if (k := run.setting("method.k")) is not None:
        facts.append(f"k {k}")
    views = ", ".join(map(view_title, run.views))
    facts += [f"views {views}", config.encoder.name]
    progress = "its epoch is trained." if epochs == 1 else f"all {epochs} epochs are trained."
    if not run.finished:
        progress = (
            f"{run.epochs_done:.1f} of {epochs} epochs so far; the metrics below are not final."
        )
    return f"{', '.join(facts)}, on {config.data.source}: {progress}"


def _highlights(run: Run) -> list[tuple[str, str, str]]:
    """(title, newest value, what it is and the first value) of the most important metrics."""
    highlights = []
    for name in HIGHLIGHTS:
        if name in STEP_METRICS:
            means = run.epoch_means(name)
            epochs, values = [float(epoch) for epoch in means], list(means.values())
        else:
            epochs, values = run.series(name)
        if not values:
            continue
        of = "mean of epoch" if name in STEP_METRICS else "epoch"
        note = f"{of} {_epoch(epochs[-1])}"
        if len(values) > 1:
            note += f"; epoch {_epoch(epochs[0])}: {tables.format_number(values[0])}"
        highlights.append((CURVES[name], tables.format_number(values[-1]), note))
    _, kept = run.series("neighbors_kept")
    if kept:
        highlights.append(("Neighbors", f"{kept[-1]:.0%}", "the same as in the snapshot before"))
    return highlights


def _epoch(epoch: float) -> str:
    return f"{round(epoch, 2):g}"


def _curves(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Every metric by epoch with one series per run; the known ones are the main curves."""
    series = [metric_series(run) for run in runs]
    others = dict.fromkeys(
        name
        for one in series
        for name, (_, values) in one.items()
        if name not in CURVES and len(set(values)) > 1
    )
    marks = [
        {
            "x": round(warning["step"] / run.steps_per_epoch, 3),
            "text": f"collapse of {run.name}" if len(runs) > 1 else "collapse",
        }
        for run in runs
        for warning in run.warnings
        if warning["kind"] == "collapse"
    ]
    curves = []
    for name in (*CURVES, *others):
        lines = []
        for color, (run, one) in enumerate(zip(runs, series, strict=True)):
            if name in one:
                x, y = thin_curve(*one[name])
                line = {"name": run.name, "color": color % 10, "x": x, "y": y}
                if name in SMOOTHED and (mean := smooth_curve(x, y)) != y:
                    line["mean"] = [float(f"{value:.5g}") for value in mean]
                lines.append(line)
        if lines:
            curves.append(
                {
                    "title": CURVES.get(name, name.replace("_", " ")),
                    "main": name in CURVES,
                    "series": lines,
                    "marks": marks,
                    "min_range": MIN_RANGES.get(name, 0),
                    "lines": verdicts.baseline_lines(runs, name) if name in verdicts.KNN else [],
                    "bands": verdicts.rank_bands(runs) if name == "effective_rank" else [],
                }
            )
    return curves


def _settings(run: Run) -> list[dict[str, Any]]:
    """Every setting with its help; those that differ from the nearest recipe are marked."""
    changed = differences(recipe(nearest_recipe(run.config)), run.config)
    return [
        {
            "name": name,
            "value": tables.format_value(run.setting(name)),
            "help": text,
            "changed": name in changed,
        }
        for name, _, _, text in settings(type(run.config.method))
    ]


def _evaluate_command(run: Run) -> str:
    """The command that evaluates the run: by labels if there are any."""
    folder = shlex.quote(str(run.folder))
    if not verdicts.is_labeled(run):
        return f"meanshift evaluate cluster {folder} --clusters 10"
    return f"meanshift evaluate knn linear cluster {folder} --compare untrained: pixels"


def _typed_command(run: Run) -> str:
    """The command line of the last session, unless another program called the training."""
    program, *arguments = run.environment.get("command") or [""]
    ours = Path(program).name in ("meanshift", "__main__.py")
    return shlex.join(["meanshift", *arguments]) if ours else ""


def _environment(run: Run) -> list[tuple[str, str]]:
    """Date, versions and machine of the last session."""
    environment = run.environment
    rows = {
        "continued" if environment.get("earlier") else "started": environment.get("date"),
        "python": environment.get("python"),
        **environment.get("versions", {}),
        "machine": environment.get("machine"),
        "device": environment.get("device"),
        "precision": environment.get("precision"),
        "threads": environment.get("threads"),
        "commit": environment.get("commit"),
    }
    return [(name, tables.format_value(value)) for name, value in rows.items() if value]
