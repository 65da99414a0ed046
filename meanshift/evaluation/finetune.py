"""Fine-tuning: a copy of the whole network and a linear layer are trained on few or all labels.

As in SimCLR, BYOL and SwAV: SGD with momentum and without weight decay, on crops and flips. What
differs from them, because of small data, is in docs/evaluation.md.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from meanshift.data import stratified_split
from meanshift.data.loader import batches
from meanshift.evaluation import linear_probe
from meanshift.evaluation.context import EvaluationContext, FeatureSet
from meanshift.evaluation.result import Result, percent
from meanshift.evaluation.semi import evaluate_subsets
from meanshift.models.encoder import memory_format
from meanshift.models.features import extract_features
from meanshift.runtime import rng
from meanshift.runtime.device import autocast
from meanshift.runtime.progress import progress
from meanshift.transforms.views import view_transform

FRACTIONS = (0.01, 0.1, 1.0)
"""of the labels, where no subsets are chosen"""

VIEW = replace(linear_probe.VIEW, crop_area=(0.3, 1.0))
"""the view that a network is trained on: a crop of 30% to 100% of the area, and a flip"""

EPOCHS = 30
"""where they are not set; but not less than `MIN_STEPS`, and not more than `MAX_STEPS`"""
MIN_STEPS = 200
MAX_STEPS = 2000

CHOICE = 0.2
"""fraction of the labeled images that the learning rate is chosen on"""


@dataclass(frozen=True, kw_only=True)
class FinetuneSettings:
    """Settings for small data; the learning rates fall to zero by half a cosine."""

    lr: float = 0.003
    """of the linear layer"""
    backbone_lrs: tuple[float, ...] = (0.001, 0.01, 0.1)
    """of the backbone: of several, the best on a fifth of the labeled images"""
    momentum: float = 0.9
    weight_decay: float = 0.0
    batch_size: int = 64
    epochs: int | None = None
    """None: 30, within bounds on the steps"""

    def __post_init__(self) -> None:
        if not min(self.lr, *self.backbone_lrs) > 0:
            lrs = " ".join(f"{lr:g}" for lr in self.backbone_lrs)
            raise ValueError(f"got --lr {self.lr:g} and --backbone-lr {lrs}, need above 0")
        if (self.epochs is not None and self.epochs < 1) or self.batch_size < 2:
            raise ValueError(
                f"got --epochs {self.epochs} and --batch-size {self.batch_size}, need 1 "
                f"or more and 2 or more"
            )

    def steps(self, images: int) -> int:
        """The steps of a training on so many images, in whole batches."""
        per_epoch = images // min(self.batch_size, images)
        if self.epochs is not None:
            return self.epochs * per_epoch
        return max(MIN_STEPS, min(EPOCHS * per_epoch, MAX_STEPS))

    @property
    def options(self) -> dict[str, Any]:
        """The settings that differ from the default, for the name of a result."""
        usual = asdict(FinetuneSettings())
        changed = {name: value for name, value in asdict(self).items() if value != usual[name]}
        return changed | {
            name: list(lrs) for name, lrs in changed.items() if isinstance(lrs, tuple)
        }


def evaluate(
    context: EvaluationContext,
    *,
    fractions: Sequence[float] = (),
    counts: Sequence[int] = (),
    lists: Sequence[Path] = (),
    seeds: int = 1,
    settings: FinetuneSettings | None = None,
) -> Result:
    """Top-1 and top-5 of the fine-tuned network for each subset; by default of 1%, 10% and 100%."""
    tuning = settings or FinetuneSettings()
    choices: dict[str, Any] = {}

    def fit(subset: FeatureSet, seed: int, title: str) -> tuple[float, float]:
        lr, choices[title] = _choose_lr(context, subset, tuning, seed, title)
        return _finetune(context, subset, context.test, tuning, lr, seed, f"finetune {title}")

    result = evaluate_subsets(
        context,
        "finetune",
        fit,
        {"training": "backbone and linear layer", **asdict(tuning), "chosen lrs": choices},
        usual=FRACTIONS,
        fractions=fractions,
        counts=counts,
        lists=lists,
        seeds=seeds,
    )
    return replace(result, options=result.options | tuning.options)


def _choose_lr(
    context: EvaluationContext,
    labeled: FeatureSet,
    settings: FinetuneSettings,
    seed: int,
    title: str,
) -> tuple[float, dict[str, Any]]:
    """The learning rate of the backbone that is best on a fifth of the labeled images.

    Of equally good ones the lowest is taken; where the images cannot be split, the lowest of all,
    which changes the backbone least. Also returns how it was chosen.
    """
    lrs = sorted(settings.backbone_lrs)
    reason = "one was given" if len(lrs) == 1 else ""
    if CHOICE * len(labeled.source) < len(labeled.labels.unique()):
        reason = reason or "too few labels"
    try:
        parts = () if reason else stratified_split(labeled.source, CHOICE, seed=seed)
    except ValueError as error:  # groups that must stay whole
        reason = str(error)
    if reason:
        return lrs[0], {"backbone": lrs[0], "chosen on": f"nothing: {reason}"}
    rest, validation = (labeled.take(part) for part in parts)
    top1 = {}
    for lr in lrs:
        name = f"finetune {title}, try {lr:g}"
        top1[lr], _ = _finetune(context, rest, validation, settings, lr, seed, name)
    best = max(lrs, key=lambda lr: top1[lr])
    entry = {
        "backbone": best,
        "chosen on": f"{len(validation.source)} of the labeled images",
        "top-1 there": {f"{lr:g}": value for lr, value in top1.items()},
    }
    return best, entry


def _finetune(
    context: EvaluationContext,
    train: FeatureSet,
    test: FeatureSet,
    settings: FinetuneSettings,
    backbone_lr: float,
    seed: int,
    title: str,
) -> tuple[float, float]:
    """Train a copy of the backbone with a linear layer; its top-1 and top-5 on other images."""
    # Zeros, because the gradients of a random layer would first spoil the backbone.
    layer = nn.utils.skip_init(nn.Linear, train.features.shape[1], context.classes)
    for parameter in layer.to(context.device).parameters():
        nn.init.zeros_(parameter)
    backbone = copy.deepcopy(context.backbone)
    standardize = linear_probe.Standardize(train.features).to(context.device)
    optimizer = torch.optim.SGD(
        [
            {"params": list(backbone.parameters()), "lr": backbone_lr},
            {"params": list(layer.parameters()), "lr": settings.lr},
        ],
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
        nesterov=True,
    )
    network = nn.Sequential(backbone, standardize, layer)
    _train(network, optimizer, context, train, settings, seed, title)
    features = extract_features(
        backbone,
        test.source,
        image_size=context.image_size,
        resize=context.resize,
        device=context.device,
        precision=context.precision,
        workers=context.workers,
    )
    top1, top5 = linear_probe.correct(layer, standardize, features, test.labels).unbind(1)
    return percent(top1), percent(top5)


def _train(
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
    context: EvaluationContext,
    train: FeatureSet,
    settings: FinetuneSettings,
    seed: int,
    title: str,
) -> None:
    """Train a network on augmented views of labeled images."""
    device = context.device
    layout = memory_format(network)
    network.to(memory_format=layout).train()
    # Batch norm in training mode needs two images or more, so an epoch has whole batches only.
    batch_size = min(settings.batch_size, len(train.source))
    if batch_size < 2:
        raise ValueError(f"{title}: got 1 labeled image, need 2 or more")
    transform = view_transform((VIEW,), train.source, seed=seed, size=context.image_size)
    steps = settings.steps(len(train.source))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generators = [device] if device.type == "cuda" else []
    with progress(title, steps) as bar, torch.random.fork_rng(devices=generators):
        for batch in batches(
            train.source,
            transform.crop,
            batch_size=batch_size,
            seed=seed,
            start=0,
            stop=steps,
            workers=context.workers,
            pin_memory=device.type == "cuda",
        ):
            torch.manual_seed(rng.derive_seed(seed, batch.step, rng.NETWORK))  # dropout
            batch = batch.to(device)
            (view,) = transform.finish(batch.images, batch.epoch, batch.ids)
            with autocast(device, context.precision):
                scores = network(view.contiguous(memory_format=layout))
            assert batch.labels is not None
            loss = F.cross_entropy(scores.float(), batch.labels)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            scheduler.step()
            bar.update()
