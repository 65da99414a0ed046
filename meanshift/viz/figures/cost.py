"""The cost of the neighbor search (Table 1 of the MSF paper): one row per size of the bank."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from meanshift.viz import style
from meanshift.viz.figures import Drawing, Options
from meanshift.viz.run_reader import MissingData, Run

_COLUMNS = {0.16: "bank", 0.34: "fraction of a step", 0.8: "GFLOPs per batch", 1.0: "memory, MB"}
"""right end of each column, and its heading"""


def draw(runs: Sequence[Run], _: Options) -> Drawing:
    """The search's fraction of a step, its arithmetic and its memory; bold is the run's own."""
    (run,) = runs
    result = run.results.get("cost")
    if result is None:
        raise MissingData(
            f"{run.folder}: no cost in results/; type: python -m benchmarks cost {run.folder} "
            f"(in a clone of the repository)"
        )
    card = result["card"]
    settings = card["settings"]
    rows = settings["table"]
    figure = style.figure(style.PAGE, 0.2 * (len(rows) + 1.6))
    figure.set_layout_engine("none")
    axes = figure.add_axes((0.02, 0, 0.96, 1))
    axes.set(xlim=(0, 1), ylim=(len(rows) + 0.5, -0.9))
    axes.axis("off")

    write = functools.partial(axes.text, va="center")
    for x, heading in _COLUMNS.items():
        write(x, -0.3, heading, color=style.QUIET, ha="right")
    values = []
    largest = max(row["fraction"] for row in rows)
    for y, row in enumerate(rows, 1):
        weight = "bold" if row["bank"] == settings["bank"] else "normal"
        bank = f"{row['bank']:,}"
        fraction = f"{row['fraction']:.1%}"
        cells = [bank, fraction, f"{row['gflops']:.2f}", f"{row['bytes'] / 1e6:.1f}"]
        for x, cell in zip(_COLUMNS, cells, strict=True):
            write(x, y - 0.4, cell, weight=weight, ha="right")
        length = 0.22 * row["fraction"] / largest
        axes.barh(y - 0.4, length, 0.5, left=0.36, color=style.COLORS[0])
        values.append(f"{bank} rows {fraction} of a step")
    axes.hlines([0.1, len(rows) + 0.2], 0, 1, color=style.QUIET, lw=0.8)
    conditions = (
        f"{settings['encoder']}, {settings['image_size']} px, batch {settings['batch']}, "
        f"k {settings['k']}, {settings['dim']} dimensions, {card['device']}, "
        f"threads {card['threads']}; medians of {settings['rounds']} rounds; bold: the run's own"
    )
    text = "Fraction of a training step that the neighbor search takes, by the number of rows in "
    text += f"the memory bank: {'; '.join(values)}. Measured with {conditions}."
    return Drawing(figure, "Cost of the neighbor search", text)
