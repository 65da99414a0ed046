"""Few labels: the linear evaluation on a cut of the training pictures, or fine-tuning on it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from meanshift import keyed
from meanshift.augment import TwoViews
from meanshift.data import stratified
from meanshift.data.loader import batches
from meanshift.encoder import memory_format
from meanshift.features import extract
from meanshift.machine import autocast
from meanshift.probe import VIEWS, Recipe, Standardise, accuracy, fit_layers
from meanshift.progress import progress
from meanshift.subject import Part, Result, Subject


def evaluate(
    subject: Subject,
    *,
    fractions: Sequence[float] = (0.01, 0.1),
    counts: Sequence[int] = (),
    lists: Sequence[Path] = (),
    seeds: int = 1,
    cached: bool = False,
    fine_tune: bool = False,
    recipe: Recipe | None = None,
) -> Result:
    """Top-1 and top-5 for each cut, the mean over seeds and their deviation.

    A cut is a fraction or a count of the training pictures, drawn at random in the proportions of
    the classes, another for each seed; or a list file, for which only the layer's seed changes.
    """
    if seeds < 1:
        raise ValueError(f"semi: got {seeds} seeds, need 1 or more")
    recipe, train = recipe or Recipe(), subject.train
    cuts = [] if lists else [(f"{100 * f:g}%", _share(f, len(train.source))) for f in fractions]
    cuts += [(str(count), count) for count in counts]
    listed = {path.stem: _listed(path, train) for path in lists}
    figures, sizes, trials = dict[str, float](), dict[str, int](), dict[str, list[float]]()
    for title, size in [*cuts, *((name, len(chosen)) for name, chosen in listed.items())]:
        found = []
        for seed in range(subject.seed, subject.seed + seeds):
            drawn = listed.get(title)
            chosen = stratified(train.labels, size, seed=seed) if drawn is None else drawn
            part = train.take(train.source.take(chosen))
            if fine_tune:
                found.append(_fine_tune(subject, part, recipe, seed, f"semi {title}"))
            else:
                curves = fit_layers(
                    subject,
                    part,
                    subject.test,
                    recipe=recipe,
                    cached=cached,
                    seed=seed,
                    title=f"semi {title}, seed {seed}",
                )
                found.append(curves.last())
        for name, values in zip(("top-1", "top-5"), zip(*found, strict=True), strict=True):
            if name == "top-1" or subject.classes > 5:
                figures[f"{title} {name}"] = sum(values) / seeds
                trials[f"{title} {name}"] = list(values)
                if seeds > 1:
                    figures[f"{title} {name} deviation"] = float(torch.tensor(values).std())
        sizes[title] = size
    way = "fine-tuned" if fine_tune else "linear layer" + (" on cached features" if cached else "")
    drawn_by = [str(path) for path in lists] or "seeded, stratified, another for each seed"
    settings = {"way": way, "cuts": sizes, "drawn": drawn_by, "seeds": seeds, "by seed": trials}
    name = "semi-fine-tuned" if fine_tune else "semi-cached" if cached else "semi"
    return Result(name, figures, {**settings, **asdict(recipe)})


def _share(fraction: float, size: int) -> int:
    if not 0 < fraction <= 1:
        raise ValueError(f"--fractions: got {fraction:g}, need above 0 and at most 1")
    return round(fraction * size)


def _listed(path: Path, train: Part) -> torch.Tensor:
    """The training pictures that a list names, by their path in the source or their file's name."""
    try:
        wanted = path.read_text().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a readable list of file names ({error})") from None
    titles = [train.source.title(index) for index in range(len(train.source))]
    index = {Path(title).name: i for i, title in enumerate(titles)}
    index |= {title: i for i, title in enumerate(titles)}
    names = [name.strip() for name in wanted if name.strip()]
    unknown = [name for name in names if name not in index]
    if unknown or not names:
        raise ValueError(
            f"{path}: {len(unknown)} of its {len(names)} names are no training pictures of "
            f"{train.source.name}, the first is {next(iter(unknown), 'missing')}; need names as "
            f"{titles[0]}, one a line"
        )
    return torch.tensor(sorted({index[name] for name in names}))


def _fine_tune(
    subject: Subject, train: Part, recipe: Recipe, seed: int, title: str
) -> tuple[float, float]:
    """The whole network on the few labels, from a copy: the judged one is left as it is."""
    device, size = subject.device, subject.image_size
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(keyed.seed_of(seed, 0, keyed.INITIAL))
        layer = nn.Linear(train.features.shape[1], subject.classes)
    backbone = copy.deepcopy(subject.backbone)
    network = nn.Sequential(backbone, Standardise(train.features), layer).to(device).train()
    layout, views = memory_format(network), TwoViews(VIEWS, seed, size)
    network.to(memory_format=layout)
    optimizer = torch.optim.SGD(
        network.parameters(),
        lr=recipe.lr,
        momentum=recipe.momentum,
        weight_decay=recipe.weight_decay,
    )
    # Batch norm in training mode needs two pictures or more, so an epoch has whole batches only.
    batch_size = min(recipe.batch_size, len(train.source))
    stop = recipe.epochs * (len(train.source) // batch_size)
    bar = progress(title, stop)
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
        batch = batch.to(device)
        optimizer.param_groups[0]["lr"] = recipe.lr * recipe.factor(batch.epoch)
        view, _ = views.finish(batch.pictures, batch.epoch, batch.ids)
        with autocast(device, subject.precision):
            scores = network(view.contiguous(memory_format=layout))
        assert batch.labels is not None
        loss = F.cross_entropy(scores.float(), batch.labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        bar.update()
    bar.close()
    features = extract(
        backbone,
        subject.test.source,
        image_size=size,
        resize=subject.resize,
        device=device,
        precision=subject.precision,
        workers=subject.workers,
    )
    return accuracy(network[2], network[1], features, subject.test.labels)
