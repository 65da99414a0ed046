"""Neighbours over epochs (Figure 2 of the paper): a row a query, a block of neighbours an epoch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meanshift import keyed, look
from meanshift.figures import Choices, Drawing
from meanshift.run import Lacking, Run


def draw(runs: Sequence[Run], choices: Choices) -> Drawing:
    """Random pictures of the probe and, after chosen epochs, their nearest others in it."""
    (run,) = runs
    epochs = [e for e in choices.epochs if e in run.epochs] or run.some_epochs(4)
    if choices.epochs and set(epochs) != set(choices.epochs):
        known = " ".join(map(str, run.epochs))
        raise Lacking(f"{run.folder}: no snapshot after one of these epochs; there are {known}")
    rows, count = choices.rows or 8, choices.columns or 5
    indices = run.moment(epochs[-1]).indices
    if len(indices) < 2:
        raise Lacking(f"{run.folder}: the probe has {len(indices)} picture; need two or more")
    queries = keyed.choose(choices.seed, len(indices), rows, keyed.PROBE)
    side, scale = (32, 2) if run.config.data.image_size <= 64 else (96, 1)

    labels = run.labels
    near = {epoch: run.neighbours(epoch, count)[0] for epoch in epochs}
    count = next(iter(near.values())).shape[1]
    gap, block = 4, count + 1  # an empty cell between the blocks
    cells, right = [], dict.fromkeys(epochs, 0)
    for query in queries.tolist():
        line = [run.thumbnail(int(indices[query]), side).numpy(), None]
        for epoch in epochs:
            found = near[epoch][query]
            line += [run.thumbnail(int(indices[i]), side).numpy() for i in found] + [None]
            if labels is not None:
                right[epoch] += int((labels[found] == labels[query]).sum())
        cells.append(line[:-1])

    sheet = look.mosaic(cells, gap=gap, scale=scale)
    wide = 10.0
    figure = look.figure(wide, wide * sheet.shape[0] / sheet.shape[1] + 0.75)
    axes = figure.add_subplot()
    axes.imshow(sheet, interpolation="nearest")
    axes.axis("off")
    axes.set_title(f"Nearest neighbours of {len(queries)} random pictures, by epoch\n")
    pitch = side * scale + gap
    axes.text(0, -8, "query", color=look.QUIET, va="bottom")
    for at, epoch in enumerate(epochs):
        share = (
            "" if labels is None else f": {right[epoch] / (len(queries) * count):.0%} same class"
        )
        x = (2 + at * block) * pitch
        words = "untrained" if epoch == 0 else f"epoch {epoch}"
        axes.text(x, -8, words + share, color=look.QUIET, va="bottom")
    if labels is not None:  # a thin line under those of the query's class
        for r, query in enumerate(queries.tolist()):
            for at, epoch in enumerate(epochs):
                for c, i in enumerate(near[epoch][query].tolist()):
                    if labels[i] == labels[query]:
                        x, y = (2 + at * block + c) * pitch, r * pitch + side * scale + 1
                        axes.plot([x, x + side * scale], [y, y], color=look.COLOURS[2], lw=2)
    told = ", ".join(
        f"after epoch {e} {right[e]} of {len(queries) * count} share the query's class"
        for e in epochs
    )
    text = f"{len(queries)} pictures of {run.name}, each with its {count} nearest others" + (
        "" if labels is None else f"; {told}"
    )
    assert torch.is_tensor(indices)
    return Drawing(figure, "Neighbours over epochs", text)
