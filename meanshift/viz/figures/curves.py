"""The metrics of training by epoch: one small panel per metric, one color per run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from meanshift.viz import style
from meanshift.viz.figures import Drawing, Options
from meanshift.viz.run_reader import MissingData, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PANELS = {
    "Loss": ("loss",),
    "Learning rate": ("lr",),
    "Effective rank (RankMe dashed)": ("effective_rank", "rankme"),
    "Agreement of the views": ("agreement",),
    "20-NN (1-NN dashed), %": ("20-NN", "1-NN"),
    "Purity": ("purity",),
    "Images per second": ("images_per_second",),
}


def draw(runs: Sequence[Run], _: Options) -> Drawing:
    """Every value as it was logged; a metric that no run has gets no panel."""
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
    columns = min(len(panels), 3 if len(panels) in (3, 5, 6) else 4)
    lines = -(-len(panels) // columns)
    figure = style.figure(3.0 * columns, 2.35 * lines + 0.4)
    places = figure.subplots(lines, columns, squeeze=False).flatten()
    for axes in places[len(panels) :]:
        axes.axis("off")
    values = []
    for axes, (title, metrics) in zip(places, panels.items(), strict=False):
        axes.set_title(title)
        for run, color in zip(runs, _colors(runs), strict=True):
            values += _plot(axes, run, metrics, color)
        axes.set_xlim(left=0)
        axes.locator_params(axis="x", integer=True)
    for axes in places[max(0, len(panels) - columns) : len(panels)]:
        axes.set_xlabel("epoch")
    for run in runs:
        label = "collapse" if len(runs) == 1 else f"collapse: {style.shorten(run.name)}"
        values += _mark_collapses(list(places[: len(panels)]), run, label)
    _add_legend(figure, runs)
    return Drawing(figure, "Training curves", "; ".join(values) + ".")


def _colors(runs: Sequence[Run]) -> list[str]:
    return [style.COLORS[at % len(style.COLORS)] for at in range(len(runs))]


def _plot(axes: Axes, run: Run, metrics: Sequence[str], color: str) -> list[str]:
    """Plot the metrics of one panel, the second one dashed; returns their first and last values."""
    values = []
    for metric, dashes in zip(metrics, ("-", "--"), strict=False):
        epochs, curve = run.series(metric)
        if epochs:
            marker = "." if len(epochs) < 30 else ""
            axes.plot(epochs, curve, dashes, marker=marker, color=color, lw=1.2)
            values.append(f"{run.name}: {metric} from {curve[0]:.4g} to {curve[-1]:.4g}")
    return values


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
            fontsize=8,
        )
    return values


def _add_legend(figure: Figure, runs: Sequence[Run]) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=color) for color in _colors(runs)]
    names = [style.shorten(run.name, 30) for run in runs]
    figure.legend(handles, names, loc="outside upper left", ncols=min(6, len(runs)))
