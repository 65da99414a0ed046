"""k-NN accuracy by the size of the memory bank and by k, over runs that share everything else."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence

from meanshift.viz import style
from meanshift.viz.figures import Drawing, Options, group_similar, names_by_settings
from meanshift.viz.run_reader import MissingData, Run

_PANELS = {  # the setting of a panel: title, label of the axis, other settings that may differ
    "method.bank_size": ("Accuracy by bank size", "rows in the bank", ("train.seed",)),
    "method.k": ("Accuracy by k", "k", ("train.seed", "method.name")),
}
_Line = dict[int, list[float]]
"""accuracies of the runs at each value of the setting"""


def draw(runs: Sequence[Run], _: Options) -> Drawing:
    """One line per group of runs that differ in one setting; points are means over seeds."""
    metric, accuracies = _accuracies(runs)
    panels = {setting: lines for setting in _PANELS if (lines := _lines(accuracies, setting))}
    if not panels:
        raise MissingData(
            f"{len(accuracies)} of {len(runs)} runs are finished and have k-NN metrics; need two "
            f"or more that differ only in k or bank size (and seed): meanshift pretrain RECIPE "
            f"--data SOURCE --out RUN --method.k 10 (or --method.bank_size 1024)"
        )
    figure = style.figure(style.COLUMN if len(panels) == 1 else style.PAGE, 2.4)
    places = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    values = []
    for axes, (setting, lines) in zip(places, panels.items(), strict=True):
        title, label, _ignore = _PANELS[setting]
        axes.set_title(title)
        axes.set_xlabel(label)
        axes.set_xscale("log")
        ticks = sorted({x for line in lines.values() for x in line})
        axes.set_xticks(ticks, [f"{x:,}" for x in ticks])
        axes.set_xticks([], minor=True)
        for (name, line), marker in zip(lines.items(), itertools.cycle(style.MARKERS)):
            means = [statistics.fmean(seeds) for seeds in line.values()]
            stds = [statistics.stdev(s) if len(s) > 1 else math.nan for s in line.values()]
            axes.errorbar(list(line), means, stds, label=name, marker=marker, capsize=2)
            for x, mean in zip(line, means, strict=True):
                values.append(f"{name}, {label} {x:,}: {mean:.1f} (runs: {len(line[x])})")
        if len(lines) > 1:
            axes.legend()
    figure.axes[0].set_ylabel(metric)
    text = f"Vertical axis: {metric}, the mean over seeds; error bars are one std over seeds. "
    text += f"Horizontal axis: {' or '.join(_PANELS[setting][1] for setting in panels)}, on a "
    text += f"logarithmic scale; all other settings of a line are the same. {'; '.join(values)}."
    return Drawing(figure, "Accuracy by bank size and k", text)


def _accuracies(runs: Sequence[Run]) -> tuple[str, dict[Run, float]]:
    """The k-NN metric that most finished runs have, with the value of each run.

    One figure never mixes metrics; of equally common ones the first of the list below is taken.
    """
    metrics = dict[str, dict[Run, float]]()
    for run in runs:
        if run.epochs_done < run.config.train.epochs - 0.01:
            continue
        result = run.results.get("knn", {"card": {}, "metrics": {}})
        evaluated = {} if run.outdated(result) else result["metrics"]
        monitored = (run.records("monitor") or [{}])[-1]
        for name in ("20-NN", "1-NN"):
            for origin, values in (("evaluated", evaluated), ("while training", monitored)):
                metric = metrics.setdefault(f"{name} accuracy, % ({origin})", {})
                if name in values:
                    metric[run] = float(values[name])
    return max(metrics.items(), key=lambda item: len(item[1]), default=("", {}))


def _lines(accuracies: dict[Run, float], setting: str) -> dict[str, _Line]:
    """Lines of two points or more, by the settings in which they differ."""
    ignore = (setting, *_PANELS[setting][2])
    representatives = list[Run]()
    lines = list[_Line]()
    with_setting = [run for run in accuracies if run.setting(setting) is not None]
    for group in group_similar(with_setting, ignore=ignore):
        line: _Line = {}
        for run in sorted(group, key=lambda run: int(run.setting(setting))):
            line.setdefault(run.setting(setting), []).append(accuracies[run])
        if len(line) > 1:
            representatives.append(group[0])
            lines.append(line)
    names = names_by_settings(representatives, ignore=ignore) if representatives else []
    return dict(zip(names, lines, strict=True))
