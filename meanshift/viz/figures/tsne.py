"""t-SNE by epoch (Figure 4 of the MSF paper): one aligned panel per snapshot, colored by class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Int
from torch import Tensor

from meanshift.runtime import rng
from meanshift.viz import style
from meanshift.viz.analysis import cluster_features, select_epochs
from meanshift.viz.figures import Drawing, Options
from meanshift.viz.run_reader import MissingData, Run
from meanshift.viz.tsne import perplexity, tsne_maps

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.gridspec import SubplotSpec
    from matplotlib.path import Path

_MAX_COLORS = 10  # more cannot be distinguished


def draw(runs: Sequence[Run], options: Options) -> Drawing:
    """The snapshot images after up to six epochs; without labels the colors are clusters."""
    (run,) = runs
    epochs = select_epochs(run, options.epochs, count=6)
    groups, names, meaning = _groups(run, options.seed)
    maps = [epoch_map for epoch_map in tsne_maps(run) if epoch_map.epoch in epochs]

    columns = len(maps) if len(maps) < 5 else 3
    lines = -(-len(maps) // columns)
    reach = torch.stack([one.points.abs().amax(0) for one in maps]).amax(0).clamp(min=0.1) + 0.04
    reach_x, reach_y = reach.tolist()
    width = style.COLUMN if columns == 1 else style.PAGE
    side = width / columns
    figure = style.figure(width, (side * reach_y / reach_x + 0.2) * lines + 0.4)
    grid = figure.add_gridspec(lines, columns)
    colors = [*style.COLORS[: len(names)], style.RULE]  # the last one is that of group -1
    markers = [_outline(marker) for marker in (*style.MARKERS[: len(names)], "o")]
    order = rng.permutation(options.seed, 0, len(maps[0].rows))  # so that no class is always on top
    for position, epoch_map in enumerate(maps):
        axes = figure.add_subplot(grid[divmod(position, columns)])
        axes.set(xlim=(-reach_x, reach_x), ylim=(reach_y, -reach_y), xticks=[], yticks=[])
        axes.set_aspect("equal")
        axes.spines[:].set_visible(True)
        axes.spines[:].set_color(style.RULE)
        axes.set_title("before training" if epoch_map.epoch == 0 else f"epoch {epoch_map.epoch}")
        shown = groups[epoch_map.rows][order].tolist()
        x, y = epoch_map.points[order].T.numpy()
        area = 700 * min(side, 2.4) ** 2 / max(600, len(x))
        point_colors = [colors[group] for group in shown]
        points = axes.scatter(x, y, s=area, c=point_colors, linewidths=0, rasterized=True)
        points.set_paths([markers[group] for group in shown])
    if len(names) > 1:
        place = grid[-1, -1] if len(maps) < lines * columns else None
        _add_legend(figure, place, [*names, "others"] if -1 in shown else names, colors)
    shown_epochs = ", ".join(str(epoch_map.epoch) for epoch_map in maps)
    count = len(maps[0].rows)
    text = f"t-SNE (perplexity {perplexity(count):.3g}) of the features of {count:,} training "
    text += f"images after epochs {shown_epochs} (0: before training), colored by {meaning}. The "
    text += "axes have no unit; all maps have the same scale and orientation."
    if len(maps) > 1:
        text += " Each map is initialized with the one before and rotated to fit it."
    return Drawing(figure, "t-SNE by epoch", text)


def _outline(marker: str) -> Path:
    from matplotlib.markers import MarkerStyle

    style_of_marker = MarkerStyle(marker)
    return style_of_marker.get_path().transformed(style_of_marker.get_transform())


def _add_legend(
    figure: Figure, place: SubplotSpec | None, names: list[str], colors: list[str]
) -> None:
    """Write the names of the colors below the maps, or into a place that no map takes."""
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=color, ls="", marker=marker)
        for color, marker in zip(colors, (*style.MARKERS[: len(colors) - 1], "o"), strict=True)
    ][: len(names)]
    spacing = {"handletextpad": 0.1, "columnspacing": 1.2}
    if place is not None:
        axes = figure.add_subplot(place)
        axes.axis("off")
        axes.legend(handles, names, loc="center", ncols=1 + (len(names) > 8), **spacing)
    else:
        fitting = int(figure.get_figwidth() / (0.35 + 0.065 * max(map(len, names))))
        rows = -(-len(names) // max(1, fitting))
        columns = -(-len(names) // rows)
        figure.legend(handles, names, loc="outside lower center", ncols=columns, **spacing)


def _groups(run: Run, seed: int) -> tuple[Int[Tensor, " n"], list[str], str]:
    """The group of each snapshot image (-1: none), the names of the groups, and their meaning."""
    try:
        labels = run.labels
    except MissingData:  # the features are there even if the images are not
        labels = None
    if labels is None:
        names, assigned = cluster_features(run.snapshot(run.snapshot_epochs[-1]).features)
        return assigned, names, "cluster (k-means of the last snapshot)"
    present = labels[labels >= 0].unique()
    chosen = present[rng.choice(seed, len(present), _MAX_COLORS, rng.SAMPLE)]
    matches = labels[:, None] == chosen
    names = [style.shorten(run.source.classes[label]) for label in chosen.tolist()]
    return torch.where(matches.any(1), matches.int().argmax(1), -1), names, "class"
