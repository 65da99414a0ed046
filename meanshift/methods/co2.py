"""CO2, Consistent Contrast (Wei, Wang, Shen, Yuille 2020): MoCo with a consistency term.

Not all negatives are equally wrong. The similarities of the query q to the negatives, as a
distribution Q, must agree with those of its key k, the distribution P.

Paper: https://arxiv.org/abs/2010.02217. No official code was found; this follows the formulas of
the paper: MoCo's loss + alpha (KL(P || Q) + KL(Q || P)) / 2, with P and Q over the negatives only
and no gradient through the key. Not verified: `alpha` and `consistency_temperature` with MoCo v2's
head and temperature, which the row of the Mean Shift paper's table has.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from jaxtyping import Float
from torch import Tensor, nn

from meanshift.methods.base import StepOutput
from meanshift.methods.moco import MoCo, similarities


class CO2(MoCo):
    """MoCo whose queries are also as similar to each negative as their keys are.

    >>> method = CO2(encoder, dim=128, alpha=10.0, consistency_temperature=0.04)

    Other arguments, inputs and outputs are those of `MoCo`.
    """

    own_settings: ClassVar[tuple[str, ...]] = (
        *MoCo.own_settings,
        "alpha",
        "consistency_temperature",
    )

    def __init__(
        self,
        encoder: nn.Module,
        dim: int = 128,
        *,
        alpha: float = 10.0,
        consistency_temperature: float = 0.04,
        **moco: Any,
    ) -> None:
        super().__init__(encoder, dim, **moco)
        self.alpha = alpha
        self.consistency_temperature = consistency_temperature

    def compare(
        self,
        q: Float[Tensor, "batch dim"],
        k: Float[Tensor, "batch dim"],
        queue: Float[Tensor, "slots dim"],
    ) -> StepOutput:
        """MoCo's cross entropy, and the consistency of q and k."""
        contrast = super().compare(q, k, queue)
        consistency = self.alpha * self.consistency(q, k, queue)
        metrics = {**contrast.metrics, "consistency": (consistency.detach(), len(q))}
        return replace(contrast, loss=contrast.loss + consistency, metrics=metrics)

    def consistency(
        self,
        q: Float[Tensor, "batch dim"],
        k: Float[Tensor, "batch dim"],
        queue: Float[Tensor, "slots dim"],
    ) -> Float[Tensor, ""]:
        """(KL(P || Q) + KL(Q || P)) / 2, which is the sum of (P - Q) (log P - log Q) / 2."""
        log_q = (similarities(q, queue) / self.consistency_temperature).log_softmax(1)
        log_p = (similarities(k, queue) / self.consistency_temperature).log_softmax(1)
        return ((log_p.exp() - log_q.exp()) * (log_p - log_q)).sum(1).mean() / 2
