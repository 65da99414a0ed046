"""The cost of finding neighbors (Table 1 of the paper): a row a bank size."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from meanshift.viz import style
from meanshift.viz.figures import Choices, Drawing
from meanshift.viz.run_reader import MissingData, Run


def draw(runs: Sequence[Run], _: Choices) -> Drawing:
    """The search's share of a step, its arithmetic and its memory; the run's own bank is bold."""
    (run,) = runs
    held = run.results.get("cost")
    if held is None:
        raise MissingData(
            f"{run.folder}: no cost in results/; type: meanshift bench cost {run.folder}"
        )
    card, settings = held["card"], held["card"]["settings"]
    rows = settings["table"]
    figure = style.figure(6.6, 0.27 * (len(rows) + 4))
    figure.set_layout_engine("none")
    axes = figure.add_axes((0.02, 0, 0.96, 1))
    axes.set(xlim=(0, 1), ylim=(len(rows) + 1.3, -2.2))
    axes.axis("off")

    write = functools.partial(axes.text, va="center")
    write(0, -1.5, f"Cost of the neighbor search of {run.name}", weight="bold", size=10)
    head = {0.16: "bank", 0.34: "share of a step", 0.8: "GFLOPs a batch", 1.0: "memory, MB"}
    for x, words in head.items():
        write(x, -0.3, words, color=style.QUIET, ha="right")
    told = []
    widest = max(row["share"] for row in rows)
    for y, row in enumerate(rows, 1):
        weight = "bold" if row["bank"] == settings["bank"] else "normal"
        cells = (f"{row['bank']:,}", f"{row['share']:.1%}", f"{row['gflops']:.2f}")
        for x, words in zip(head, [*cells, f"{row['bytes'] / 1e6:.1f}"], strict=True):
            write(x, y - 0.4, words, weight=weight, ha="right")
        bar = 0.22 * row["share"] / widest
        axes.barh(y - 0.4, bar, 0.5, left=0.36, color=style.COLORS[0])
        told.append(f"{cells[0]} rows {cells[1]} of a step")
    axes.hlines([0.1, len(rows) + 0.2], 0, 1, color=style.QUIET, lw=0.8)
    how = (
        f"{settings['encoder']}, {settings['image_size']} px, batch {settings['batch']}, "
        f"k {settings['k']}, {settings['dim']} dimensions, {card['device']}, "
        f"threads {card['threads']}; medians of {settings['rounds']} rounds; bold: the run's own"
    )
    write(0, len(rows) + 0.8, how, color=style.QUIET, size=6.8)
    text = f"Share of a training step taken by the neighbor search: {'; '.join(told)}. {how}."
    return Drawing(figure, "Cost of the neighbor search", text)
