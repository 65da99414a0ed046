"""The settings of the contrastive methods, and of those that compare with a queue: MoCo, CO2, ISD,
SimCLR."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from meanshift.config.methods.base import MethodSettings
from meanshift.config.parsing import need
from meanshift.config.views import Strength


@dataclass(frozen=True, kw_only=True)
class MomentumQueue(MethodSettings):
    """What MoCo, CO2 and ISD share: a momentum target, and a queue of its past embeddings."""

    same_view: ClassVar[bool] = False
    momentum_schedule: ClassVar[str] = "constant"

    target_view: Strength = "strong"
    """view that the target encoder sees"""
    online_view: Strength = "strong"
    """view that the online encoder sees"""
    momentum: float = 0.999
    """momentum of the target encoder's moving average"""
    bank_size: int = 65_536
    """past target embeddings in the queue"""
    temperature: float = 0.2
    """temperature of the softmax over similarities"""

    def __post_init__(self) -> None:
        super().__post_init__()
        need(0 <= self.momentum <= 1, "method.momentum", self.momentum, "between 0 and 1")
        need(self.bank_size >= 1, "method.bank_size", self.bank_size, "1 or more")
        _need_temperature(self, "temperature")

    def check(self, *, batch_size: int) -> None:
        need(
            batch_size <= self.bank_size,
            "method.bank_size",
            self.bank_size,
            f"at least the {batch_size} rows that a step adds (lower --train.batch_size)",
        )


@dataclass(frozen=True, kw_only=True)
class MomentumContrast(MomentumQueue):
    """What MoCo and CO2 share: the head and the recipe."""

    defaults: ClassVar[Mapping[str, Any]] = {"optim.lr": 0.03}
    small_defaults: ClassVar[Mapping[str, Any]] = {
        "method.temperature": 0.1,
        "method.momentum": 0.99,
        "method.bank_size": 4096,
        "method.layers": 1,
        "views.crop_area": (0.08, 1.0),
        "views.blur": 0.0,
        "optim.weight_decay": 5e-4,
    }

    @classmethod
    def defaults_for(cls, image_size: int) -> Mapping[str, Any]:
        """CIFAR has the eight groups of batch norm that the official notebook simulates."""
        groups = {"encoder.batch_groups": 8, "train.batch_norm": "shuffle"}
        return {**super().defaults_for(image_size), **(groups if image_size <= 32 else {})}

    dim: int = 128
    """size of the embedding"""
    hidden: int = 0
    """size of the head's hidden layer; 0 is that of the backbone's features"""
    layers: int = 2
    """layers of the head; 1 is the linear head of MoCo v1"""
    symmetric: bool = False
    """also swap the views' roles and add the loss, at twice the cost"""

    def __post_init__(self) -> None:
        super().__post_init__()
        _need_head(self, self.layers)

    @property
    def passes(self) -> tuple[float, float]:
        return (4.0, 2.0) if self.symmetric else (2.0, 1.0)

    def check(self, *, batch_size: int) -> None:
        super().check(batch_size=batch_size * (2 if self.symmetric else 1))


@dataclass(frozen=True, kw_only=True)
class MoCo(MomentumContrast):
    """Momentum Contrast v2: cross entropy of the other view's key among a queue of negatives.

    The learning rate is for a batch of 256. The small-scale settings are those of the authors'
    CIFAR-10 demo; images of at most 32 pixels also have its 8 groups of batch norm, over which the
    keys are shuffled.

    paper: Chen, Fan, Girshick, He 2020, https://arxiv.org/abs/2003.04297
    cost: 2 forward passes and 1 backward pass per image (`symmetric`: 4 and 2)
    """

    loss: ClassVar[str] = "cross entropy of the other view among a queue of negatives"
    needs: ClassVar[tuple[str, ...]] = ("momentum", "negatives", "memory")
    name: Literal["moco"] = "moco"
    """name of the method"""


