"""The settings of methods that compare two views without negatives: BYOL, SimSiam, VICReg, CMSF."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from meanshift.config.methods.base import MethodSettings
from meanshift.config.parsing import need
from meanshift.config.views import Strength

_BYOL_RECIPE: Mapping[str, Any] = {
    "views.crop_area": (0.08, 1.0),
    "views.jitter_strength": (0.4, 0.4, 0.2, 0.1),
    "views.blur": 1.0,
    "views.solarize": 0.2,
    "optim.name": "lars",
    "optim.lr": 0.3,
    "optim.schedule": "step",
    "optim.warmup_epochs": 10,
    "optim.weight_decay": 1e-6,
    "train.batch_norm": "sync",
}
"""views and optimizer of BYOL, which VICReg takes over"""


@dataclass(frozen=True, kw_only=True)
class BYOL(MethodSettings):
    """Two views that predict each other's target embeddings; with the paper's defaults.

    The optimizer is that of the authors' preset for 300 epochs, which is the nearest to the 200 of
    the recipes; `optim.lr` is for a batch of 256 (in proportion to it). The preset for 100 epochs
    has `optim.lr` 0.45, the one for 1000 has 0.2, `method.momentum` 0.996 and `optim.weight_decay`
    1.5e-6.

    paper: Grill et al. 2020, https://arxiv.org/abs/2006.07733
    cost: 4 forward passes and 2 backward passes per image
    """

    loss: ClassVar[str] = "distance of the prediction to the target of the other view, both ways"
    needs: ClassVar[tuple[str, ...]] = ("momentum",)
    defaults: ClassVar[Mapping[str, Any]] = _BYOL_RECIPE
    # Lightly's CIFAR-10 benchmark: SGD with lr 0.12 and weight decay 5e-4 for a loss of a quarter
    # of the size. With lr / 4 and weight decay * 4 its updates are the same.
    small_defaults: ClassVar[Mapping[str, Any]] = {
        "method.hidden": 1024,
        "method.momentum_schedule": "constant",
        "views.jitter_strength": (0.4, 0.4, 0.4, 0.1),
        "views.blur": 0.0,
        "views.solarize": 0.0,
        "optim.name": "sgd",
        "optim.lr": 0.03,
        "optim.warmup_epochs": 0,
        "optim.weight_decay": 2e-3,
    }
    name: Literal["byol"] = "byol"
    """name of the method"""
    dim: int = 256
    """size of the embedding"""
    hidden: int = 4096
    """size of the hidden layer of projector and predictor"""
    momentum: float = 0.99
    """momentum of the target encoder's moving average at the start"""
    momentum_schedule: Literal["constant", "cosine"] = "cosine"
    """`cosine`: momentum rises to 1 at the end of training"""
    asymmetric_views: bool = True
    """`views.blur` is for the first view, the second has a tenth of it; `views.solarize` is for the
    second view only. False: both views have both"""

    def __post_init__(self) -> None:
        _need_sizes(self, "dim", "hidden")
        need(0 <= self.momentum <= 1, "method.momentum", self.momentum, "between 0 and 1")

    @property
    def passes(self) -> tuple[float, float]:
        return 4.0, 2.0


@dataclass(frozen=True, kw_only=True)
class SimSiam(MethodSettings):
    """Two views that predict each other's embeddings, without a target; with the paper's defaults.

    `optim.lr` is for a batch of 256 (in proportion to it).

    paper: Chen and He 2020, https://arxiv.org/abs/2011.10566
    cost: 2 forward passes and 2 backward passes per image
    """

    loss: ClassVar[str] = "cosine of the prediction and the other view without gradient, both ways"
    needs: ClassVar[tuple[str, ...]] = ()
    defaults: ClassVar[Mapping[str, Any]] = {"train.batch_norm": "sync"}
    small_defaults: ClassVar[Mapping[str, Any]] = {
        "method.projector_layers": 2,
        "views.blur": 0.0,
        "optim.lr": 0.03,
        "optim.weight_decay": 5e-4,
    }
    name: Literal["simsiam"] = "simsiam"
    """name of the method"""
    dim: int = 2048
    """size of the embedding"""
    hidden: int = 2048
    """size of the projector's hidden layers"""
    projector_layers: int = 3
    """linear layers of the projector"""
    predictor_hidden: int = 512
    """size of the predictor's hidden layer"""
    constant_predictor_lr: bool = True
    """keep the predictor's learning rate at `optim.lr`, without the schedule"""

    def __post_init__(self) -> None:
        _need_sizes(self, "dim", "hidden", "projector_layers", "predictor_hidden")

    @property
    def passes(self) -> tuple[float, float]:
        return 2.0, 2.0


