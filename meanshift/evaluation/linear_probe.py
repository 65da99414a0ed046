"""Linear probe: one linear layer on frozen features, with the paper's settings.

Features are normalized and standardized, and the layer is trained by SGD with a learning rate that
falls in steps; on augmented views, or on features that were extracted once.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from meanshift.config import ViewSpec
from meanshift.data import Source, stratified_split
from meanshift.data.loader import batches, steps_per_epoch
from meanshift.evaluation.context import EvaluationContext, FeatureSet
from meanshift.evaluation.result import Result, percent
from meanshift.models.encoder import memory_format
from meanshift.models.features import eval_mode
from meanshift.runtime import checkpoint, rng
from meanshift.runtime.device import autocast
from meanshift.runtime.progress import progress
from meanshift.transforms.eval import TRANSFORM_VERSION
from meanshift.transforms.views import view_transform

VIEW = ViewSpec(name="train", stream=rng.ONLINE, crop_area=(0.08, 1.0))
"""the view that a layer is trained on: a crop of 8% to 100% of the area, and a flip"""

SWEEP = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
"""learning rates that a sweep tries"""

Stream = Iterator[tuple[int, Float[Tensor, "batch features"], Int[Tensor, " batch"]]]
"""training batches in order: (epoch, features, labels)"""


@dataclass(frozen=True, kw_only=True)
class ProbeSettings:
    """The paper's settings; the learning rate falls to a tenth after each milestone."""

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
    def scaled(epochs: int, lr: float) -> ProbeSettings:
        """The paper's schedule in other epochs: the learning rate falls after 3/8 and 3/4."""
        milestones = tuple(max(1, round(fraction * epochs)) for fraction in (3 / 8, 3 / 4))
        return ProbeSettings(lr=lr, epochs=epochs, milestones=milestones)

    @property
    def tag(self) -> str:
        """The end of a result's name; empty for the paper's settings."""
        epochs = "" if self.epochs == ProbeSettings.epochs else f"-{self.epochs}-epochs"
        lr = "" if self.lr == ProbeSettings.lr else f"-lr-{self.lr:g}"
        return epochs + lr

    def lr_factor(self, epoch: int) -> float:
        """The factor of the learning rate in an epoch, counted from 0."""
        return float(0.1 ** sum(epoch >= milestone for milestone in self.milestones))


def evaluate(
    context: EvaluationContext,
    *,
    settings: ProbeSettings | None = None,
    cached: bool = False,
    sweep: Sequence[float] = (),
) -> Result:
    """Top-1 and top-5 of a linear layer after the last epoch, and the best epoch named as such.

    `cached` trains on features of images without augmentation, extracted once. `sweep` chooses the
    learning rate on a tenth of the training images, never on the test images.
    """
    settings = settings or ProbeSettings()
    test = context.test  # first: without labels this is an error
    train = context.train
    name = "linear-cached" if cached else "linear"
    options = {}
    if sweep:
        name += "-swept"
        settings = replace(settings, lr=ProbeSettings.lr)  # the sweep chooses another one
        options = {} if tuple(sweep) == SWEEP else {"sweep": list(sweep)}
    name += settings.tag
    details: dict[str, Any] = {
        "views": "none: features extracted once" if cached else "crop 0.08-1, flip"
    }
    if sweep:
        settings, details["sweep"] = _choose_lr(context, train, settings, cached, sweep)
    curves = fit_layers(context, train, test, settings=settings, cached=cached)
    top1, top5 = curves.last()
    best_epoch, best_top1 = curves.best()
    metrics = {"top-1": top1}
    if context.classes > 5:
        metrics["top-5"] = top5
    metrics["best top-1, chosen on test"] = best_top1
    details |= asdict(settings)
    details["best epoch"] = best_epoch
    details["top-1 by epoch"] = [by_lr[0] for by_lr in curves.top1]
    arrays = {"correct top-1": curves.correct[0].numpy()} if curves.correct else {}
    return Result(name, metrics, details, arrays, options=options)


def _choose_lr(
    context: EvaluationContext,
    train: FeatureSet,
    settings: ProbeSettings,
    cached: bool,
    sweep: Sequence[float],
) -> tuple[ProbeSettings, dict[str, Any]]:
    """Settings with the learning rate that is best on a tenth of the training images; the sweep."""
    subsets = stratified_split(train.source, 0.1, seed=context.seed)
    rest, validation = (train.take(subset) for subset in subsets)
    curves = fit_layers(context, rest, validation, settings=settings, cached=cached, lrs=sweep)
    accuracies = [curves.last(which)[0] for which in range(len(sweep))]
    best = accuracies.index(max(accuracies))
    entry = {
        "chosen on": f"{len(validation.source)} training images",
        "top-1 there": {f"{lr:g}": top1 for lr, top1 in zip(sweep, accuracies, strict=True)},
    }
    return replace(settings, lr=sweep[best]), entry


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


