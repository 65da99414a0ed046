"""Purity of the neighbors by epoch: for several k, for several views, and by kind of view."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from meanshift.viz import style
from meanshift.viz.analysis import smooth_curve
from meanshift.viz.figures import Drawing, Options, group_similar, names_by_settings
from meanshift.viz.figures.curves import SMOOTHED, plot_curve
from meanshift.viz.run_reader import MissingData, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(runs: Sequence[Run], _: Options) -> Drawing:
    """One panel per comparison that the runs allow, or one panel with all of them."""
    panels = _panels([run for run in runs if run.series("purity")[0]])
    by_view = next((run for run in runs if _purity_by_view(run)), None)
    if not panels and by_view is None:
        raise MissingData(_what_is_missing(runs))
    count = len(panels) + (by_view is not None)
    longest = max((len(group_similar(members)) for members in panels.values()), default=2)
    figure = style.figure(style.COLUMN if count == 1 else style.PAGE, 2.1 + 0.14 * longest)
    places = iter(figure.subplots(1, count, squeeze=False, sharey=True)[0])
    values = []
    for title, members in panels.items():
        axes = next(places)
        axes.set_title(title)
        groups = group_similar(members)
        names = names_by_settings([group[0] for group in groups])
        for group, name in zip(groups, names, strict=True):
            number = runs.index(group[0])  # its color is that of the curves
            value = _plot(axes, group, style.shorten(name, 30), number, marked=len(groups) > 1)
            values.append(f"{title.lower()}, {value}")
    if by_view is not None:
        axes = next(places)
        axes.set_title("Purity by kind of view")
        for at, (view, (epochs, purity)) in enumerate(_purity_by_view(by_view).items()):
            plot_curve(axes, epochs, purity, at, smooth=False, label=view)
            values.append(f"{view} views of {by_view.name} {purity[-1]:.1%}")
    for axes in figure.axes:
        axes.set_xlabel("epoch")
        axes.set_xlim(left=0)
        axes.locator_params(axis="y", nbins=6, steps=[1, 2, 5, 10])
        style.show_percent(axes)
        axes.locator_params(axis="x", integer=True)
        if len(axes.get_legend_handles_labels()[1]) > 1:
            axes.legend(loc="upper left", bbox_to_anchor=(0, -0.2), borderaxespad=0)
    figure.axes[0].set_ylabel("neighbors of the query's class")
    text = "Vertical axis: the fraction of the neighbors (without the query itself) that have the "
    text += f"query's class. Horizontal axis: epochs. {SMOOTHED} Several seeds are shown as their "
    text += f"mean with a band of one std. At the end: {'; '.join(values)}."
    return Drawing(figure, "Purity by epoch", text)


def _panels(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The comparisons: the first views that have runs of two k, the first k with two views."""
    panels = dict[str, list[Run]]()
    for views in dict.fromkeys(run.views for run in runs):
        members = [run for run in runs if run.views == views and _k(run) is not None]
        if len({_k(run) for run in members}) > 1:
            panels["Purity by k"] = sorted(members, key=lambda run: _k(run) or 0)
            break
    for k in dict.fromkeys(_k(run) for run in runs):
        members = [run for run in runs if _k(run) == k]
        if len({run.views for run in members}) > 1:
            panels["Purity by views"] = members
            break
    if not panels and runs:
        panels["Purity"] = list(runs)
    return panels


def _k(run: Run) -> int | None:
    k: int | None = run.setting("method.k")
    return k


def _purity_by_view(run: Run) -> dict[str, tuple[list[float], list[float]]]:
    """The purity of the snapshots by kind of view, from metrics called `purity_KIND`."""
    series = run.all_series()
    return {
        name.removeprefix("purity_"): curve
        for name, curve in series.items()
        if name.startswith("purity_") and len(curve[0]) > 1
    }


def _what_is_missing(runs: Sequence[Run]) -> str:
    folders = ", ".join(str(run.folder) for run in runs)
    if not any(_k(run) is not None for run in runs):
        methods = ", ".join(dict.fromkeys(run.method for run in runs))
        return (
            f"{folders}: no metric purity in metrics.jsonl; the method {methods} has no neighbors"
        )
    return (
        f"{folders}: no metric purity in metrics.jsonl; need labels and k of 2 or more (a growing "
        f"k starts at 1): meanshift pretrain RECIPE --data SOURCE --out RUN --method.k 5, with "
        f"class folders or a labels.csv in SOURCE"
    )


def _plot(axes: Axes, group: Sequence[Run], name: str, number: int, *, marked: bool) -> str:
    """Plot a run, or the mean of runs that differ in the seed with a band of one std."""
    curves = [dict(zip(*run.series("purity"), strict=True)) for run in group]
    if not set.intersection(*map(set, curves)):  # logged at other steps, and no epoch is over
        curves = curves[:1]
    epochs = sorted(set.intersection(*map(set, curves)))
    values = np.array([[curve[epoch] for epoch in epochs] for curve in curves])
    label = f"{name} ({len(curves)} seeds)" if len(curves) > 1 else name
    mean = plot_curve(axes, epochs, values.mean(0).tolist(), number, marked=marked, label=label)
    if len(curves) > 1:
        std = np.array(smooth_curve(epochs, values.std(0, ddof=1).tolist()))
        color = style.COLORS[number % len(style.COLORS)]
        axes.fill_between(epochs, mean - std, mean + std, color=color, alpha=0.2, lw=0)
    return f"{label} {mean[-1]:.1%}"
