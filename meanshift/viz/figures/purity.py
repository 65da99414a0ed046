"""Purity of the neighbors by epoch: for several k, for w/s against s/s, by the target's views."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from meanshift.viz import style
from meanshift.viz.figures import Choices, Drawing, alike, names_by_settings
from meanshift.viz.run_reader import MissingData, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(runs: Sequence[Run], _: Choices) -> Drawing:
    """A panel for each comparison that the runs allow; all of them in one where they allow none."""
    pure = [run for run in runs if run.series("purity")[0]]
    panels = dict[str, list[Run]]()
    for pair in dict.fromkeys(
        run.pair for run in pure
    ):  # the first views that were tried with two k
        members = [run for run in pure if run.pair == pair]
        if len({run.config.method.k for run in members}) > 1:
            panels["Purity by k"] = sorted(members, key=lambda run: run.config.method.k)
            break
    for k in dict.fromkeys(run.config.method.k for run in pure):  # and the first k, with two views
        members = [run for run in pure if run.config.method.k == k]
        if len({run.pair for run in members}) > 1:
            panels["Purity by views (target/online)"] = members
            break
    if not panels and pure:
        panels["Purity"] = pure
    probed = next((run for run in runs if len(_by_views(run)[0]) > 1), None)
    if not panels and probed is None:
        raise MissingData(
            f"{', '.join(str(run.folder) for run in runs)}: no purity in metrics.jsonl; it needs "
            f"labels and k of 2 or more (a growing k begins at 1): "
            f"meanshift pretrain RECIPE --data SOURCE --out RUN "
            f"--method.k 5, with class folders or a labels.csv in SOURCE"
        )

    count = len(panels) + (probed is not None)
    most = max((len(alike(members)) for members in panels.values()), default=2)
    figure = style.figure(4.4 * count if count > 1 else 5.5, 3.2 + 0.2 * most)
    places = iter(figure.subplots(1, count, squeeze=False, sharey=True)[0])
    told = []
    for title, members in panels.items():
        axes, groups = next(places), alike(members)
        axes.set_title(title)
        for group, name in zip(groups, names_by_settings([g[0] for g in groups]), strict=True):
            color = style.COLORS[runs.index(group[0]) % len(style.COLORS)]  # as in the curves
            curve = _curve(axes, group, style.short(name, 30), color)
            told.append(f"{title.lower()}, {curve}")
    if probed is not None:
        axes, (epochs, weak, strong) = next(places), _by_views(probed)
        axes.set_title("Target's purity by weak and strong views")
        axes.plot(epochs, weak, "o-", color=style.COLORS[1], label="weak", markersize=4)
        axes.plot(epochs, strong, "o-", color=style.COLORS[0], label="strong", markersize=4)
        told.append(f"target of {probed.name}: weak {weak[-1]:.1%}, strong {strong[-1]:.1%}")
    for axes in figure.axes:
        axes.set_xlabel("epoch")
        axes.set_xlim(left=0)
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.4g}%")
        axes.locator_params(axis="x", integer=True)
        axes.legend(loc="upper left", bbox_to_anchor=(0, -0.16), borderaxespad=0)
    figure.axes[0].set_ylabel("neighbors 2 to k of the query's class")
    text = "Share of the neighbors 2 to k that have their query's class. At the end: "
    return Drawing(figure, "Purity by epoch", text + "; ".join(told) + ".")


def _curve(axes: Axes, group: Sequence[Run], name: str, color: str) -> str:
    """A run's line, or the mean of runs that differ in their seeds with a band of one deviation."""
    series = [dict(zip(*run.series("purity"), strict=True)) for run in group]
    if not set.intersection(*map(set, series)):  # logged at other steps, and no epoch is over
        series = series[:1]
    epochs = sorted(set.intersection(*map(set, series)))
    values = np.array([[one[epoch] for epoch in epochs] for one in series])
    mean = values.mean(0)
    seeds = f" ({len(series)} seeds)" if len(series) > 1 else ""
    marker = "." if len(epochs) < 30 else ""
    axes.plot(epochs, mean, label=name + seeds, lw=1.3, marker=marker, color=color)
    if seeds:
        wide = values.std(0, ddof=1)
        axes.fill_between(epochs, mean - wide, mean + wide, color=color, alpha=0.2, lw=0)
    return f"{name}{seeds} {mean[-1]:.1%}"


def _by_views(run: Run) -> tuple[list[float], list[float], list[float]]:
    epochs, weak = run.series("purity_weak")
    return epochs, weak, run.series("purity_strong")[1]
