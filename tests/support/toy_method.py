"""A small method that uses every part of the contract, and tiny runs to train it in.

It has no batch norm, so that a step is the mean over its images. It is chosen by `--method.module
tests.support.toy_method:Toy`, as a method outside of the program is.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from meanshift.config import Config, MethodSettings, Views, ViewSpec
from meanshift.methods import Batch, BuildContext, Method, Progress, StepOutput
from meanshift.methods.memory_bank import MemoryBank
from meanshift.runtime import distributed

MODULE = "tests.support.toy_method:Toy"
DIM = 4


class ToyEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, 8))
        self.projector = nn.Linear(8, DIM)

    def forward(self, view: Tensor) -> Tensor:
        embeddings: Tensor = self.projector(self.backbone(view).tanh())
        return embeddings


class Toy(Method):
    """Predicts a frozen teacher's embedding, one of two memory banks, and an assignment."""

    @dataclass(frozen=True, kw_only=True)
    class Settings(MethodSettings):
        name: str = "toy"
        """name of the method"""
        kill_at: int = -1
        """step in which the process kills itself, before its forward pass"""
        sharded: bool = False
        """keep the first memory bank in parts"""
        own_banks: bool = False
        """fill the banks with rows that differ between processes"""

    def __init__(self, settings: Settings, context: BuildContext) -> None:
        super().__init__()
        self.settings = settings
        self.online = ToyEncoder()
        self.teacher = nn.Linear(12, DIM).requires_grad_(False)
        self.first_bank = MemoryBank(12, DIM, seed=1, sharded=settings.sharded)
        self.second_bank = MemoryBank(9, DIM, seed=2)
        self.register_buffer("assignments", torch.zeros(context.dataset_size, DIM))
        self.calls: list[tuple[str, int]] = []

    @classmethod
    def views(cls, settings: Any, operators: Views) -> tuple[ViewSpec, ...]:
        return (
            operators.spec("first", "strong", index=1),
            operators.spec("second", "weak", index=0),
        )

    @classmethod
    def build(cls, settings: Any, context: BuildContext) -> Toy:
        return cls(settings, context)

    def forward(
        self, first: Tensor, second: Tensor, *, ids: Tensor, labels: Tensor | None = None
    ) -> StepOutput:
        v = self.online(first)
        u = self.teacher(nn.functional.adaptive_avg_pool2d(second, 2).flatten(1))
        if self.training:
            self.first_bank.enqueue(u, ids=ids)
            if self.settings.own_banks:  # not through `enqueue`, which would exchange them
                self.second_bank.rows += 1 + distributed.rank()
            else:
                self.second_bank.enqueue(2 * u, ids=ids)
        target = u + self.assignments[ids]
        loss = (v - target).square().sum(1).mean()
        return StepOutput(loss, u, {"distance": (loss.detach(), len(ids))})

    def parameter_groups(self) -> list[dict[str, Any]]:
        return [
            {"params": list(self.online.backbone.parameters())},
            {
                "params": list(self.online.projector.parameters()),
                "lr_scale": 2.0,
                "scheduled": False,
                "weight_decay": 0.0,
            },
        ]

    def set_progress(self, now: Progress) -> dict[str, float | int]:
        self.calls.append(("set_progress", now.step))
        return {"progress": now.fraction}

    def begin_epoch(self, now: Progress, batches: Callable[[], Iterator[Batch]]) -> None:
        self.calls.append(("begin_epoch", now.step))
        self.assignments.zero_()
        for batch in batches():
            (view,) = batch.views
            assert batch.labels is not None
            self.assignments[batch.ids] = view.mean((1, 2, 3))[:, None] + now.epoch
        self.assignments.copy_(distributed.all_sum(self.assignments))

    def before_forward(self, now: Progress) -> None:
        self.calls.append(("before_forward", now.step))
        if now.step == self.settings.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def before_update(self, now: Progress) -> None:
        self.calls.append(("before_update", now.step))

    def after_update(self, now: Progress | None = None) -> None:
        assert now is not None
        self.calls.append(("after_update", now.step))

    def not_saved(self) -> tuple[str, ...]:
        return ("teacher.",)


def make_arrays(folder: Path, count: int = 40) -> Path:
    """Labeled images of 8x8 pixels, and 8 of them to validate on."""
    noise = np.random.default_rng(0)
    images = noise.integers(0, 256, (count, 8, 8, 3), dtype=np.uint8)
    labels = np.arange(count) % 4
    path = folder / "images.npz"
    np.savez(path, x_train=images, y_train=labels, x_test=images[:8], y_test=labels[:8])
    return path


def toy_settings(source: Path, **changed: object) -> dict[str, object]:
    """Overrides for 3 epochs of 10 steps; `group__name=value` changes one."""
    settings: dict[str, object] = {
        "method.module": MODULE,
        "data.source": str(source),
        "data.image_size": 8,
        "optim.lr": 0.05,
        "train.epochs": 3,
        "train.batch_size": 4,
        "train.log_every": 1,
        "train.save_every": 0.3,
        "train.snapshots": 2,
        "train.snapshot_images": 10,
        "train.device": "cpu",
        "train.precision": "float32",
    }
    return settings | {name.replace("__", "."): value for name, value in changed.items()}


def toy_config(source: Path, **changed: object) -> Config:
    return Config().with_overrides(toy_settings(source, **changed))
