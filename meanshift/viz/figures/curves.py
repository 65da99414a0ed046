"""What a run tells while training, as small multiples: every line as it was written."""

from __future__ import annotations

from collections.abc import Sequence

from meanshift.viz import style
from meanshift.viz.figures import Choices, Drawing
from meanshift.viz.run_reader import MissingData, Run

_PANELS = {
    "Loss": ("loss",),
    "Learning rate": ("lr",),
    "Effective rank": ("effective_rank",),
    "Agreement of the views": ("agreement",),
    "20-NN (1-NN dashed), %": ("20-NN", "1-NN"),
    "Purity": ("purity",),
    "Images a second": ("images_per_second",),
}


def draw(runs: Sequence[Run], _: Choices) -> Drawing:
    """A color a run; a panel for which no run has figures is left out."""
    from matplotlib.lines import Line2D

    held = {t: p for t, p in _PANELS.items() if any(r.series(part)[0] for r in runs for part in p)}
    if not held:
        raise MissingData(
            f"{', '.join(str(run.folder) for run in runs)}: no lines in metrics.jsonl; they are "
            f"written while training, every --train.log_every steps"
        )
    columns = min(len(held), 3 if len(held) in (3, 5, 6) else 4)
    lines = -(-len(held) // columns)
    figure = style.figure(3.0 * columns, 2.35 * lines + 0.4)
    panels = figure.subplots(lines, columns, squeeze=False).flatten()
    for axes in panels[len(held) :]:
        axes.axis("off")
    told = []
    for axes, (title, parts) in zip(panels, held.items(), strict=False):
        axes.set_title(title)
        for at, run in enumerate(runs):
            color = style.COLORS[at % len(style.COLORS)]
            for part, dashes in zip(parts, ("-", "--"), strict=False):
                epochs, values = run.series(part)
                if epochs:
                    marker = "." if len(epochs) < 30 else ""
                    axes.plot(epochs, values, dashes, marker=marker, color=color, lw=1.2)
                    told.append(f"{run.name}: {part} from {values[0]:.4g} to {values[-1]:.4g}")
        axes.set_xlim(left=0)
        axes.locator_params(axis="x", integer=True)
    for axes in panels[max(0, len(held) - columns) : len(held)]:
        axes.set_xlabel("epoch")
    for run in runs:
        for warning in run.warnings:
            if warning["kind"] == "collapse":
                epoch = warning["step"] / run.steps
                told.append(f"{run.name}: collapse warned of at epoch {epoch:.2f}")
                for axes in panels[: len(held)]:
                    axes.axvline(epoch, color=style.ALARM, lw=1, ls=":")
                words = "collapse" if len(runs) == 1 else f"collapse: {style.short(run.name)}"
                panels[0].annotate(
                    words, (epoch, 1), xycoords=("data", "axes fraction"), xytext=(3, -2),
                    textcoords="offset points", va="top", color=style.ALARM, fontsize=8,
                )  # fmt: skip
    inks = [Line2D([], [], color=style.COLORS[i % len(style.COLORS)]) for i in range(len(runs))]
    names = [style.short(run.name, 30) for run in runs]
    figure.legend(inks, names, loc="outside upper left", ncols=min(6, len(runs)))
    return Drawing(figure, "Training curves", "; ".join(told) + ".")
