"""The plot of a study: its columns along an axis, or by variant; hollow marks are the paper's."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from meanshift.reproduce.claims import Measurement
from meanshift.reproduce.results import RANKED_BY, Hardware, StudyResult, hardware
from meanshift.viz import style
from meanshift.viz.figures import Drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from meanshift.viz.run_reader import Run

FEW = 8
"""values of which none is left out of a plot"""


def draw(result: StudyResult) -> Drawing | None:
    """The plot of a study; None while none of its runs is finished."""
    study = result.study
    columns = [column for column in study.columns if _can_be_drawn(result, column)]
    if not columns:
        return None
    groups = _group(columns)
    titles = list(result.table)
    width = 4.7 if study.axis else 4.2 + 0.04 * max(map(len, titles))
    height = 3.5 if study.axis else 1.6 + 0.3 * len(titles)
    figure = style.figure(width * len(groups), height)
    panels = figure.subplots(1, len(groups), squeeze=False, sharey=not study.axis)[0]
    draw_panel = _draw_lines if study.axis else _draw_rows
    for axes, group in zip(panels, groups, strict=True):
        draw_panel(axes, result, group)
    values = [
        f"{title}: " + ", ".join(f"{column} {row[column]}" for column in columns)
        for title, row in result.table.items()
    ]
    return Drawing(
        figure,
        study.title,
        f"{study.title}. Error bars are one standard deviation over seeds; hollow marks are the "
        f"paper's metrics, of ImageNet and ResNet-50. {'; '.join(values)}.",
    )


def draw_cpu_time(runs: Mapping[str, Sequence[Run]], timed_on: Hardware | None) -> Drawing | None:
    """Accuracy on the validation images by the CPU time of the training steps, a line per variant.

    Accuracies are means over all seeds of a variant; CPU time is that of the runs on one
    hardware, as times of different ones are not comparable. None if no run has both.
    """
    curves = {
        title: curve for title, each in runs.items() if (curve := _mean_curve(each, timed_on))
    }
    if not curves:
        return None
    figure = style.figure(8.2, 1.6 + 0.24 * max(12, len(curves)))
    axes = figure.subplots()
    ranked = sorted(curves, key=lambda title: -curves[title][-1][1])
    learned = [title for title in ranked if runs[title][0].config.method.name != "supervised"]
    styles = itertools.cycle(itertools.product(("-", "--", ":"), style.COLORS))
    style_of = dict(zip(learned, styles, strict=False))
    for title in ranked:
        dashes, color = style_of.get(title, (":", style.QUIET))
        width = 2.2 if title.startswith("MSF") else 1.3
        label = f"{curves[title][-1][1]:.1f}  {title}"
        points = list(zip(*curves[title], strict=True))
        axes.plot(*points, dashes, color=color, label=label, marker=".", linewidth=width)
    drawn = [curves[title] for title in learned or ranked]
    axes.set_ylim(*_limits([curve[end][1] for curve in drawn for end in (0, -1)]))
    axes.set_xlabel("CPU minutes of the training steps, one thread")
    axes.set_title(f"{RANKED_BY} on the validation images, %")
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0)
    ends = "; ".join(
        f"{title} {curves[title][-1][1]:.1f} after {curves[title][-1][0]:.1f} minutes"
        for title in ranked
    )
    return Drawing(
        figure,
        "Accuracy by CPU time",
        f"{RANKED_BY} on the validation images by the CPU time of the training steps of one "
        f"process, without evaluations; means over seeds, the best at the end first. The axis "
        f"shows where methods without labels begin and end, but for one far from all others. "
        f"{ends}.",
    )


def _limits(values: Sequence[float]) -> tuple[float, float]:
    """The range of values with a margin; a few that are far from all others are left out."""
    inside = list(values)
    if len(values) >= FEW:
        low, _, high = statistics.quantiles(values, n=4)
        reach = 3 * (high - low)  # beyond it a value is called far out (Tukey)
        inside = [value for value in values if low - reach <= value <= high + reach]
    spread = max(inside) - min(inside)
    margin = 0.06 * spread or 0.02 * abs(max(inside)) or 1.0
    return min(inside) - margin, max(inside) + margin


def _mean_curve(runs: Sequence[Run], timed_on: Hardware | None) -> list[tuple[float, float]]:
    """(CPU minutes, accuracy) after each monitored epoch, means over runs that have all of them."""
    minutes: list[dict[int, float]] = []
    accuracies: list[dict[int, float]] = []
    for run in runs:
        seconds = 0.0
        time, accuracy = {}, {}
        for record in run.lines("metrics.jsonl"):
            seconds += record.get("cpu_seconds", 0.0)
            if record["kind"] == "monitor" and RANKED_BY in record:
                time[record["epoch"]] = seconds / 60
                accuracy[record["epoch"]] = record[RANKED_BY]
        if len(accuracy) > 1:
            accuracies.append(accuracy)
            if seconds and hardware(run) == timed_on:
                minutes.append(time)
    if not minutes:
        return []
    epochs = sorted(set.intersection(*map(set, accuracies)))
    return [
        (
            statistics.fmean(time[epoch] for time in minutes),
            statistics.fmean(accuracy[epoch] for accuracy in accuracies),
        )
        for epoch in epochs
    ]


def _can_be_drawn(result: StudyResult, column: str) -> bool:
    """Whether a column has values, all of them finite."""
    values = [value for row in result.table.values() for value in row[column].values]
    return bool(values) and not any(map(math.isinf, values))


def _group(columns: list[str]) -> list[list[str]]:
    """Accuracies share a panel, and so do purities; any other metric has its own."""
    accuracies = [c for c in columns if c in ("1-NN", "20-NN", "linear") or c.endswith("labels")]
    purities = [c for c in columns if c.startswith("purity")]
    others = [[c] for c in columns if c not in accuracies and c not in purities]
    return [group for group in (accuracies, purities, *others) if group]


def _label(group: list[str]) -> str:
    if len(group) == 1:
        return group[0]
    return "purity" if group[0].startswith("purity") else "accuracy, %"


def _draw_lines(axes: Axes, result: StudyResult, group: list[str]) -> None:
    variants = result.study.variants
    positions = [variant.position or 0 for variant in variants]
    has_paper = False
    for color, column in zip(style.COLORS, group, strict=False):
        measurements = [result.table[variant.title][column] for variant in variants]
        points = list(zip(positions, measurements, strict=True))
        ours = [(x, each) for x, each in points if each.values]
        paper = [(x, each.paper) for x, each in points if each.paper is not None]
        axes.errorbar(
            [x for x, _ in ours],
            [each.mean for _, each in ours],
            [each.std for _, each in ours],
            marker="o",
            markersize=4,
            capsize=3,
            color=color,
            label=column,
        )
        if paper:
            has_paper = True
            axes.plot(
                *zip(*paper, strict=True),
                "o--",
                color=color,
                markerfacecolor=style.PAPER,
                lw=1,
                markersize=4,
                label=f"{column}, the paper's",
            )
    axes.set_xscale("log")
    axes.set_xticks(positions, [_short(x) for x in positions])
    axes.set_xticks([], minor=True)
    axes.set_xlabel(result.study.axis)
    axes.set_title(_label(group))
    if len(group) > 1 or has_paper:
        axes.legend(loc="upper left", bbox_to_anchor=(0, -0.2), ncols=2, borderaxespad=0)


def _draw_rows(axes: Axes, result: StudyResult, group: list[str]) -> None:
    """A row for each variant, with a mark for each column."""
    titles = list(result.table)
    shown = []
    for index, (color, column) in enumerate(zip(style.COLORS, group, strict=False)):
        measurements = [result.table[title][column] for title in titles]
        offset = 0.15 * (index - (len(group) - 1) / 2)  # so that close marks can be told apart
        heights = [row + offset for row in range(len(titles))]
        ours = [(each, y) for each, y in zip(measurements, heights, strict=True) if each.values]
        shown += [each.mean for each, _ in ours]
        axes.errorbar(
            [each.mean for each, _ in ours],
            [y for _, y in ours],
            xerr=[each.std for each, _ in ours],
            fmt="o",
            markersize=5,
            capsize=2,
            color=color,
            label=column,
        )
        paper = _paper_points(measurements, heights)
        if paper:
            shown += [value for value, _ in paper]
            axes.plot(
                *zip(*paper, strict=True),
                "o",
                color=color,
                markerfacecolor=style.PAPER,
                markersize=4,
                label=f"{column}, the paper's",
            )
    axes.set_yticks(range(len(titles)), titles)
    axes.set_ylim(len(titles) - 0.5, -0.5)
    axes.set_xlim(*_limits(shown))
    axes.locator_params(axis="x", nbins=6)
    axes.set_title(_label(group))
    if len(group) > 1:
        axes.legend(loc="upper left", bbox_to_anchor=(0, 0), ncols=2, borderaxespad=2.5)


def _paper_points(
    measurements: list[Measurement], heights: list[float]
) -> list[tuple[float, float]]:
    return [(each.paper, y) for each, y in zip(measurements, heights, strict=True) if each.paper]


def _short(position: float) -> str:
    return f"{position:,.0f}" if position >= 1000 else f"{position:g}"