def cached_stream(
    features: Float[Tensor, "n features"],
    labels: Int[Tensor, " n"],
    *,
    settings: ProbeSettings,
    seed: int,
    device: torch.device,
) -> Stream:
    """The same features in every epoch, in a new order."""
    for epoch in range(settings.epochs):
        for chosen in rng.permutation(seed, epoch, len(labels)).split(settings.batch_size):
            yield epoch, features[chosen].to(device), labels[chosen].to(device)


def augmented_stream(
    backbone: nn.Module,
    source: Source,
    *,
    settings: ProbeSettings,
    image_size: int,
    seed: int,
    device: torch.device,
    precision: torch.dtype,
    workers: int,
    start_epoch: int = 0,
) -> Stream:
    """Features of a new view of each image in every epoch."""
    transform = view_transform((VIEW,), source, seed=seed, size=image_size)
    layout = memory_format(backbone)
    steps = steps_per_epoch(source, settings.batch_size, partial=True)
    for batch in batches(
        source,
        transform.crop,
        batch_size=settings.batch_size,
        seed=seed,
        start=start_epoch * steps,
        stop=settings.epochs * steps,
        partial=True,
        workers=workers,
        pin_memory=device.type == "cuda",
    ):
        batch = batch.to(device)
        (view,) = transform.finish(batch.images, batch.epoch, batch.ids)
        view = view.contiguous(memory_format=layout)
        with eval_mode(backbone), torch.no_grad(), autocast(device, precision):
            features = backbone(view).float()
        assert batch.labels is not None
        yield batch.epoch, features, batch.labels


@dataclass(frozen=True)
class Curves:
    """Accuracy in percent after each epoch, for each learning rate."""

    top1: list[list[float]] = field(default_factory=list)
    top5: list[list[float]] = field(default_factory=list)
    correct: list[Tensor] = field(default_factory=list)
    """which test images are classified correctly after the last epoch, for each learning rate"""

    def last(self, which: int = 0) -> tuple[float, float]:
        """Top-1 and top-5 after the last epoch."""
        return self.top1[-1][which], self.top5[-1][which]

    def best(self, which: int = 0) -> tuple[int, float]:
        """The epoch (from 1) with the highest top-1, and that top-1."""
        top1 = [by_lr[which] for by_lr in self.top1]
        return top1.index(max(top1)) + 1, max(top1)


