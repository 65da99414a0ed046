"""Nearest neighbors over epochs (Figure 2 of the MSF paper): one row per query image."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Int
from torch import Tensor

from meanshift.runtime import rng
from meanshift.viz import style
from meanshift.viz.analysis import label_purity, neighbors, same_label, select_epochs
from meanshift.viz.figures import Drawing, Options
from meanshift.viz.run_reader import MissingData, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_GAP = 6


def draw(runs: Sequence[Run], options: Options) -> Drawing:
    """Random snapshot images and, after each chosen epoch, a block of their nearest others."""
    (run,) = runs
    epochs = select_epochs(run, options.epochs, count=4)
    indices = run.snapshot(epochs[-1]).indices
    if len(indices) < 2:
        raise MissingData(
            f"{run.folder}: the snapshots have {len(indices)} image, need two or more: train with "
            f"--train.snapshot_images 1000"
        )
    labels = run.labels
    queries = _choose_queries(len(indices), labels, options.rows or 8, options.seed)
    near = {epoch: neighbors(run, epoch, options.columns or 5)[0] for epoch in epochs}
    count = near[epochs[0]].shape[1]

    side, scale = style.cell_size(run.config.data.image_size)
    cells = [_row_of_images(run, query, [near[epoch] for epoch in epochs]) for query in queries]
    narrow = count < 4  # than the words of a heading
    figure, axes = style.sheet(
        style.mosaic(cells, gap=_GAP, scale=scale),
        top=44 if labels is None else 80,
        right=80 if narrow else 8,
        bottom=12,
    )
    axes.text(0, -8, "query", size=7, va="bottom")
    pitch = side * scale + _GAP
    purities = []
    for block, epoch in enumerate(epochs):
        left = (2 + block * (count + 1)) * pitch
        heading = "before training" if epoch == 0 and not narrow else f"epoch {epoch}"
        if labels is not None:
            purity = float(label_purity(run, epoch, count)[labels >= 0].mean())
            purities.append(f"{purity:.0%} after epoch {epoch}")
            heading += f"\n{purity:.0%}" + ("" if narrow else " same class")
            matches = same_label(labels, near[epoch])[queries]
            _underline(axes, matches, left=left, pitch=pitch)
        axes.text(left, -8, heading, size=7, va="bottom")
    text = f"{len(queries)} random images (left), each with its {count} nearest others of the "
    text += (
        f"{len(indices):,} snapshot images by cosine similarity, nearest first. Columns: epochs."
    )
    if labels is not None:
        text += " Underlined: of the query's class. Fraction of the neighbors of all snapshot "
        text += f"images that have the query's class: {', '.join(purities)}."
    return Drawing(figure, "Neighbors over epochs", text)


def _row_of_images(
    run: Run, query: int, near: Sequence[Int[Tensor, "n count"]]
) -> list[np.ndarray | None]:
    """The query and a block of its neighbors per epoch, with an empty cell before each block."""
    side, _ = style.cell_size(run.config.data.image_size)
    indices = run.snapshot(run.snapshot_epochs[-1]).indices
    row: list[np.ndarray | None] = [run.thumbnail(int(indices[query]), side).numpy()]
    for rows in near:
        row.append(None)
        row += [run.thumbnail(int(indices[other]), side).numpy() for other in rows[query]]
    return row


def _underline(axes: Axes, matches: Tensor, *, left: int, pitch: int) -> None:
    """A thin line under each neighbor that has the class of its query."""
    size = pitch - _GAP
    for row, column in matches.nonzero().tolist():
        x = left + column * pitch
        y = row * pitch + size + _GAP / 2
        axes.plot(
            [x, x + size],
            [y, y],
            color=style.COLORS[2],
            lw=1,
            solid_capstyle="butt",
            clip_on=False,
        )


def _choose_queries(
    size: int, labels: Int[Tensor, " n"] | None, count: int, seed: int
) -> list[int]:
    """Random images: one of each class before the second of any."""
    order = rng.permutation(seed, 0, size).tolist()
    seen = Counter[int]()
    place_in_class = dict[int, int]()
    for index in order:
        label = 0 if labels is None else int(labels[index])
        place_in_class[index] = seen[label]
        seen[label] += 1
    return sorted(order, key=place_in_class.__getitem__)[:count]
