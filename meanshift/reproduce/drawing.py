"""A study's image: its columns along an axis, or as bars; the paper's figures are hollow."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from meanshift.reproduce.claims import Cell
from meanshift.reproduce.sheet import Sheet
from meanshift.viz import style
from meanshift.viz.figures import Drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(sheet: Sheet) -> Drawing | None:
    """The image of a sheet; None while no run of it is finished."""
    study = sheet.study
    rows = {v.title: v.at for v in study.variants}
    full = [c for c in study.columns if any(sheet.table[t][c].values for t in rows)]
    columns = [c for c in full if not any(_endless(sheet.table[t][c]) for t in rows)]
    if not columns:
        return None
    groups = _groups(columns)
    width = 4.7 if study.axis else 4.2 + 0.04 * max(map(len, rows))
    high = 3.5 if study.axis else 1.2 + 0.2 * len(rows) * max(map(len, groups))
    figure = style.figure(width * len(groups), high)
    places = figure.subplots(1, len(groups), squeeze=False, sharey=not study.axis)[0]
    for axes, group in zip(places, groups, strict=True):
        (_lines if study.axis else _bars)(axes, sheet, group)
    told = "; ".join(
        f"{t}: " + ", ".join(f"{c} {sheet.table[t][c]}" for c in columns) for t in rows
    )
    return Drawing(
        figure,
        study.title,
        f"{study.title}. Bars of error are one deviation over seeds; hollow marks are the paper's "
        f"figures, of ImageNet and ResNet-50. {told}.",
    )


def _endless(cell: Cell) -> bool:
    return any(math.isinf(value) for value in cell.values)


def _groups(columns: list[str]) -> list[list[str]]:
    """Accuracies share an axis; a figure of another kind has its own."""
    percent = [c for c in columns if c in ("1-NN", "20-NN", "linear") or c.endswith("labels")]
    pure = [c for c in columns if c.startswith("purity")]
    rest = [[c] for c in columns if c not in percent and c not in pure]
    return [group for group in (percent, pure, *rest) if group]


def _label(group: list[str]) -> str:
    if len(group) == 1:
        return group[0]
    return "purity" if group[0].startswith("purity") else "accuracy, %"


def _lines(axes: Axes, sheet: Sheet, group: list[str]) -> None:
    rows = [(v.at or 0, sheet.table[v.title]) for v in sheet.study.variants]
    for hue, column in zip(style.COLORS, group, strict=False):
        seen = [(at, cells[column]) for at, cells in rows if cells[column].values]
        paper = [(at, p) for at, cells in rows if (p := cells[column].paper) is not None]
        axes.errorbar(
            [at for at, _ in seen],
            [cell.mean for _, cell in seen],
            [cell.deviation for _, cell in seen],
            marker="o", markersize=4, capsize=3, color=hue, label=column,
        )  # fmt: skip
        if paper:
            axes.plot(
                *zip(*paper, strict=True), "o--", color=hue, markerfacecolor=style.PAPER,
                lw=1, markersize=4, label=f"{column}, the paper's",
            )  # fmt: skip
    axes.set_xscale("log")
    axes.set_xticks([at for at, _ in rows], [_short(at) for at, _ in rows])
    axes.set_xticks([], minor=True)
    axes.set_xlabel(sheet.study.axis)
    axes.set_title(_label(group))
    if len(group) > 1 or any(cells[group[0]].paper is not None for _, cells in rows):
        axes.legend(loc="upper left", bbox_to_anchor=(0, -0.2), ncols=2, borderaxespad=0)


def _bars(axes: Axes, sheet: Sheet, group: list[str]) -> None:
    titles = [variant.title for variant in sheet.study.variants]
    thick = 0.8 / len(group)
    for at, (hue, column) in enumerate(zip(style.COLORS, group, strict=False)):
        cells = [sheet.table[title][column] for title in titles]
        places = [row + thick * (at - (len(group) - 1) / 2) for row in range(len(titles))]
        means = [cell.mean if cell.values else 0.0 for cell in cells]
        wide = [cell.deviation for cell in cells]
        axes.barh(places, means, 0.9 * thick, xerr=wide, color=hue, label=column, capsize=2)
        paper = [(p, y) for cell, y in zip(cells, places, strict=True) if (p := cell.paper)]
        if paper:
            axes.plot(
                *zip(*paper, strict=True), "o", color=hue, markerfacecolor=style.PAPER,
                markersize=4, label=f"{column}, the paper's",
            )  # fmt: skip
    axes.set_yticks(range(len(titles)), titles)
    axes.set_ylim(len(titles) - 0.5, -0.5)
    axes.locator_params(axis="x", nbins=6)
    axes.grid(visible=False, axis="y")
    axes.set_title(_label(group))
    if len(group) > 1:
        axes.legend(loc="upper left", bbox_to_anchor=(0, -0.08), ncols=2, borderaxespad=0)


def _short(at: float) -> str:
    return f"{at / 1000:.3g}K" if at >= 1000 else f"{at:g}"
