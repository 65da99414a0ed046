"""The metrics of training by epoch: one small panel per metric, one color per run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from meanshift.viz import style
from meanshift.viz.analysis import smooth_curve
from meanshift.viz.figures import Drawing, Options
from meanshift.viz.run_reader import MissingData, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PANELS = {
    "Loss": ("loss",),
    "Learning rate": ("lr",),
    "Effective rank": ("effective_rank", "rankme"),
    "Agreement of the views": ("agreement",),
    "20-NN, %": ("20-NN", "1-NN"),
    "Purity": ("purity",),
    "Images per second": ("images_per_second",),
}
_DASHED = {"rankme": "RankMe", "1-NN": "1-NN"}
_EXACT = ("lr", "20-NN", "1-NN")
"""metrics that are not the mean of a few steps, and so are not smoothed"""
SMOOTHED = (
    "A curve of 20 or more noisy values is smoothed by the mean over a window of 10% of its "
    "epochs, less at its start; the values as they were logged are lightly behind."
)


def draw(runs: Sequence[Run], _: Options) -> Drawing:
    """A panel for each metric that a run has."""
    panels = {
        title: metrics
        for title, metrics in _PANELS.items()
        if any(run.series(metric)[0] for run in runs for metric in metrics)
    }
    if not panels:
        raise MissingData(
            f"{', '.join(str(run.folder) for run in runs)}: no lines in metrics.jsonl; they are "
            f"written while training, every --train.log_every steps"
        )
    lines = -(-len(panels) // 3)
    figure = style.figure(style.COLUMN if len(panels) == 1 else style.PAGE, 1.6 * lines + 0.3)
    places = _places(figure, len(panels), lines)
    values = []
    for axes, (title, metrics) in zip(places, panels.items(), strict=True):
        dashed = [metric for metric in metrics[1:] if any(run.series(metric)[0] for run in runs)]
        axes.set_title(title + "".join(f" ({_DASHED[metric]} dashed)" for metric in dashed))
        for number, run in enumerate(runs):
            values += _plot(axes, run, metrics, number, marked=len(runs) > 1)
        axes.set_xlim(left=0)
        axes.locator_params(axis="x", integer=True)
        axes.locator_params(axis="y", nbins=5, steps=[1, 2, 5, 10])
        if title == "Purity":
            style.show_percent(axes)
        elif title == "Images per second":
            axes.yaxis.set_major_formatter("{x:,.5g}")
    for run in runs:
        label = "collapse" if len(runs) == 1 else f"collapse: {style.shorten(run.name)}"
        values += _mark_collapses(places, run, label)
    if len(runs) > 1:
        _add_legend(figure, runs)
    text = f"Horizontal axes: epochs. {SMOOTHED} Learning rate and k-NN accuracy are as logged. "
    text += "First and last values: "
    return Drawing(figure, "Training curves", f"{text}{'; '.join(values)}.")


def _places(figure: Figure, count: int, lines: int) -> list[Axes]:
    """Lines of up to three panels that fill the width, also if their numbers differ."""
    grid = figure.add_gridspec(lines, 6)
    places = []
    for line, columns in enumerate(np.array_split(range(count), lines)):
        width = 6 // len(columns)
        for column in range(len(columns)):
            axes = figure.add_subplot(grid[line, width * column : width * (column + 1)])
            axes.set_xlabel("epoch" if line == lines - 1 else "")
            places.append(axes)
    return places


def _plot(axes: Axes, run: Run, metrics: Sequence[str], number: int, *, marked: bool) -> list[str]:
    """Plot the metrics of one panel, the second one dashed; returns their first and last values."""
    values = []
    for metric, dashes in zip(metrics, ("-", "--"), strict=False):
        epochs, curve = run.series(metric)
        if epochs:
            smooth = metric not in _EXACT
            shown = plot_curve(axes, epochs, curve, number, smooth=smooth, marked=marked, ls=dashes)
            values.append(f"{run.name}: {metric} from {shown[0]:.4g} to {shown[-1]:.4g}")
    return values


def plot_curve(
    axes: Axes,
    epochs: Sequence[float],
    values: Sequence[float],
    number: int,
    *,
    smooth: bool = True,
    marked: bool = True,
    **line: Any,
) -> list[float]:
    """Plot the curve of a run by its number, with the logged values behind a smoothed one.

    Markers identify the runs in a gray copy, and the values of a curve of few. Returns the curve.
    """
    color = style.COLORS[number % len(style.COLORS)]
    shown = smooth_curve(epochs, values) if smooth else list(values)
    if shown != list(values):
        axes.plot(epochs, values, color=color, lw=0.5, alpha=0.4)
    step = -(-len(shown) // 20)
    marker = style.MARKERS[number % len(style.MARKERS)] if marked or step == 1 else ""
    line |= {"marker": marker, "markevery": (number % step, step), "clip_on": False}
    axes.plot(epochs, shown, color=color, **line)
    return shown


def _mark_collapses(places: Sequence[Axes], run: Run, label: str) -> list[str]:
    """Draw a dotted line in every panel where the run warned of a collapse."""
    values = []
    for warning in run.warnings:
        if warning["kind"] != "collapse":
            continue
        epoch = warning["step"] / run.steps_per_epoch
        values.append(f"{run.name}: warning of a collapse at epoch {epoch:.2f}")
        for axes in places:
            axes.axvline(epoch, color=style.ALARM, lw=1, ls=":")
        places[0].annotate(
            label,
            (epoch, 1),
            xycoords=("data", "axes fraction"),
            xytext=(3, -2),
            textcoords="offset points",
            va="top",
            color=style.ALARM,
            fontsize=6,
        )
    return values


def _add_legend(figure: Figure, runs: Sequence[Run]) -> None:
    from matplotlib.lines import Line2D

    looks = [
        (style.COLORS[at % len(style.COLORS)], style.MARKERS[at % len(style.MARKERS)])
        for at in range(len(runs))
    ]
    handles = [Line2D([], [], color=color, marker=marker) for color, marker in looks]
    names = [style.shorten(run.name, 30) for run in runs]
    figure.legend(handles, names, loc="outside upper left", ncols=min(6, len(runs)))
