"""The optimizer by its name, and the learning rate schedule as a function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from meanshift.config import Config, Optim
from meanshift.methods import Method, Progress
from meanshift.training.lars import LARS
from meanshift.training.muon import Muon


def build_optimizer(settings: Optim, method: Method) -> torch.optim.Optimizer:
    """The optimizer of the settings over the method's parameter groups.

    Groups with a `lr_scale` and `scheduled` of their own: see `Method.parameter_groups`.
    """
    groups = [{"lr_scale": 1.0, "scheduled": True, **group} for group in method.parameter_groups()]
    lr = settings.lr
    momentum = settings.momentum
    decay = settings.weight_decay
    if settings.name == "lars":
        groups = _split(groups, _is_vector, {"adapt": False, "weight_decay": 0.0})
        return LARS(groups, lr, momentum=momentum, weight_decay=decay)
    if not settings.decay_norms:
        groups = _split(groups, _is_vector, {"weight_decay": 0.0})
    if settings.name == "muon":
        groups = _split(groups, _is_matrix, {"matrices": True})
        if not any(group.get("matrices") for group in groups):
            raise ValueError(
                "optim.name: got muon, but the method trains no matrix and no convolution, which "
                "Muon is for; need --optim.name adamw"
            )
        return Muon(groups, lr, momentum=momentum, weight_decay=decay)
    if settings.name == "adamw":  # fused: half the time of the default on a CPU
        betas = (momentum, 0.999)
        return torch.optim.AdamW(groups, lr, betas=betas, weight_decay=decay, fused=True)
    return torch.optim.SGD(groups, lr, momentum=momentum, weight_decay=decay)


def _is_vector(parameter: nn.Parameter) -> bool:
    """Whether it is the weight or bias of a norm, or the bias of a layer."""
    return parameter.ndim <= 1


def _is_matrix(parameter: nn.Parameter) -> bool:
    """Whether it is the weight of a linear layer or a convolution, not a bias or a class token."""
    return parameter.ndim >= 2 and len(parameter) > 1


def _split(
    groups: list[dict[str, Any]],
    chosen: Callable[[nn.Parameter], bool],
    options: dict[str, Any],
) -> list[dict[str, Any]]:
    """Make groups of their own, with other options, of the parameters that are chosen."""
    parts = []
    for group in groups:
        parts.append({**group, "params": [p for p in group["params"] if not chosen(p)]})
        parts.append({**group, **options, "params": [p for p in group["params"] if chosen(p)]})
    return [part for part in parts if part["params"]]


def trained_second(settings: Optim, method: Method) -> list[nn.Parameter]:
    """The parameters of the backbone, if only the heads are trained first."""
    if not settings.heads_first:
        return []
    trained = [p for p in method.parameters() if p.requires_grad]
    backbone = getattr(method.online, "backbone", None)
    found = [] if backbone is None else [p for p in backbone.parameters() if p.requires_grad]
    if backbone is None or len(found) == len(trained):
        lacks = "no online.backbone" if backbone is None else "no trained heads beside its backbone"
        raise ValueError(
            f"optim.heads_first: got {settings.heads_first:g}, but the method has {lacks}; "
            f"need --optim.heads_first 0"
        )
    return found


@dataclass(frozen=True)
class Schedule:
    """What depends on the step: the learning rate, and when something happens."""

    config: Config
    steps_per_epoch: int

    @property
    def total(self) -> int:
        """Steps of the whole run."""
        return self.config.train.epochs * self.steps_per_epoch

    def progress(self, step: int) -> Progress:
        return Progress(step, self.steps_per_epoch, self.config.train.epochs)

    @cached_property
    def heads_steps(self) -> int:
        """Steps in which only the heads are trained: whole updates (see `optim.accumulate`)."""
        optim = self.config.optim
        epoch, batch = divmod(round(optim.heads_first * self.total), self.steps_per_epoch)
        whole = -(-batch // optim.accumulate) * optim.accumulate
        return epoch * self.steps_per_epoch + min(whole, self.steps_per_epoch)

    def lr(self, step: int) -> float:
        """Cosine from lr to 0, lr/2 (1 + cos(pi e/E)) with e from 0, by epoch or by step.

        It starts after the steps that train the heads alone, whose learning rate is constant.
        """
        optim = self.config.optim
        if step < self.heads_steps:
            return optim.lr
        steps_per_change = 1 if optim.schedule == "step" else self.steps_per_epoch
        changes_per_epoch = self.steps_per_epoch // steps_per_change
        now = (step - self.heads_steps) // steps_per_change
        total = -(-(self.total - self.heads_steps) // steps_per_change)
        longest = max(0, total - changes_per_epoch)  # the last epoch has no warm-up
        warmup = min(round(optim.warmup_epochs * changes_per_epoch), longest)
        if now < warmup:
            return optim.lr * (now + 1) / (warmup + 1)
        return optim.lr / 2 * (1 + math.cos(math.pi * (now - warmup) / (total - warmup)))

    def set_lr(self, optimizer: torch.optim.Optimizer, step: int) -> float:
        """Set the learning rate of every parameter group, and return the scheduled one."""
        lr = self.lr(step)
        for group in optimizer.param_groups:
            base = lr if group["scheduled"] else self.config.optim.lr
            group["lr"] = base * group["lr_scale"]
        return lr

    def updates_after(self, step: int) -> bool:
        """Whether the weights are updated after this step (see `optim.accumulate`)."""
        batch = step % self.steps_per_epoch + 1
        return batch % self.config.optim.accumulate == 0 or self.ends_epoch(step)

    def update_size(self, step: int) -> int:
        """Batches whose gradients are averaged in the update that this step is part of."""
        accumulate = self.config.optim.accumulate
        first = step % self.steps_per_epoch // accumulate * accumulate
        return min(accumulate, self.steps_per_epoch - first)

    def begins_epoch(self, step: int) -> bool:
        return step % self.steps_per_epoch == 0

    def ends_epoch(self, step: int) -> bool:
        return (step + 1) % self.steps_per_epoch == 0

    def is_due(self, epoch: int, every: int) -> bool:
        """Whether what happens every so many epochs, and at the end, happens after this one."""
        return epoch == self.config.train.epochs or bool(every and epoch % every == 0)

    def save_due(self, steps: int) -> bool:
        """Whether the last of so many steps passed a multiple of `train.save_every` epochs."""
        every = self.config.train.save_every * self.steps_per_epoch
        return math.floor(steps / every + 1e-9) > math.floor((steps - 1) / every + 1e-9)
