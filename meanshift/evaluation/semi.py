"""Few labels: the linear probe on a subset of the training images."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from meanshift.data import stratified_sample
from meanshift.evaluation.context import EvaluationContext, FeatureSet
from meanshift.evaluation.linear_probe import ProbeSettings, fit_layers
from meanshift.evaluation.result import Result

FRACTIONS = (0.01, 0.1)
"""of the labels, where no subsets are chosen"""

Subsets = dict[str, list[Int[Tensor, " chosen"]]]
"""title of a subset: the indices of its images, for each seed"""

Fit = Callable[[FeatureSet, int, str], tuple[float, float]]
"""(a labeled subset, seed, title) to the top-1 and top-5 of what is trained on it"""


def evaluate(
    context: EvaluationContext,
    *,
    fractions: Sequence[float] = (),
    counts: Sequence[int] = (),
    lists: Sequence[Path] = (),
    seeds: int = 1,
    cached: bool = False,
    settings: ProbeSettings | None = None,
) -> Result:
    """Top-1 and top-5 of a linear layer for each subset; by default of 1% and 10%."""
    probe = settings or ProbeSettings()

    def fit(subset: FeatureSet, seed: int, title: str) -> tuple[float, float]:
        curves = fit_layers(
            context,
            subset,
            context.test,
            settings=probe,
            cached=cached,
            seed=seed,
            title=f"semi {title}",
        )
        return curves.last()

    name = ("semi-cached" if cached else "semi") + probe.tag
    training = "linear layer" + (" on cached features" if cached else "")
    return evaluate_subsets(
        context,
        name,
        fit,
        {"training": training, **asdict(probe)},
        usual=FRACTIONS,
        fractions=fractions,
        counts=counts,
        lists=lists,
        seeds=seeds,
    )


def evaluate_subsets(
    context: EvaluationContext,
    name: str,
    fit: Fit,
    settings: Mapping[str, Any],
    *,
    usual: Sequence[float],
    fractions: Sequence[float],
    counts: Sequence[int],
    lists: Sequence[Path],
    seeds: int,
) -> Result:
    """Top-1 and top-5 of what `fit` trains on each labeled subset, the mean over seeds.

    A subset is a fraction or a count of the training images, drawn in the proportions of the
    classes, another for each seed; or a list file, for which only the seed of the training changes.
    The `usual` fractions are taken if no subsets are chosen.
    """
    if seeds < 1:
        raise ValueError(f"--seeds: got {seeds}, need 1 or more")
    _ = context.test  # first: without labels this is an error
    train = context.train
    if not (fractions or counts or lists):
        fractions = usual
    all_seeds = range(context.seed, context.seed + seeds)
    subsets = _draw_subsets(train, fractions, counts, lists, all_seeds)
    trials: dict[str, list[float]] = {}
    for title, by_seed in subsets.items():
        accuracies = [
            fit(train.take(train.source.subset(indices)), seed, f"{title}, seed {seed}")
            for seed, indices in zip(all_seeds, by_seed, strict=True)
        ]
        trials[f"{title} top-1"] = [top1 for top1, _ in accuracies]
        if context.classes > 5:
            trials[f"{title} top-5"] = [top5 for _, top5 in accuracies]
    details = {
        **settings,
        "subsets": {title: len(by_seed[0]) for title, by_seed in subsets.items()},
        "drawn": "seeded, stratified, another for each seed" if fractions or counts else "",
        "lists": [str(path) for path in lists],
        "seeds": list(all_seeds),
        "by seed": trials,
    }
    is_usual = tuple(fractions) == tuple(usual) and not (counts or lists)
    options = {
        "fractions": [] if is_usual else list(fractions),
        "counts": list(counts),
        "lists": [str(path.resolve()) for path in lists],
        "seeds": 0 if seeds == 1 else seeds,
    }
    changed = {option: value for option, value in options.items() if value}
    return Result(name, _summarize(trials), details, options=changed)


def _draw_subsets(
    train: FeatureSet,
    fractions: Sequence[float],
    counts: Sequence[int],
    lists: Sequence[Path],
    seeds: Sequence[int],
) -> Subsets:
    """Subsets of the training images in the proportions of the classes, then those of lists."""
    sizes = {}
    for fraction in fractions:
        if not 0 < fraction <= 1:
            raise ValueError(f"--fractions: got {fraction:g}, need above 0 and at most 1")
        sizes[f"{100 * fraction:g}%"] = round(fraction * len(train.source))
    sizes |= {str(count): count for count in counts}
    subsets = {
        title: [stratified_sample(train.labels, size, seed=seed) for seed in seeds]
        for title, size in sizes.items()
    }
    for path in lists:
        title = path.stem if path.stem not in subsets else str(path)
        subsets[title] = [_read_list(path, train)] * len(seeds)
    return subsets


def _summarize(trials: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The mean over seeds, and the std where there are several."""
    metrics: dict[str, float] = {}
    for name, values in trials.items():
        metrics[name] = sum(values) / len(values)
        if len(values) > 1:
            metrics[f"{name} std"] = statistics.stdev(values)
    return metrics


def _read_list(path: Path, train: FeatureSet) -> Int[Tensor, " chosen"]:
    """The training images that a list names, by their path in the source or their file's name."""
    try:
        lines = path.read_text().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a readable list of file names ({error})") from None
    titles = [train.source.title(index) for index in range(len(train.source))]
    files = Counter(Path(title).name for title in titles)
    index_of = {
        Path(title).name: index
        for index, title in enumerate(titles)
        if files[Path(title).name] == 1
    }
    index_of |= {title: index for index, title in enumerate(titles)}
    names = [line.strip() for line in lines if line.strip()]
    unknown = [name for name in names if name not in index_of]
    if unknown or not names:
        raise ValueError(
            f"{path}: {len(unknown)} of its {len(names)} names do not name one training image of "
            f"{train.source.name}, the first is {next(iter(unknown), 'missing')}; need names as "
            f"{titles[0]}, one per line"
        )
    return torch.tensor(sorted({index_of[name] for name in names}))
