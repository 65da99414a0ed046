"""Neighbors over epochs (Figure 2 of the paper): a row a query, a block of neighbors an epoch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int
from torch import Tensor

from meanshift.runtime import rng
from meanshift.viz import style
from meanshift.viz.figures import Choices, Drawing
from meanshift.viz.run_reader import MissingData, Run


def draw(runs: Sequence[Run], choices: Choices) -> Drawing:
    """Random images of the probe and, after chosen epochs, their nearest others in it."""
    (run,) = runs
    epochs = run.chosen_epochs(choices.epochs, 4)
    indices = run.moment(epochs[-1]).indices
    if len(indices) < 2:
        raise MissingData(
            f"{run.folder}: the probe has {len(indices)} image, need two or more: train with "
            f"--train.snapshot_images 1000"
        )
    labels = run.labels
    queries = _spread(len(indices), labels, choices.rows or 8, choices.seed)
    near = {epoch: run.neighbors(epoch, choices.columns or 5)[0] for epoch in epochs}
    count = near[epochs[0]].shape[1]

    side, scale = style.pixels_of(run.config.data.image_size)
    cells = []
    for query in queries:
        line: list[np.ndarray | None] = [run.thumbnail(int(indices[query]), side).numpy()]
        for epoch in epochs:  # an empty cell before each block
            line += [
                None,
                *(run.thumbnail(int(indices[i]), side).numpy() for i in near[epoch][query]),
            ]
        cells.append(line)
    gap, size = 6, side * scale
    figure, axes = style.sheet(style.mosaic(cells, gap=gap, scale=scale), top=72, bottom=12)
    axes.set_title(
        f"{style.short(run.name)}: nearest neighbors of {len(queries)} images, by epoch", pad=19
    )
    if labels is not None:
        words = f"underlined: the query's class; shares over the whole probe of {len(indices)}"
        axes.set_title(words, loc="right", pad=20, color=style.QUIET, size=8, weight="normal")
    axes.text(0, -6, "query", color=style.QUIET, va="bottom")
    told = []
    for at, epoch in enumerate(epochs):
        left = (2 + at * (count + 1)) * (size + gap)
        words = "untrained" if epoch == 0 else f"epoch {epoch}"
        if labels is not None:
            share = float(run.pure(epoch, count)[labels >= 0].mean())
            words += f": {share:.0%} same class"
            for row, query in enumerate(queries):  # a thin line under those of the query's class
                for column, other in enumerate(near[epoch][query].tolist()):
                    if labels[query] == labels[other] >= 0:
                        x, y = left + column * (size + gap), row * (size + gap) + size + gap / 2
                        axes.plot([x, x + size], [y, y], color=style.COLORS[2], lw=1.8,
                                  solid_capstyle="butt", clip_on=False)  # fmt: skip
        axes.text(left, -6, words, color=style.QUIET, va="bottom")
        told.append(words)
    text = f"{len(queries)} images of {run.name}, each with its {count} nearest others in a probe"
    text += f" of {len(indices)}. " + ("" if labels is None else "Over the whole probe: ")
    return Drawing(figure, "Neighbors over epochs", text + "; ".join(told) + ".")


def _spread(size: int, labels: Int[Tensor, " n"] | None, rows: int, seed: int) -> list[int]:
    """Random images; the first of each class come before the second of any."""
    order, met, turn = rng.permutation(seed, 0, size).tolist(), Counter[int](), dict[int, int]()
    for index in order:
        label = 0 if labels is None else int(labels[index])
        turn[index] = met[label]
        met[label] += 1
    return sorted(order, key=turn.__getitem__)[:rows]
