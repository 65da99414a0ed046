"""Few labels: the linear probe on a subset of the training images, or fine-tuning on it."""

from __future__ import annotations

import copy
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.nn import functional as F

from meanshift.data import stratified_sample
from meanshift.data.loader import batches
from meanshift.evaluation.context import EvaluationContext, FeatureSet
from meanshift.evaluation.linear_probe import (
    VIEW,
    ProbeSettings,
    Standardize,
    accuracy,
    fit_layers,
)
from meanshift.evaluation.result import Result
from meanshift.models.encoder import memory_format
from meanshift.models.features import extract_features
from meanshift.runtime import rng
from meanshift.runtime.device import autocast
from meanshift.runtime.progress import progress
from meanshift.transforms.augment import MultiViewTransform

FRACTIONS = (0.01, 0.1)
"""of the labels, where no subsets are chosen"""

Subsets = dict[str, list[Int[Tensor, " chosen"]]]
"""title of a subset: the indices of its images, for each seed"""


def evaluate(
    context: EvaluationContext,
    *,
    fractions: Sequence[float] = (),
    counts: Sequence[int] = (),
    lists: Sequence[Path] = (),
    seeds: int = 1,
    cached: bool = False,
    fine_tune: bool = False,
    settings: ProbeSettings | None = None,
) -> Result:
    """Top-1 and top-5 for each subset, the mean over seeds; by default of 1% and 10%.

    A subset is a fraction or a count of the training images, drawn in the proportions of the
    classes, another for each seed; or a list file, for which only the seed of the layer changes.
    """
    if seeds < 1:
        raise ValueError(f"semi: got {seeds} seeds, need 1 or more")
    settings = settings or ProbeSettings()
    test = context.test  # first: without labels this is an error
    train = context.train
    if not (fractions or counts or lists):
        fractions = FRACTIONS
    all_seeds = range(context.seed, context.seed + seeds)
    subsets = _draw_subsets(train, fractions, counts, all_seeds)
    for path in lists:
        title = path.stem if path.stem not in subsets else str(path)
        subsets[title] = [_read_list(path, train)] * seeds
    trials: dict[str, list[float]] = {}
    for title, by_seed in subsets.items():
        accuracies = []
        for seed, indices in zip(all_seeds, by_seed, strict=True):
            subset = train.take(train.source.subset(indices))
            name = f"semi {title}, seed {seed}"
            if fine_tune:
                accuracies.append(_fine_tune(context, subset, settings, seed, name))
            else:
                curves = fit_layers(
                    context, subset, test, settings=settings, cached=cached, seed=seed, title=name
                )
                accuracies.append(curves.last())
        trials[f"{title} top-1"] = [top1 for top1, _ in accuracies]
        if context.classes > 5:
            trials[f"{title} top-5"] = [top5 for _, top5 in accuracies]
    training = "linear layer" + (" on cached features" if cached else "")
    details = {
        "training": "fine-tuned" if fine_tune else training,
        "subsets": {title: len(by_seed[0]) for title, by_seed in subsets.items()},
        "drawn": "seeded, stratified, another for each seed" if fractions or counts else "",
        "lists": [str(path) for path in lists],
        "seeds": list(all_seeds),
        "by seed": trials,
        **asdict(settings),
    }
    name = "semi-fine-tuned" if fine_tune else "semi-cached" if cached else "semi"
    options = _changed_options(fractions, counts, lists, seeds)
    return Result(name + settings.tag, _summarize(trials), details, options=options)


def _changed_options(
    fractions: Sequence[float], counts: Sequence[int], lists: Sequence[Path], seeds: int
) -> dict[str, Any]:
    """The options that differ from the default, for the name of the result."""
    usual = tuple(fractions) == FRACTIONS and not (counts or lists)
    options = {
        "fractions": [] if usual else list(fractions),
        "counts": list(counts),
        "lists": [str(path.resolve()) for path in lists],
        "seeds": 0 if seeds == 1 else seeds,
    }
    return {option: value for option, value in options.items() if value}


def _draw_subsets(
    train: FeatureSet, fractions: Sequence[float], counts: Sequence[int], seeds: Sequence[int]
) -> Subsets:
    """Subsets of the training images in the proportions of the classes."""
    sizes = {}
    for fraction in fractions:
        if not 0 < fraction <= 1:
            raise ValueError(f"--fractions: got {fraction:g}, need above 0 and at most 1")
        sizes[f"{100 * fraction:g}%"] = round(fraction * len(train.source))
    sizes |= {str(count): count for count in counts}
    return {
        title: [stratified_sample(train.labels, size, seed=seed) for seed in seeds]
        for title, size in sizes.items()
    }


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


def _fine_tune(
    context: EvaluationContext, train: FeatureSet, settings: ProbeSettings, seed: int, title: str
) -> tuple[float, float]:
    """Train a copy of the backbone with a linear layer; top-1 and top-5 on the test images."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(rng.derive_seed(seed, 0, rng.INITIAL))
        layer = nn.Linear(train.features.shape[1], context.classes)
    backbone = copy.deepcopy(context.backbone)
    standardize = Standardize(train.features)
    network = nn.Sequential(backbone, standardize, layer).to(context.device).train()
    _train_network(network, context, train, settings, seed, title)
    features = extract_features(
        backbone,
        context.test.source,
        image_size=context.image_size,
        resize=context.resize,
        device=context.device,
        precision=context.precision,
        workers=context.workers,
    )
    return accuracy(layer, standardize, features, context.test.labels)


def _train_network(
    network: nn.Module,
    context: EvaluationContext,
    train: FeatureSet,
    settings: ProbeSettings,
    seed: int,
    title: str,
) -> None:
    """Train the whole network on augmented views of few images."""
    device = context.device
    layout = memory_format(network)
    network.to(memory_format=layout)
    transform = MultiViewTransform((VIEW,), seed, context.image_size)
    optimizer = torch.optim.SGD(
        network.parameters(),
        lr=settings.lr,
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
    )
    # Batch norm in training mode needs two images or more, so an epoch has whole batches only.
    batch_size = min(settings.batch_size, len(train.source))
    total_steps = settings.epochs * (len(train.source) // batch_size)
    generators = [device] if device.type == "cuda" else []
    with progress(title, total_steps) as bar, torch.random.fork_rng(devices=generators):
        for batch in batches(
            train.source,
            transform.crop,
            batch_size=batch_size,
            seed=seed,
            start=0,
            stop=total_steps,
            workers=context.workers,
            pin_memory=device.type == "cuda",
        ):
            torch.manual_seed(rng.derive_seed(seed, batch.step, rng.NETWORK))  # dropout
            batch = batch.to(device)
            optimizer.param_groups[0]["lr"] = settings.lr * settings.lr_factor(batch.epoch)
            (view,) = transform.finish(batch.images, batch.epoch, batch.ids)
            with autocast(device, context.precision):
                scores = network(view.contiguous(memory_format=layout))
            assert batch.labels is not None
            loss = F.cross_entropy(scores.float(), batch.labels)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            bar.update()
