"""The settings of InvP and PIRL, which remember one embedding per sample."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from meanshift.config.methods.base import MethodSettings
from meanshift.config.parsing import need


@dataclass(frozen=True, kw_only=True)
class SampleMemoryMethod(MethodSettings):
    """What InvP and PIRL share."""

    start_defaults: ClassVar[Mapping[str, Any]] = {"method.fill_memory": True}
    dim: int = 128
    """size of the embedding"""
    temperature: float = 0.07
    """temperature of the similarities"""
    memory_momentum: float = 0.5
    """weight of a sample's old row when its new embedding is written"""
    fill_memory: bool = False
    """start the memory with the embeddings of one pass over the data, instead of random rows, which
    the first epoch would learn; chosen for encoders that do not start from random weights"""

    def __post_init__(self) -> None:
        super().__post_init__()
        need(self.dim >= 1, "method.dim", self.dim, "1 or more")
        need(0 < self.temperature < math.inf, "method.temperature", self.temperature, "above 0")
        need(
            0 <= self.memory_momentum < 1,
            "method.memory_momentum",
            self.memory_momentum,
            "0 up to below 1",
        )


@dataclass(frozen=True, kw_only=True)
class InvP(SampleMemoryMethod):
    """InvP: an image is pulled towards the hardest of the samples that a walk over neighbors finds.

    The authors train with a learning rate of 0.03 at a batch of 128; this is that of 256.
    For small images their CIFAR program: a linear head, 20 positives, no blur and no flip.

    paper: Wang, Liu, Guo, Sun 2020, https://arxiv.org/abs/2010.11694
    cost: 1 forward pass and 1 backward pass per image; similarities of each image to all samples
    (batch x samples x 4 bytes); one row and the neighbors' ids per sample
    """

    loss: ClassVar[str] = (
        "instance discrimination, and likeness to the least similar of its neighbors' neighbors"
    )
    needs: ClassVar[tuple[str, ...]] = ("negatives", "memory")
    defaults: ClassVar[Mapping[str, Any]] = {"optim.lr": 0.06}
    small_defaults: ClassVar[Mapping[str, Any]] = {
        "method.head": "linear",
        "method.temperature": 0.07,
        "method.positives": 20,
        "optim.weight_decay": 5e-4,
        "views.jitter": 1.0,
        "views.jitter_strength": (0.4, 0.4, 0.4, 0.4),
        "views.blur": 0.0,
        "views.flip": 0.0,
    }
    name: Literal["invp"] = "invp"
    """name of the method"""
    head: Literal["mlp", "linear"] = "mlp"
    """projector: linear, ReLU, linear; or one linear layer"""
    hidden: int = 2048
    """size of the projector's hidden layer; 0 is the number of the backbone's features"""
    temperature: float = 0.2
    """temperature of the similarities"""
    background: int = 4096
    """most similar samples that an image is contrasted with (at most all)"""
    k: int = 4
    """nearest neighbors that are kept of each sample"""
    layers: int = 3
    """how often the walk goes on from a sample to its neighbors"""
    positives: int = 50
    """positives of an image: the least similar of the samples that the walk reaches"""
    invariance: float = 0.6
    """weight of the loss of the positives"""
    warmup_epochs: int = 30
    """epochs without that loss, but at most a quarter of the run"""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("background", "k", "layers", "positives"):
            need(getattr(self, name) >= 1, f"method.{name}", getattr(self, name), "1 or more")
        need(
            self.background > self.k,
            "method.background",
            self.background,
            f"more than the {self.k} neighbors of a sample (method.k)",
        )
        for name in ("invariance", "warmup_epochs"):
            value = getattr(self, name)
            need(0 <= value < math.inf, f"method.{name}", value, "0 or more")

    @property
    def passes(self) -> tuple[float, float]:
        return 1.0, 1.0


@dataclass(frozen=True, kw_only=True)
class PIRL(SampleMemoryMethod):
    """PIRL: an image and its shuffled jigsaw patches are both like the image's remembered row.

    The learning rate is VISSL's for a batch of 256. There is no official recipe for small images.

    paper: Misra, van der Maaten 2019, https://arxiv.org/abs/1912.01991
    cost: 2 forward passes (one of 9 small patches) and 2 backward passes per image; one row per
    sample
    """

    loss: ClassVar[str] = (
        "noise contrast of the image and of its shuffled patches with its past embedding"
    )
    needs: ClassVar[tuple[str, ...]] = ("negatives", "memory")
    defaults: ClassVar[Mapping[str, Any]] = {
        "optim.lr": 0.03,
        "optim.decay_norms": False,
        "views.crop_area": (0.08, 1.0),
        "views.jitter": 1.0,
        "views.jitter_strength": (0.4, 0.4, 0.4, 0.2),
        "views.blur": 0.0,
    }
    name: Literal["pirl"] = "pirl"
    """name of the method"""
    negatives: int = 32_000
    """remembered rows that a step is contrasted with, drawn at random (at most one per sample)"""
    patch_weight: float = 0.5
    """weight of the loss of the patches; that of the image has the rest"""
    patch_area: tuple[float, float] = (0.6, 1.0)
    """smallest and largest fraction of the image's area that the patches are cut from"""

    def __post_init__(self) -> None:
        super().__post_init__()
        need(self.negatives >= 1, "method.negatives", self.negatives, "1 or more")
        need(
            0 <= self.patch_weight <= 1,
            "method.patch_weight",
            self.patch_weight,
            "between 0 and 1",
        )
        low, high = self.patch_area
        need(0 < low <= high <= 1, "method.patch_area", self.patch_area, "0 < low <= high <= 1")

    @property
    def passes(self) -> tuple[float, float]:
        return 1.73, 1.73
