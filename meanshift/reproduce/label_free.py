"""Choosing a variant without labels: which one each measure selects, and how good that choice is.

RankMe (Garrido et al. 2023) and LiDAR (Thilak et al. 2023) were proposed for this; neighbor
stability and view retrieval compare two views of an image (`evaluation/rank.py`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meanshift.reproduce.claims import Measurement, Table

MEASURES = ("RankMe", "LiDAR", "neighbor stability", "view retrieval")
"""metrics of `meanshift evaluate rank`, of the backbone's features; a higher value is chosen"""


@dataclass(frozen=True)
class Choice:
    """The variant that a measure chooses, and what is lost against the best one."""

    measure: str
    variant: str
    """chosen by the mean over seeds"""
    right: int
    """seeds in which the chosen variant is the most accurate one"""
    seeds: int
    regret: float
    """accuracy of the best variant minus that of the chosen one, mean over seeds"""
    chance: float
    """the same for a random choice: the mean over variants and seeds"""
    correlation: float
    """Spearman's, of the measure and the accuracy over variants, of their means over seeds; nan if
    one of them is the same for all variants"""


def choices(measured: Table, accuracy: Mapping[str, Measurement]) -> list[Choice]:
    """What each measure chooses, over the seeds that all variants have; needs three variants."""
    from scipy import stats

    titles = [title for title in measured if accuracy[title].values]
    common = [set(accuracy[title].by_seed) for title in titles]
    common += [set(each.by_seed) for title in titles for each in measured[title].values()]
    seeds = sorted(set.intersection(*common)) if common else []
    if len(titles) < 3 or not seeds:
        return []
    accuracies = {title: accuracy[title].by_seed for title in titles}
    best = {seed: max(accuracies[title][seed] for title in titles) for seed in seeds}
    chance = statistics.fmean(
        best[seed] - accuracies[title][seed] for title in titles for seed in seeds
    )
    found = []
    for measure in MEASURES:
        values = {title: measured[title][measure].by_seed for title in titles}
        means = {title: statistics.fmean(values[title][seed] for seed in seeds) for title in titles}
        true_means = [
            statistics.fmean(accuracies[title][seed] for seed in seeds) for title in titles
        ]
        right = 0
        regrets = []
        for seed in seeds:
            chosen = max(titles, key=lambda title: values[title][seed])
            regrets.append(best[seed] - accuracies[chosen][seed])
            right += regrets[-1] == 0
        constant = len(set(means.values())) == 1 or len(set(true_means)) == 1
        correlation = math.nan
        if not constant:
            correlation = float(stats.spearmanr(list(means.values()), true_means).statistic)
        chosen = max(means, key=lambda title: means[title])
        regret = statistics.fmean(regrets)
        found.append(Choice(measure, chosen, right, len(seeds), regret, chance, correlation))
    return found


def total(found: Sequence[Choice]) -> dict[str, tuple[int, int, float, float]]:
    """By measure, over the seeds of several studies: right, seeds, regret, regret by chance."""
    totals = {}
    for measure in MEASURES:
        own = [each for each in found if each.measure == measure]
        seeds = sum(each.seeds for each in own)
        if seeds:
            regret = sum(each.seeds * each.regret for each in own) / seeds
            chance = sum(each.seeds * each.chance for each in own) / seeds
            totals[measure] = (sum(each.right for each in own), seeds, regret, chance)
    return totals


def sentence(measured: Table) -> str:
    """What each measure chooses where there are no labels to check it; empty without runs."""
    titles = [title for title, row in measured.items() if all(each.values for each in row.values())]
    if len(titles) < 2:
        return ""
    chosen: dict[str, list[str]] = {}
    for measure in MEASURES:
        best = max(titles, key=lambda title: measured[title][measure].mean)
        chosen.setdefault(best, []).append(measure)
    parts = [f"{title} (by {', '.join(measures)})" for title, measures in chosen.items()]
    return (
        f"There are no labels. Chosen without them: {'; '.join(parts)}. How often each measure was "
        f"right where labels could check it: docs/results.md."
    )


def markdown(found: list[Choice], metric: str) -> str:
    """The choices as a table; empty if there are none."""
    if not found:
        return ""
    lines = [
        f"| chosen without labels by | choice | right in | {metric} lost | by chance | rank "
        f"correlation |",
        "| --- | --- | --: | --: | --: | --: |",
    ]
    lines += [
        f"| {each.measure} | {each.variant} | {each.right} of {each.seeds} | {each.regret:.1f} | "
        f"{each.chance:.1f} | "
        f"{'–' if math.isnan(each.correlation) else f'{each.correlation:+.2f}'} |"
        for each in found
    ]
    return "\n".join(lines)
