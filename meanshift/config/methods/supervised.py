"""The settings of the supervised baseline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from meanshift.config.methods.base import MethodSettings
from meanshift.config.views import Strength


@dataclass(frozen=True, kw_only=True)
class Supervised(MethodSettings):
    """Cross entropy with labels, the baseline of the MSF paper's tables; needs labeled images.

    The learning rate is torchvision's for a batch of 256.

    paper: He et al. 2015, https://arxiv.org/abs/1512.03385; torchvision references/classification
    cost: 1 forward pass and 1 backward pass per image; labels
    """

    loss: ClassVar[str] = "cross entropy with labels"
    needs: ClassVar[tuple[str, ...]] = ("labels",)
    defaults: ClassVar[Mapping[str, Any]] = {"optim.lr": 0.1}
    small_defaults: ClassVar[Mapping[str, Any]] = {"optim.weight_decay": 5e-4, "views.blur": 0.0}
    name: Literal["supervised"] = "supervised"
    """name of the method"""
    online_view: Strength = "strong"
    """view that the network sees: `strong` as the other methods have it, `weak` (crop and flip) as
    in torchvision's recipe"""

    @property
    def passes(self) -> tuple[float, float]:
        return 1.0, 1.0
