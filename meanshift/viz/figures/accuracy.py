"""k-NN accuracy against the size of the bank and against k, over runs alike in all else."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from meanshift.viz import style
from meanshift.viz.figures import Choices, Drawing, alike, names_by_settings
from meanshift.viz.run_reader import MissingData, Run

_AXES = {  # the setting of a panel, its title, and what else may differ: BYOL is the case k=1
    "method.bank_size": ("Accuracy by bank size", "rows in the bank", ("train.seed",)),
    "method.k": ("Accuracy by k", "k", ("train.seed", "method.name")),
}
_Line = dict[int, list[float]]  # the runs' figures at each value of the setting


def draw(runs: Sequence[Run], _: Choices) -> Drawing:
    """A line for runs that differ in one setting; points are means over seeds, bars deviations."""
    measure, heights = _heights(runs)
    drawn = {setting: lines for setting in _AXES if (lines := _lines(heights, setting))}
    if not drawn:
        raise MissingData(
            f"{len(heights)} of {len(runs)} runs are finished and have k-NN figures; need two or "
            f"more that differ in nothing but k or bank size (and seed): meanshift pretrain RECIPE "
            f"--data SOURCE --out RUN --method.k 10 (or --method.bank_size 1024)"
        )
    figure, told = style.figure(4.6 * len(drawn) + 0.4, 3.4), list[str]()
    places = figure.subplots(1, len(drawn), squeeze=False, sharey=True)[0]
    for axes, (setting, lines) in zip(places, drawn.items(), strict=True):
        title, label, _also = _AXES[setting]
        axes.set_title(title)
        axes.set_xlabel(label)
        axes.set_xscale("log")
        ticks = sorted({x for line in lines.values() for x in line})
        axes.set_xticks(ticks, [f"{x:,}" for x in ticks])
        axes.set_xticks([], minor=True)
        for name, line in lines.items():
            means = [statistics.fmean(values) for values in line.values()]
            wide = [statistics.stdev(v) if len(v) > 1 else math.nan for v in line.values()]
            axes.errorbar(list(line), means, wide, label=name, marker="o", markersize=4, capsize=3)
            for x, mean in zip(line, means, strict=True):
                told.append(f"{name}, {label} {x:,}: {mean:.1f} (runs: {len(line[x])})")
        if len(lines) > 1:
            axes.legend()
    figure.axes[0].set_ylabel(measure)
    text = f"{measure}; bars are one deviation over seeds. " + "; ".join(told) + "."
    return Drawing(figure, "Accuracy by bank size and k", text)


def _heights(runs: Sequence[Run]) -> tuple[str, dict[Run, float]]:
    """The measure that most finished runs have, the best kind first: never two in one figure."""
    kinds = dict[str, dict[Run, float]]()
    for run in runs:
        if run.done < run.config.train.epochs - 0.01:
            continue
        result = run.results.get("knn", {"card": {}, "figures": {}})
        judged = {} if run.older(result) else result["figures"]
        seen = (run.records("monitor") or [{}])[-1]
        for name in ("20-NN", "1-NN"):
            for where, told in (("judged", judged), ("while training", seen)):
                kind = kinds.setdefault(f"{name} accuracy, % ({where})", {})
                if name in told:
                    kind[run] = float(told[name])
    return max(kinds.items(), key=lambda kind: len(kind[1]), default=("", {}))


def _lines(heights: dict[Run, float], setting: str) -> dict[str, _Line]:
    """Lines of two points or more, by what sets them apart."""
    field, but = setting.removeprefix("method."), (setting, *_AXES[setting][2])
    firsts, lines = list[Run](), list[_Line]()
    for group in alike(list(heights), but=but):
        line: _Line = {}
        for run in sorted(group, key=lambda run: int(getattr(run.config.method, field))):
            line.setdefault(getattr(run.config.method, field), []).append(heights[run])
        if len(line) > 1:
            firsts.append(group[0])
            lines.append(line)
    names = names_by_settings(firsts, but=but) if firsts else []
    return dict(zip(names, lines, strict=True))