@dataclass(frozen=True, kw_only=True)
class VICReg(MethodSettings):
    """Alike embeddings of two views whose dimensions vary and are not correlated.

    `optim.lr` is for a batch of 256 (in proportion to it), as the authors give it for 100 epochs;
    for 1000 epochs it is 0.2. The variances and covariances are those of one batch:
    `optim.accumulate` adds nothing to them. For small images the optimizer, AdamW, is ours.

    paper: Bardes, Ponce, LeCun 2021, https://arxiv.org/abs/2105.04906
    cost: 2 forward passes and 2 backward passes per image; a covariance of `dim` x `dim`
    """

    loss: ClassVar[str] = "distance of two views, variance of each value, covariance of all pairs"
    needs: ClassVar[tuple[str, ...]] = ()
    defaults: ClassVar[Mapping[str, Any]] = _BYOL_RECIPE
    # Heads and views of solo-learn's CIFAR recipe. Its LARS has a trust coefficient 20 times ours.
    small_defaults: ClassVar[Mapping[str, Any]] = {
        "method.dim": 2048,
        "method.hidden": 2048,
        "method.asymmetric_views": False,
        "views.crop_area": (0.2, 1.0),
        "views.blur": 0.0,
        "views.solarize": 0.1,
        "optim.name": "adamw",
        "optim.lr": 1e-3,
        "optim.weight_decay": 1e-4,
    }
    name: Literal["vicreg"] = "vicreg"
    """name of the method"""
    dim: int = 8192
    """size of the embedding"""
    hidden: int = 8192
    """size of the projector's two hidden layers"""
    invariance: float = 25.0
    """weight of the mean squared difference of the two embeddings"""
    variance: float = 25.0
    """weight of the term that keeps the std of each dimension above 1"""
    covariance: float = 1.0
    """weight of the squared covariances of different dimensions"""
    asymmetric_views: bool = True
    """`views.blur` is for the first view, the second has a tenth of it; `views.solarize` is for the
    second view only. False: both views have both"""

    def __post_init__(self) -> None:
        _need_sizes(self, "dim", "hidden")
        for name in ("invariance", "variance", "covariance"):
            value = getattr(self, name)
            need(0 <= value < math.inf, f"method.{name}", value, "0 or more")

    @property
    def passes(self) -> tuple[float, float]:
        return 2.0, 2.0


@dataclass(frozen=True, kw_only=True)
class CMSF(MethodSettings):
    """Mean Shift, half of it towards neighbors that were neighbors an epoch ago.

    Views and optimizer are those of MSF.

    paper: Navaneet et al. 2022, https://arxiv.org/abs/2112.04607
    cost: 2 forward passes and 1 backward pass per image; two bank searches; a row for each image
    """

    loss: ClassVar[str] = "as msf, also to neighbors that were near an epoch ago"
    needs: ClassVar[tuple[str, ...]] = ("momentum", "memory")
    resume_safe: ClassVar[frozenset[str]] = frozenset({"bank_layout"})
    same_view: ClassVar[bool] = False
    k_schedule: ClassVar[str] = "constant"
    # No small-scale recipe was published: these are what the recipe cifar10-r18 has for MSF,
    # except `same_image`, which this method does not have.
    small_defaults: ClassVar[Mapping[str, Any]] = {
        "method.bank_size": 16_384,
        "method.search_filled_only": True,
        "views.blur": 0.0,
        "optim.lr": 0.06,
        "optim.schedule": "step",
        "optim.warmup_epochs": 5,
        "optim.weight_decay": 5e-4,
    }
    name: Literal["cmsf"] = "cmsf"
    """name of the method"""
    target_view: Strength = "weak"
    """view that the target encoder sees"""
    online_view: Strength = "strong"
    """view that the online encoder sees"""
    momentum: float = 0.99
    """momentum of the target encoder's moving average"""
    momentum_schedule: Literal["constant", "cosine"] = "constant"
    """`cosine`: momentum rises to 1 at the end of training"""
    k: int = 5
    """nearest neighbors that an embedding is pulled towards; the first is the target itself"""
    candidates: int = 5
    """nearest neighbors an epoch ago, of which the k nearest now are taken (k' in the paper)"""
    bank_size: int = 128_000
    """past target embeddings in the memory bank, and in that of their previous embeddings"""
    bank_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """data type of the memory banks"""
    bank_layout: Literal["replicated", "sharded"] = "replicated"
    """in several processes: the whole banks in each, or a part; the neighbors are the same"""
    search_filled_only: bool = False
    """search only rows that were written, not the random ones that the banks start with"""

    def __post_init__(self) -> None:
        super().__post_init__()
        need(0 <= self.momentum <= 1, "method.momentum", self.momentum, "between 0 and 1")
        need(self.k >= 2, "method.k", self.k, "2 or more (--method.name byol-asym is k=1)")
        need(
            self.candidates >= self.k,
            "method.candidates",
            self.candidates,
            f"at least k ({self.k}), of which they are taken",
        )
        need(
            self.candidates <= self.bank_size,
            "method.candidates",
            self.candidates,
            f"at most the bank's {self.bank_size} rows (raise --method.bank_size)",
        )

    def check(self, *, batch_size: int) -> None:
        need(
            batch_size <= self.bank_size,
            "method.bank_size",
            self.bank_size,
            f"at least the {batch_size} rows that a step adds (lower --train.batch_size)",
        )


def _need_sizes(settings: MethodSettings, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        need(value >= 1, f"method.{name}", value, "1 or more")