@dataclass(frozen=True, kw_only=True)
class CO2(MomentumContrast):
    """Consistent Contrast: MoCo v2, and both views equally similar to each negative.

    `alpha` 10 and `consistency_temperature` 0.04 could not be verified for MoCo v2. Everything else
    is MoCo's.

    paper: Wei, Wang, Shen, Yuille 2020, https://arxiv.org/abs/2010.02217
    cost: 2 forward passes and 1 backward pass per image (`symmetric`: 4 and 2)
    """

    loss: ClassVar[str] = "as moco, and equal similarities of both views to the negatives"
    needs: ClassVar[tuple[str, ...]] = ("momentum", "negatives", "memory")
    name: Literal["co2"] = "co2"
    """name of the method"""
    alpha: float = 10.0
    """weight of the consistency term"""
    consistency_temperature: float = 0.04
    """temperature of the consistency term"""

    def __post_init__(self) -> None:
        super().__post_init__()
        need(0 <= self.alpha < math.inf, "method.alpha", self.alpha, "0 or more")
        _need_temperature(self, "consistency_temperature")


@dataclass(frozen=True, kw_only=True)
class ISD(MomentumQueue):
    """Iterative Similarity Distillation: learn the target's similarities to a queue.

    Encoders, views and optimizer are those of Mean Shift. Nothing was published for small images:
    their settings follow the recipe cifar10-r18 of Mean Shift.

    paper: Tejankar et al. 2021, https://arxiv.org/abs/2012.09259
    cost: 2 forward passes and 1 backward pass per image
    """

    loss: ClassVar[str] = (
        "divergence of the similarities to a queue between online and target encoder"
    )
    needs: ClassVar[tuple[str, ...]] = ("momentum", "memory")
    small_defaults: ClassVar[Mapping[str, Any]] = {
        "method.bank_size": 16_384,
        "views.blur": 0.0,
        "optim.lr": 0.06,
        "optim.schedule": "step",
        "optim.warmup_epochs": 5,
        "optim.weight_decay": 5e-4,
    }
    name: Literal["isd"] = "isd"
    """name of the method"""
    target_view: Strength = "weak"
    momentum: float = 0.99
    bank_size: int = 128_000
    temperature: float = 0.1
    """temperature of the online encoder's softmax over the queue"""
    target_temperature: float = 0.01
    """temperature of the target encoder's softmax over the queue"""

    def __post_init__(self) -> None:
        super().__post_init__()
        _need_temperature(self, "target_temperature")


@dataclass(frozen=True, kw_only=True)
class SimCLR(MethodSettings):
    """SimCLR: cross entropy of the other view among all views of the batch; no target encoder.

    The learning rate is for a batch of 256, in proportion to it; the paper's batch has 4,096
    images, and smaller ones have fewer negatives (`optim.accumulate` adds none). Batch norm is over
    all processes.

    paper: Chen, Kornblith, Norouzi, Hinton 2020, https://arxiv.org/abs/2002.05709
    cost: 2 forward passes and 2 backward passes per image
    """

    loss: ClassVar[str] = "cross entropy of the other view among all views of the batch"
    needs: ClassVar[tuple[str, ...]] = ("negatives",)
    defaults: ClassVar[Mapping[str, Any]] = {
        "views.crop_area": (0.08, 1.0),
        "views.jitter_strength": (0.8, 0.8, 0.8, 0.2),
        "optim.name": "lars",
        "optim.lr": 0.3,
        "optim.schedule": "step",
        "optim.warmup_epochs": 10,
        "optim.weight_decay": 1e-6,
        "train.batch_norm": "sync",
    }
    small_defaults: ClassVar[Mapping[str, Any]] = {
        "method.temperature": 0.5,
        "views.jitter_strength": (0.4, 0.4, 0.4, 0.1),
        "views.blur": 0.0,
        "optim.lr": 1.0,
    }
    name: Literal["simclr"] = "simclr"
    """name of the method"""
    dim: int = 128
    """size of the embedding"""
    hidden: int = 0
    """size of the head's hidden layers; 0 is that of the backbone's features"""
    layers: int = 3
    """layers of the head: 3 in the official code (version 2), 2 in the paper"""
    temperature: float = 0.1
    """temperature of the softmax over similarities"""

    def __post_init__(self) -> None:
        super().__post_init__()
        _need_head(self, self.layers)
        _need_temperature(self, "temperature")

    @property
    def passes(self) -> tuple[float, float]:
        return 2.0, 2.0


def _need_temperature(settings: MethodSettings, name: str) -> None:
    value = getattr(settings, name)
    need(0 < value < math.inf, f"method.{name}", value, "above 0, usually 0.01 to 1")


def _need_head(settings: MethodSettings, layers: int) -> None:
    need(settings.dim >= 1, "method.dim", settings.dim, "1 or more (128 in the paper)")
    need(layers >= 1, "method.layers", layers, "1 or more")
