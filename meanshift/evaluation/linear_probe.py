"""The paper's linear layer on frozen features: normalize, standardize, SGD in steps."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from meanshift.config import ViewSpec
from meanshift.data import Source
from meanshift.data.loader import batches, steps_per_epoch
from meanshift.evaluation.context import EvaluationContext, FeatureSet
from meanshift.models.encoder import memory_format
from meanshift.models.features import eval_mode
from meanshift.runtime import checkpoint, rng
from meanshift.runtime.device import autocast
from meanshift.runtime.progress import progress
from meanshift.transforms.augment import MultiViewTransform
from meanshift.transforms.eval import TRANSFORM_VERSION

VIEW = ViewSpec(name="train", stream=rng.ONLINE, crop_area=(0.08, 1.0))
"""What the layer is trained on: a crop of 8% to 100% of the area, and a flip."""


@dataclass(frozen=True, kw_only=True)
class ProbeSettings:
    """The paper's; the rate falls to a tenth after each of the milestones."""

    lr: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 1e-4
    batch_size: int = 256
    epochs: int = 40
    milestones: tuple[int, ...] = (15, 30)

    def __post_init__(self) -> None:
        if self.epochs < 1 or not self.lr > 0:
            raise ValueError(
                f"got --epochs {self.epochs} and --lr {self.lr:g}, need 1 or more and above 0"
            )

    @staticmethod
    def of(epochs: int, lr: float) -> ProbeSettings:
        """The paper's in more or fewer epochs: the rate falls after 3/8 and 3/4 of them."""
        milestones = tuple(max(1, round(share * epochs)) for share in (3 / 8, 3 / 4))
        return ProbeSettings(lr=lr, epochs=epochs, milestones=milestones)

    @property
    def tag(self) -> str:
        """What a result's name adds when this is not the paper's recipe."""
        epochs = "" if self.epochs == ProbeSettings.epochs else f"-{self.epochs}-epochs"
        return epochs + ("" if self.lr == ProbeSettings.lr else f"-lr-{self.lr:g}")

    def factor(self, epoch: int) -> float:
        """What the rate is multiplied with in an epoch, counted from 0."""
        return float(0.1 ** sum(epoch >= milestone for milestone in self.milestones))


class Standardize(nn.Module):
    """Unit length, then zero mean and unit variance in each dimension of the training features."""

    def __init__(self, features: Float[Tensor, "n features"], *, chunk: int = 16_384) -> None:
        super().__init__()
        total = torch.zeros(2, features.shape[1], dtype=torch.float64)
        for part in features.split(chunk):  # in parts: the features may be larger than memory
            unit = F.normalize(part, dim=1).double()
            total += torch.stack([unit.sum(0), unit.square().sum(0)])
        mean, square = total / len(features)
        variance = (square - mean.square()).clamp(min=0) * len(features) / max(1, len(features) - 1)
        self.register_buffer("mean", mean.float())
        self.register_buffer("scale", (variance + 1e-5).rsqrt().float())

    def forward(self, features: Float[Tensor, "n features"]) -> Float[Tensor, "n features"]:
        unit = F.normalize(features, dim=1)
        return (unit - self.get_buffer("mean")) * self.get_buffer("scale")


Stream = Iterator[tuple[int, Float[Tensor, "batch features"], Int[Tensor, " batch"]]]
"""Training batches in order, each with its epoch."""


def cached_stream(
    features: Float[Tensor, "n features"],
    labels: Int[Tensor, " n"],
    *,
    recipe: ProbeSettings,
    seed: int,
    device: torch.device,
) -> Stream:
    """The same features in every epoch, in a new order."""
    for epoch in range(recipe.epochs):
        for chosen in rng.permutation(seed, epoch, len(labels)).split(recipe.batch_size):
            yield epoch, features[chosen].to(device), labels[chosen].to(device)


def augmented_stream(
    backbone: nn.Module,
    source: Source,
    *,
    recipe: ProbeSettings,
    image_size: int,
    seed: int,
    device: torch.device,
    precision: torch.dtype,
    workers: int,
    start: int = 0,
) -> Stream:
    """Features of a new view of each image in every epoch, from epoch `start` on."""
    views, layout = MultiViewTransform((VIEW,), seed, image_size), memory_format(backbone)
    steps = steps_per_epoch(source, recipe.batch_size, partial=True)
    for batch in batches(
        source,
        views.crop,
        batch_size=recipe.batch_size,
        seed=seed,
        start=start * steps,
        stop=recipe.epochs * steps,
        partial=True,
        workers=workers,
        pin_memory=device.type == "cuda",
    ):
        batch = batch.to(device)
        (view,) = views.finish(batch.images, batch.epoch, batch.ids)
        view = view.contiguous(memory_format=layout)
        with eval_mode(backbone), torch.no_grad(), autocast(device, precision):
            features = backbone(view).float()
        assert batch.labels is not None
        yield batch.epoch, features, batch.labels


@dataclass(frozen=True)
class Curves:
    """Accuracy in percent after each epoch, for each learning rate that was tried."""

    top1: list[list[float]]
    top5: list[list[float]]

    def last(self, which: int = 0) -> tuple[float, float]:
        return self.top1[-1][which], self.top5[-1][which]

    def best(self, which: int = 0) -> tuple[int, float]:
        """The epoch (from 1) with the highest top-1, and that top-1."""
        column = [row[which] for row in self.top1]
        return column.index(max(column)) + 1, max(column)


