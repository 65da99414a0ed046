"""The settings of CompRess."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from meanshift.config.methods.base import MethodSettings
from meanshift.config.parsing import need


@dataclass(frozen=True, kw_only=True)
class CompRess(MethodSettings):
    """CompRess: a student learns the similarities between images that a frozen teacher finds.

    The learning rate is the authors' for a batch of 256.

    paper: Abbasi Koohpayegani, Tejankar, Pirsiavash 2020, https://arxiv.org/abs/2010.14713
    cost: 3 forward passes (one of them the teacher's, not with `cached_teacher`) and 1 backward
    pass per image; two queues
    """

    loss: ClassVar[str] = "divergence of the similarities to a queue from the teacher's"
    needs: ClassVar[tuple[str, ...]] = ("teacher", "momentum", "memory")
    defaults: ClassVar[Mapping[str, Any]] = {"optim.lr": 0.01, "views.crop_area": (0.08, 1.0)}
    resume_safe: ClassVar[frozenset[str]] = frozenset({"teacher"})  # has a fingerprint
    name: Literal["compress"] = "compress"
    """name of the method"""
    teacher: str = ""
    """weights of the teacher, as `meanshift evaluate` takes them: a run, a file,
    torchvision:NAME:WEIGHTS, timm:NAME or meanshift:NAME; needed again when the run is continued"""
    cached_teacher: bool = False
    """the teacher sees each image once, in its evaluation view, instead of the student's view in
    each epoch; its features are in the memory of each process, 4 bytes x images x features, and
    are computed again when the run is continued"""
    dim: int = 0
    """size of the student's embedding; 0 is the number of the teacher's features"""
    bank_size: int = 128_000
    """past embeddings in each of the two queues"""
    temperature: float = 0.04
    """temperature of both similarities"""
    momentum: float = 0.999
    """momentum of the student's moving average, which fills the student's queue"""

    def __post_init__(self) -> None:
        super().__post_init__()
        need(0 <= self.momentum <= 1, "method.momentum", self.momentum, "between 0 and 1")
        need(self.bank_size >= 1, "method.bank_size", self.bank_size, "1 or more")
        need(0 < self.temperature < math.inf, "method.temperature", self.temperature, "above 0")

    def check(self, *, batch_size: int) -> None:
        need(
            batch_size <= self.bank_size,
            "method.bank_size",
            self.bank_size,
            f"at least the {batch_size} rows that a step adds (lower --train.batch_size)",
        )

    def cached_samples(self, samples: int) -> int:
        """The rows of the teacher's cache for so many images; 0 without a cache."""
        need(
            samples > 0 or not self.cached_teacher,
            "method.cached_teacher",
            self.cached_teacher,
            "the number of images, since it has a row for each (--method.cached_teacher false)",
        )
        return samples if self.cached_teacher else 0

    @property
    def passes(self) -> tuple[float, float]:
        return 2.0 if self.cached_teacher else 3.0, 1.0
