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
from meanshift.viz.tsne import tsne_maps

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MAX_COLORS = 10  # more cannot be distinguished


def draw(runs: Sequence[Run], options: Options) -> Drawing:
    """The snapshot images after up to six epochs; without labels the colors are clusters."""
    (run,) = runs
    epochs = select_epochs(run, options.epochs, count=6)
    groups, names, meaning = _groups(run, options.seed)
    maps = [epoch_map for epoch_map in tsne_maps(run) if epoch_map.epoch in epochs]

    columns = min(3, len(maps))
    lines = -(-len(maps) // columns)
    reach = torch.stack([one.points.abs().amax(0) for one in maps]).amax(0).clamp(min=0.1) + 0.04
    reach_x, reach_y = reach.tolist()
    figure = style.figure(3.05 * columns + 1.3, (3.05 * reach_y / reach_x + 0.3) * lines + 0.3)
    panels = figure.subplots(lines, columns, squeeze=False).flatten()
    for axes in panels:
        axes.set(xlim=(-reach_x, reach_x), ylim=(-reach_y, reach_y), xticks=[], yticks=[])
        axes.set_aspect("equal")
        axes.axis("off")
    colors = [*style.COLORS[: len(names)], style.RULE]  # the last one is that of group -1
    order = rng.permutation(options.seed, 0, len(maps[0].rows))  # so that no class is always on top
    for axes, epoch_map in zip(panels, maps, strict=False):
        axes.axis("on")
        axes.spines[:].set_visible(True)
        axes.set_title("before training" if epoch_map.epoch == 0 else f"epoch {epoch_map.epoch}")
        shown = groups[epoch_map.rows][order].tolist()
        x, y = epoch_map.points[order].T.numpy()
        point_colors = [colors[group] for group in shown]
        axes.scatter(x, y, s=8000 / max(600, len(x)), c=point_colors, linewidths=0)
    _add_legend(figure, [*names, "others"] if -1 in shown else names, colors, meaning)
    figure.suptitle(f"t-SNE of {run.name}", x=0.004, ha="left", weight="bold", size=11)
    shown_epochs = ", ".join(str(epoch_map.epoch) for epoch_map in maps)
    text = f"t-SNE of {len(maps[0].rows)} training images of {run.name} after epochs {shown_epochs}"
    text += f", each map started from the one before; colored by {' '.join(meaning.split())}."
    text += " Only one snapshot, so nothing moves." if len(maps) == 1 else ""
    return Drawing(figure, "t-SNE by epoch", text)


def _add_legend(figure: Figure, names: list[str], colors: list[str], title: str) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=color, ls="", marker="o", markersize=5.5) for color in colors]
    figure.legend(
        handles[: len(names)],
        names,
        loc="outside right upper",
        title=title,
        alignment="left",
        title_fontproperties={"weight": "bold", "size": 9},
        handletextpad=0.1,
        borderaxespad=1.5,
    )


def _groups(run: Run, seed: int) -> tuple[Int[Tensor, " n"], list[str], str]:
    """The group of each snapshot image (-1: none), the names of the groups, and their meaning."""
    try:
        labels = run.labels
    except MissingData:  # the features are there even if the images are not
        labels = None
    if labels is None:
        names, assigned = cluster_features(run.snapshot(run.snapshot_epochs[-1]).features)
        return assigned, names, "cluster\n(k-means of the\nlast snapshot)"
    present = labels[labels >= 0].unique()
    chosen = present[rng.choice(seed, len(present), _MAX_COLORS, rng.SAMPLE)]
    matches = labels[:, None] == chosen
    names = [style.shorten(run.source.classes[label]) for label in chosen.tolist()]
    return torch.where(matches.any(1), matches.int().argmax(1), -1), names, "class"