class _Layers:
    """One linear layer for each learning rate, with the same initial weights and batches."""

    def __init__(
        self,
        standardize: Standardize,
        *,
        classes: int,
        settings: ProbeSettings,
        lrs: Sequence[float],
        seed: int,
        device: torch.device,
    ) -> None:
        self.standardize = standardize.to(device)
        self.settings = settings
        self.lrs = lrs
        self.curves = Curves()
        features = len(standardize.get_buffer("mean"))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(rng.derive_seed(seed, 0, rng.INITIAL))
            initial = nn.Linear(features, classes)
        self.heads = nn.ModuleList([nn.Linear(features, classes) for _ in lrs])
        for head in self.heads:
            head.load_state_dict(initial.state_dict())
        self.heads.to(device)
        self.optimizer = torch.optim.SGD(
            [{"params": list(head.parameters())} for head in self.heads],
            lr=settings.lr,
            momentum=settings.momentum,
            weight_decay=settings.weight_decay,
        )

    def step(self, epoch: int, features: Tensor, labels: Tensor) -> None:
        """Update all layers by one batch."""
        for group, lr in zip(self.optimizer.param_groups, self.lrs, strict=True):
            group["lr"] = lr * self.settings.lr_factor(epoch)
        inputs = self.standardize(features)
        self.optimizer.zero_grad(set_to_none=True)
        losses = (F.cross_entropy(head(inputs), labels) for head in self.heads)
        sum(losses, torch.tensor(0.0)).backward()
        self.optimizer.step()

    def measure(self, features: Tensor, labels: Tensor) -> float:
        """Add the accuracies of all layers to the curves; return the highest top-1."""
        tested = [correct(head, self.standardize, features, labels) for head in self.heads]
        self.curves.top1.append([percent(rows[:, 0]) for rows in tested])
        self.curves.top5.append([percent(rows[:, 1]) for rows in tested])
        self.curves.correct[:] = [rows[:, 0] for rows in tested]
        return max(self.curves.top1[-1])

    def save(self, path: Path, epoch: int) -> None:
        """Write the state after so many epochs."""
        state = {
            "format": checkpoint.FORMAT,
            "epoch": epoch,
            "heads": self.heads.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            **asdict(self.curves),
        }
        path.parent.mkdir(parents=True, exist_ok=True)  # pixels in memory have no features there
        checkpoint.write(path, state)

    def load(self, path: Path) -> int:
        """Restore a saved state; return its number of epochs."""
        state = checkpoint.read(path)
        self.heads.load_state_dict(state["heads"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.curves = Curves(state["top1"], state["top5"], state["correct"])
        epoch: int = state["epoch"]
        return epoch


def train_layers(
    stream: Stream,
    standardize: Standardize,
    test: Float[Tensor, "m features"],
    test_labels: Int[Tensor, " m"],
    *,
    classes: int,
    settings: ProbeSettings,
    lrs: Sequence[float],
    seed: int,
    device: torch.device,
    steps: int,
    title: str = "linear",
    state_file: Path | None = None,
) -> Curves:
    """Train one linear layer for each learning rate on one stream; test them after every epoch.

    An epoch has so many `steps`. The state goes to `state_file` after each epoch; where that file
    exists, training continues from it, and the stream must begin with the epoch that follows.
    """
    layers = _Layers(
        standardize, classes=classes, settings=settings, lrs=lrs, seed=seed, device=device
    )
    epochs_done = 0
    if state_file is not None and state_file.exists():
        epochs_done = layers.load(state_file)
    steps_done = 0
    with progress(title, settings.epochs * steps, start=epochs_done * steps) as bar:
        for epoch, features, labels in stream:
            layers.step(epoch, features, labels)
            bar.update()
            steps_done += 1
            if steps_done % steps == 0:
                top1 = layers.measure(test, test_labels)
                bar.set_postfix({"epoch": epoch + 1, "top-1": f"{top1:.2f}"}, refresh=False)
                if state_file is not None:
                    layers.save(state_file, epoch + 1)
    return layers.curves


def fit_layers(
    context: EvaluationContext,
    train: FeatureSet,
    test: FeatureSet,
    *,
    settings: ProbeSettings,
    cached: bool,
    lrs: Sequence[float] = (),
    seed: int | None = None,
    title: str = "linear",
) -> Curves:
    """Train on one feature set and test on the other.

    Training on views takes long: after a kill it continues with the epoch that was not finished.
    """
    lrs = lrs or [settings.lr]
    seed = context.seed if seed is None else seed
    state_file = None
    if cached:
        stream = cached_stream(
            train.features, train.labels, settings=settings, seed=seed, device=context.device
        )
    else:
        state_file = _state_file(context, train, test, settings, lrs, seed)
        stream = augmented_stream(
            context.backbone,
            train.source,
            settings=settings,
            image_size=context.image_size,
            seed=seed,
            device=context.device,
            precision=context.precision,
            workers=context.workers,
            start_epoch=_epochs_done(state_file),
        )
    curves = train_layers(
        stream,
        Standardize(train.features),
        test.features,
        test.labels,
        classes=context.classes,
        settings=settings,
        lrs=lrs,
        seed=seed,
        device=context.device,
        steps=-(-len(train.source) // settings.batch_size),
        title=title,
        state_file=state_file,
    )
    if state_file is not None:
        state_file.unlink(missing_ok=True)
    return curves


def _state_file(
    context: EvaluationContext,
    train: FeatureSet,
    test: FeatureSet,
    settings: ProbeSettings,
    lrs: Sequence[float],
    seed: int,
) -> Path:
    """The file of an unfinished training; another for other weights, images or settings."""
    key = [
        context.fingerprint,
        train.source.content_fingerprint(),
        test.source.content_fingerprint(),
        TRANSFORM_VERSION,
        context.image_size,
        context.resize,
        context.precision,
        settings,
        list(lrs),
        seed,
    ]
    digest = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
    return context.output_dir / "features" / f"layers-{digest}.pt"


def _epochs_done(state_file: Path) -> int:
    """The finished epochs of an unfinished training; a damaged file is named and deleted."""
    if not state_file.exists():
        return 0
    try:
        epoch: int = checkpoint.read(state_file)["epoch"]
    except ValueError as error:
        warnings.warn(f"{error}; the layers are trained from the start", stacklevel=2)
        state_file.unlink()
        return 0
    return epoch


@torch.no_grad()
def correct(
    head: nn.Module,
    standardize: nn.Module,
    features: Float[Tensor, "n features"],
    labels: Int[Tensor, " n"],
    *,
    chunk: int = 8192,
) -> Bool[Tensor, "n 2"]:
    """Whether the class of each row is the first, and whether it is one of the first five."""
    device = next(head.parameters()).device
    parts = []
    with eval_mode(head):
        for part, truth in zip(features.split(chunk), labels.split(chunk), strict=True):
            scores = head(standardize(part.to(device)))
            hits = scores.topk(min(5, scores.shape[1])).indices.cpu() == truth[:, None]
            parts.append(torch.stack([hits[:, 0], hits.any(1)], 1))
    return torch.cat(parts)
