"""Few labels: the linear evaluation on a cut of the training images, or fine-tuning on it."""

from __future__ import annotations

import copy
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from meanshift.data import stratified
from meanshift.data.loader import batches
from meanshift.evaluation.context import EvaluationContext, FeatureSet, Result
from meanshift.evaluation.linear_probe import (
    VIEW,
    ProbeSettings,
    Standardize,
    accuracy,
    fit_layers,
)
from meanshift.models.encoder import memory_format
from meanshift.models.features import extract_features
from meanshift.runtime import rng
from meanshift.runtime.device import autocast
from meanshift.runtime.progress import progress
from meanshift.transforms.augment import MultiViewTransform


def evaluate(
    subject: EvaluationContext,
    *,
    fractions: Sequence[float] = (),
    counts: Sequence[int] = (),
    lists: Sequence[Path] = (),
    seeds: int = 1,
    cached: bool = False,
    fine_tune: bool = False,
    recipe: ProbeSettings | None = None,
) -> Result:
    """Top-1 and top-5 for each cut (1% and 10% unless said otherwise), the mean over seeds.

    A cut is a fraction or a count of the training images, drawn at random in the proportions of
    the classes, another for each seed; or a list file, for which only the layer's seed changes.
    """
    if seeds < 1:
        raise ValueError(f"semi: got {seeds} seeds, need 1 or more")
    recipe, test, train = recipe or ProbeSettings(), subject.test, subject.train
    if not (fractions or counts or lists):
        fractions = (0.01, 0.1)
    sizes = {f"{100 * share:g}%": _share(share, len(train.source)) for share in fractions}
    sizes |= {str(count): count for count in counts}
    own = range(subject.seed, subject.seed + seeds)
    cuts = {title: [stratified(train.labels, n, seed=s) for s in own] for title, n in sizes.items()}
    for path in lists:
        cuts[path.stem if path.stem not in cuts else str(path)] = [_listed(path, train)] * seeds
    figures, trials = dict[str, float](), dict[str, list[float]]()
    for title, chosen in cuts.items():
        found = []
        for seed, rows in zip(own, chosen, strict=True):
            part, name = train.take(train.source.take(rows)), f"semi {title}, seed {seed}"
            if fine_tune:
                found.append(_fine_tune(subject, part, recipe, seed, name))
            else:
                given: dict[str, Any] = {"recipe": recipe, "cached": cached, "seed": seed}
                found.append(fit_layers(subject, part, test, title=name, **given).last())
        for name, values in zip(("top-1", "top-5"), zip(*found, strict=True), strict=True):
            if name == "top-1" or subject.classes > 5:
                figures[f"{title} {name}"] = sum(values) / seeds
                trials[f"{title} {name}"] = list(values)
                if seeds > 1:
                    figures[f"{title} {name} deviation"] = statistics.stdev(values)
    way = "fine-tuned" if fine_tune else "linear layer" + (" on cached features" if cached else "")
    settings = {
        "way": way,
        "cuts": {title: len(chosen[0]) for title, chosen in cuts.items()},
        "drawn": "seeded, stratified, another for each seed" if sizes else "",
        "lists": [str(path) for path in lists],
        "seeds": list(own),
        "by seed": trials,
    }
    name = "semi-fine-tuned" if fine_tune else "semi-cached" if cached else "semi"
    return Result(name + recipe.tag, figures, {**settings, **asdict(recipe)})


def _share(fraction: float, size: int) -> int:
    if not 0 < fraction <= 1:
        raise ValueError(f"--fractions: got {fraction:g}, need above 0 and at most 1")
    return round(fraction * size)


def _listed(path: Path, train: FeatureSet) -> torch.Tensor:
    """The training images that a list names, by their path in the source or their file's name."""
    try:
        wanted = path.read_text().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a readable list of file names ({error})") from None
    titles = [train.source.title(index) for index in range(len(train.source))]
    files = Counter(Path(title).name for title in titles)
    index = {Path(t).name: i for i, t in enumerate(titles) if files[Path(t).name] == 1}
    index |= {title: i for i, title in enumerate(titles)}
    names = [name.strip() for name in wanted if name.strip()]
    unknown = [name for name in names if name not in index]
    if unknown or not names:
        raise ValueError(
            f"{path}: {len(unknown)} of its {len(names)} names do not name one training "
            f"image of {train.source.name}, the first is {next(iter(unknown), 'missing')}; need "
            f"names as {titles[0]}, one a line"
        )
    return torch.tensor(sorted({index[name] for name in names}))


def _fine_tune(
    subject: EvaluationContext, train: FeatureSet, recipe: ProbeSettings, seed: int, title: str
) -> tuple[float, float]:
    """The whole network on the few labels, from a copy: the judged one is left as it is."""
    device, size = subject.device, subject.image_size
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(rng.derive_seed(seed, 0, rng.INITIAL))
        layer = nn.Linear(train.features.shape[1], subject.classes)
    backbone = copy.deepcopy(subject.backbone)
    network = nn.Sequential(backbone, Standardize(train.features), layer).to(device).train()
    layout, views = memory_format(network), MultiViewTransform((VIEW,), seed, size)
    network.to(memory_format=layout)
    optimizer = torch.optim.SGD(
        network.parameters(),
        lr=recipe.lr,
        momentum=recipe.momentum,
        weight_decay=recipe.weight_decay,
    )
    # Batch norm in training mode needs two images or more, so an epoch has whole batches only.
    batch_size = min(recipe.batch_size, len(train.source))
    stop = recipe.epochs * (len(train.source) // batch_size)
    bar = progress(title, stop)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for batch in batches(
            train.source,
            views.crop,
            batch_size=batch_size,
            seed=seed,
            start=0,
            stop=stop,
            workers=subject.workers,
            pin_memory=device.type == "cuda",
        ):
            torch.manual_seed(rng.derive_seed(seed, batch.step, rng.NETWORK))  # dropout's address
            batch = batch.to(device)
            optimizer.param_groups[0]["lr"] = recipe.lr * recipe.factor(batch.epoch)
            (view,) = views.finish(batch.images, batch.epoch, batch.ids)
            with autocast(device, subject.precision):
                scores = network(view.contiguous(memory_format=layout))
            assert batch.labels is not None
            loss = F.cross_entropy(scores.float(), batch.labels)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            bar.update()
    bar.close()
    features = extract_features(
        backbone,
        subject.test.source,
        image_size=size,
        resize=subject.resize,
        device=device,
        precision=subject.precision,
        workers=subject.workers,
    )
    return accuracy(network[2], network[1], features, subject.test.labels)
