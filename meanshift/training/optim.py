"""The optimizer and the learning rate schedule as a function of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from meanshift.config import Config, Optim
from meanshift.methods import Method, Progress


def build_optimizer(settings: Optim, method: Method) -> torch.optim.Optimizer:
    """SGD over the method's parameter groups; as the authors do, everything is decayed."""
    groups = [{"lr_scale": 1.0, "scheduled": True, **group} for group in method.parameter_groups()]
    return torch.optim.SGD(
        groups, settings.lr, momentum=settings.momentum, weight_decay=settings.weight_decay
    )


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

    def lr(self, step: int) -> float:
        """Cosine from lr to 0, lr/2 (1 + cos(pi e/E)) with e from 0, by epoch or by step."""
        optim = self.config.optim
        by_step = optim.schedule == "step"
        steps_per_change = 1 if by_step else self.steps_per_epoch
        now = step // steps_per_change
        total = self.total // steps_per_change
        warmup_epochs = min(optim.warmup_epochs, self.config.train.epochs - 1)
        warmup = warmup_epochs * (self.steps_per_epoch if by_step else 1)
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
