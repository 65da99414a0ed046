"""The settings of Mean Shift and of BYOL with an asymmetric loss."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from meanshift.config.methods.base import MethodSettings
from meanshift.config.parsing import need
from meanshift.config.views import Strength


@dataclass(frozen=True, kw_only=True)
class Asymmetric(MethodSettings):
    """What MSF and BYOL-asym share: an online encoder that predicts the output of a target."""

    target_view: Strength = "weak"
    """view that the target encoder sees"""
    online_view: Strength = "strong"
    """view that the online encoder sees"""
    same_view: bool = False
    """show both encoders the same view (T1=T2); collapses, for use as a positive control"""
    momentum: float = 0.99
    """momentum of the target encoder's moving average"""
    momentum_batch: int = 0
    """images per update that `momentum` is meant for: with n images it becomes
    momentum^(n/momentum_batch), the EMA scaling rule; 0: as it is"""
    momentum_schedule: Literal["constant", "cosine"] = "constant"
    """`cosine`: momentum rises to 1 at the end of training"""
    symmetric: bool = False
    """also swap the views' roles, at twice the cost"""
    whiten: bool = False
    """whiten the target embeddings, so that they lose less of their rank; ours, not the paper's"""
    variance: float = 0.0
    """weight of VICReg's variance term on the online embedding; ours, not the paper's"""
    covariance: float = 0.0
    """weight of VICReg's covariance term on the online embedding; ours, not the paper's"""

    def __post_init__(self) -> None:
        super().__post_init__()
        need(0 <= self.momentum <= 1, "method.momentum", self.momentum, "between 0 and 1")
        for name in ("momentum_batch", "variance", "covariance"):
            value = getattr(self, name)
            need(0 <= value < math.inf, f"method.{name}", value, "0 or more")

    @property
    def passes(self) -> tuple[float, float]:
        return (4.0, 2.0) if self.symmetric else (2.0, 1.0)

    def for_batch(self, batch_size: int) -> Asymmetric:
        """The settings with the momentum for so many images per update (0: unknown).

        EMA scaling rule, Busbridge et al. 2023, https://arxiv.org/abs/2307.13813
        """
        if not (self.momentum_batch and batch_size):
            return self
        return replace(self, momentum=self.momentum ** (batch_size / self.momentum_batch))


@dataclass(frozen=True, kw_only=True)
class MSF(Asymmetric):
    """Mean Shift for self-supervised learning, with the defaults of the paper.

    paper: Koohpayegani, Tejankar, Pirsiavash 2021, https://arxiv.org/abs/2105.07269
    cost: 2 forward passes and 1 backward pass per image (`symmetric`: 4 and 2); a bank search
    """

    loss: ClassVar[str] = (
        "distance of the prediction to the k nearest neighbors of the target in a memory bank"
    )
    needs: ClassVar[tuple[str, ...]] = ("momentum", "memory")
    resume_safe: ClassVar[frozenset[str]] = frozenset({"bank_layout"})
    name: Literal["msf"] = "msf"
    """name of the method"""
    k: int = 5
    """nearest neighbors that an embedding is pulled towards; the first is the target itself"""
    k_schedule: Literal["constant", "linear"] = "constant"
    """`linear`: k grows from `k_start` to `k`, each value for equally many epochs; in fewer epochs
    some values are left out, and the last epoch has `k`"""
    k_start: int = 1
    """first value of a growing k"""
    neighbor_weight: float = 0.0
    """weight of the k-1 neighbors together, the target itself has the rest; 0: all k count equally,
    as in the paper"""
    neighbor_fraction: float = 1.0
    """fraction of all neighbors in a batch that count, the most similar ones; the target itself
    replaces the others"""
    bank_size: int = 128_000
    """past target embeddings in the memory bank"""
    bank_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """data type of the memory bank"""
    bank_layout: Literal["replicated", "sharded"] = "replicated"
    """in several processes: the whole bank in each, or a part; the neighbors are the same"""
    same_image: Literal["keep", "skip"] = "keep"
    """whether an older view of the same image may be a neighbor"""
    search_filled_only: bool = False
    """search only rows that were written, not the random ones that the bank starts with"""

    def __post_init__(self) -> None:
        super().__post_init__()
        need(self.k >= 1, "method.k", self.k, "1 or more")
        need(1 <= self.k_start <= self.k, "method.k_start", self.k_start, f"1 to k ({self.k})")
        need(
            0 <= self.neighbor_weight <= 1,
            "method.neighbor_weight",
            self.neighbor_weight,
            "between 0 and 1",
        )
        need(
            0 < self.neighbor_fraction <= 1,
            "method.neighbor_fraction",
            self.neighbor_fraction,
            "above 0 and up to 1",
        )
        need(
            self.k == 1 or self.k <= self.bank_size,
            "method.k",
            self.k,
            f"at most the bank's {self.bank_size} rows (raise --method.bank_size)",
        )

    def check(self, *, batch_size: int) -> None:
        rows = batch_size * (2 if self.symmetric else 1)
        need(
            self.k == 1 or rows <= self.bank_size,
            "method.bank_size",
            self.bank_size,
            f"at least the {rows} rows that a step adds (lower --train.batch_size)",
        )


@dataclass(frozen=True, kw_only=True)
class BYOLAsym(Asymmetric):
    """BYOL with an asymmetric loss, which the MSF paper compares itself with: Mean Shift with k=1.

    paper: Grill et al. 2020, https://arxiv.org/abs/2006.07733; asymmetric in the MSF paper
    cost: 2 forward passes and 1 backward pass per image (`symmetric`: 4 and 2)
    """

    loss: ClassVar[str] = "distance of the prediction to the target of the other view"
    needs: ClassVar[tuple[str, ...]] = ("momentum",)
    k: ClassVar[int] = 1
    k_schedule: ClassVar[str] = "constant"
    bank_size: ClassVar[int] = 0
    name: Literal["byol-asym"] = "byol-asym"
    """name of the method"""
