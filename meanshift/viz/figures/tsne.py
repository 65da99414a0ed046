"""Epochwise t-SNE (Figure 4 of the paper): a panel a snapshot, aligned, colored by class."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from meanshift.evaluation.cluster import groups
from meanshift.runtime import rng
from meanshift.viz import style
from meanshift.viz.figures import Choices, Drawing
from meanshift.viz.run_reader import MissingData, Run
from meanshift.viz.tsne import draw_maps

_MOST = 10  # colors that an eye keeps apart


def draw(runs: Sequence[Run], choices: Choices) -> Drawing:
    """The probe after up to six epochs; without labels the colors are clusters, and it says so."""
    from matplotlib.lines import Line2D

    (run,) = runs
    epochs = run.chosen_epochs(choices.epochs, 6)
    color, names, by = _colors(run, choices.seed)
    maps = [one for one in draw_maps(run) if one.epoch in epochs]

    columns = min(3, len(maps))
    lines = -(-len(maps) // columns)
    reach = torch.stack([one.points.abs().amax(0) for one in maps]).amax(0).clamp(min=0.1) + 0.04
    wide, high = reach.tolist()
    figure = style.figure(3.05 * columns + 1.3, (3.05 * high / wide + 0.3) * lines + 0.3)
    panels = figure.subplots(lines, columns, squeeze=False).flatten()
    order = rng.permutation(
        choices.seed, 0, len(maps[0].rows)
    )  # so that no class lies above another
    inks = [*style.COLORS[: len(names)], style.RULE]
    for axes in panels:
        axes.set(xlim=(-wide, wide), ylim=(-high, high), xticks=[], yticks=[], aspect="equal")
        axes.axis("off")
    for axes, one in zip(panels, maps, strict=False):
        axes.axis("on")
        axes.spines[:].set_visible(True)
        axes.set_title("untrained" if one.epoch == 0 else f"epoch {one.epoch}")
        shown = color[one.rows][order].tolist()
        x, y = one.points[order].T.numpy()
        axes.scatter(x, y, s=8000 / max(600, len(x)), c=[inks[i] for i in shown], linewidths=0)
    words = [*names, "others"] if -1 in shown else names
    marks = [Line2D([], [], color=ink, ls="", marker="o", markersize=5.5) for ink in inks]
    figure.legend(
        marks[: len(words)], words, loc="outside right upper", title=by, alignment="left",
        title_fontproperties={"weight": "bold", "size": 9}, handletextpad=0.1, borderaxespad=1.5,
    )  # fmt: skip
    only = " Only one snapshot, so nothing moves." if len(maps) == 1 else ""
    figure.suptitle(f"t-SNE of {run.name}", x=0.004, ha="left", weight="bold", size=11)
    when = ", ".join(str(one.epoch) for one in maps)
    text = f"t-SNE of {len(maps[0].rows)} training images of {run.name} after epochs {when}, each"
    text += f" map begun where the one before ended; colored by {' '.join(by.split())}.{only}"
    return Drawing(figure, "Epochwise t-SNE", text)


def _colors(run: Run, seed: int) -> tuple[Int[Tensor, " n"], list[str], str]:
    """Which color each image of the probe has (-1: none), their names, and what they mean."""
    try:
        labels = run.labels
    except MissingData:  # without the images there are still the features
        labels = None
    if labels is None:
        names, assigned = groups(run.moment(run.epochs[-1]).features)
        return assigned, names, "cluster\n(k-means of the\nlast snapshot)"
    present = labels[labels >= 0].unique()
    chosen = present[rng.choice(seed, len(present), _MOST, rng.PROBE)]
    same = labels[:, None] == chosen
    names = [style.short(run.source.classes[label]) for label in chosen.tolist()]
    return torch.where(same.any(1), same.int().argmax(1), -1), names, "class"
