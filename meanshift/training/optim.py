"""Parameter groups, the optimizer, and every schedule as a function of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from meanshift import config


def build_optimizer(settings: config.Train, model: nn.Module) -> torch.optim.SGD:
    """SGD over everything that learns; as in the authors' program weight decay spares nothing."""
    learning = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(
        learning, settings.lr, momentum=settings.sgd_momentum, weight_decay=settings.weight_decay
    )


@dataclass(frozen=True)
class Schedule:
    """What changes during a run, by step; `steps` is the number of steps in an epoch."""

    config: config.Config
    steps: int

    @property
    def total(self) -> int:
        return self.config.train.epochs * self.steps

    def lr(self, step: int) -> float:
        """Cosine from lr to 0, lr/2 (1 + cos(pi e/E)) with e from 0, by epoch or by step."""
        train, by_step = self.config.train, self.config.train.lr_schedule == "step"
        unit = 1 if by_step else self.steps  # the rate changes once a step or once an epoch
        now, total = step // unit, self.total // unit
        warm = min(train.warmup_epochs, train.epochs - 1) * (self.steps if by_step else 1)
        if now < warm:
            return train.lr * (now + 1) / (warm + 1)
        return train.lr / 2 * (1 + math.cos(math.pi * (now - warm) / (total - warm)))

    def k(self, step: int) -> int:
        """Neighbors: constant, or from `k_start` to `k` in equal stretches of epochs."""
        method = self.config.method
        if method.k_schedule == "constant":
            return method.k
        values = method.k - method.k_start + 1
        return method.k_start + values * (step // self.steps) // self.config.train.epochs

    def momentum(self, step: int) -> float:
        """Share of itself that the target keeps: constant, or along a cosine to 1 (BYOL's)."""
        method = self.config.method
        if method.momentum_schedule == "constant":
            return method.momentum
        rest = (1 + math.cos(math.pi * step / self.total)) / 2
        return 1 - (1 - method.momentum) * rest