def train_layers(
    stream: Stream,
    standardize: Standardize,
    test: Float[Tensor, "m features"],
    test_labels: Int[Tensor, " m"],
    *,
    classes: int,
    recipe: ProbeSettings,
    lrs: Sequence[float],
    seed: int,
    device: torch.device,
    steps: int,
    title: str = "linear",
    keep: Path | None = None,
) -> Curves:
    """One linear layer for each learning rate, all on the same stream, judged after every epoch.

    After each epoch the state goes to the file `keep`; where it is there already, training goes on
    from it, and the stream must begin at its epoch.
    """
    standardize = standardize.to(device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(rng.derive_seed(seed, 0, rng.INITIAL))
        first = nn.Linear(len(standardize.get_buffer("mean")), classes)
    heads = nn.ModuleList([nn.Linear(first.in_features, classes) for _ in lrs])
    for head in heads:
        head.load_state_dict(first.state_dict())
    heads.to(device)
    groups = [{"params": list(h.parameters()), "lr": lr} for h, lr in zip(heads, lrs, strict=True)]
    optimizer = torch.optim.SGD(
        groups, lr=recipe.lr, momentum=recipe.momentum, weight_decay=recipe.weight_decay
    )
    top1, top5, done, seen = list[list[float]](), list[list[float]](), 0, 0
    if keep is not None and keep.exists():
        state = checkpoint.read(keep)
        heads.load_state_dict(state["heads"])
        optimizer.load_state_dict(state["optimizer"])
        top1, top5, done = state["top1"], state["top5"], state["epoch"]
    bar = progress(title, recipe.epochs * steps)
    bar.update(done * steps)

    def end_epoch(done: int) -> None:
        one, five = zip(*(accuracy(h, standardize, test, test_labels) for h in heads), strict=True)
        top1.append(list(one))
        top5.append(list(five))
        bar.set_postfix({"epoch": done, "top-1": f"{max(one):.2f}"}, refresh=False)
        if keep is not None:
            told = {"epoch": done, "top1": top1, "top5": top5, "format": checkpoint.FORMAT}
            states = {"heads": heads.state_dict(), "optimizer": optimizer.state_dict()}
            checkpoint.write(keep, {**told, **states})

    with bar:
        for epoch, features, labels in stream:
            for group, lr in zip(optimizer.param_groups, lrs, strict=True):
                group["lr"] = lr * recipe.factor(epoch)
            inputs = standardize(features)
            optimizer.zero_grad(set_to_none=True)
            loss = sum((F.cross_entropy(head(inputs), labels) for head in heads), torch.tensor(0.0))
            loss.backward()
            optimizer.step()
            bar.update()
            seen += 1
            if seen == steps:
                end_epoch(epoch + 1)
                seen = 0
    return Curves(top1, top5)


def fit_layers(
    subject: EvaluationContext,
    train: FeatureSet,
    test: FeatureSet,
    *,
    recipe: ProbeSettings,
    cached: bool,
    lrs: Sequence[float] = (),
    seed: int | None = None,
    title: str = "linear",
) -> Curves:
    """Train on one part and judge on the other; a long one continues where it was stopped."""
    lrs, seed, path, start = lrs or [recipe.lr], subject.seed if seed is None else seed, None, 0
    options: dict[str, Any] = {"recipe": recipe, "seed": seed, "device": subject.device}
    if cached:
        stream = cached_stream(train.features, train.labels, **options)
    else:
        told = [subject.fingerprint, train.source.contents(), test.source.contents()]
        prepared = [TRANSFORM_VERSION, subject.image_size, subject.resize, subject.precision]
        key = repr([*told, *prepared, recipe, seed, list(lrs)])
        name = f"layers-{hashlib.sha256(key.encode()).hexdigest()[:16]}.pt"
        path, start = _kept(subject.home / "features" / name)
        stream = augmented_stream(
            subject.backbone,
            train.source,
            image_size=subject.image_size,
            precision=subject.precision,
            workers=subject.workers,
            start=start,
            **options,
        )
    curves = train_layers(
        stream,
        Standardize(train.features),
        test.features,
        test.labels,
        classes=subject.classes,
        lrs=lrs,
        steps=-(-len(train.source) // recipe.batch_size),
        title=title,
        keep=path,
        **options,
    )
    if path is not None:
        path.unlink(missing_ok=True)
    return curves


def _kept(path: Path) -> tuple[Path, int]:
    """The file of a training that was stopped, and how many epochs it had done."""
    try:
        return path, checkpoint.read(path)["epoch"] if path.exists() else 0
    except ValueError:  # damaged: begin again
        path.unlink()
        return path, 0


@torch.no_grad()
def accuracy(
    head: nn.Module,
    standardize: nn.Module,
    features: Float[Tensor, "n features"],
    labels: Int[Tensor, " n"],
    *,
    chunk: int = 8192,
) -> tuple[float, float]:
    """Top-1 and top-5 in percent."""
    device, first, five = next(head.parameters()).device, 0, 0
    with eval_mode(head):
        for part, truth in zip(features.split(chunk), labels.split(chunk), strict=True):
            scores = head(standardize(part.to(device)))
            ranked = scores.topk(min(5, scores.shape[1])).indices.cpu() == truth[:, None]
            first, five = first + int(ranked[:, 0].sum()), five + int(ranked.any(1).sum())
    return 100 * first / len(labels), 100 * five / len(labels)
