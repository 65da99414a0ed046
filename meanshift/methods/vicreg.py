"""VICReg (Bardes, Ponce, LeCun 2021): alike embeddings of two views, without negatives or target.

Paper: https://arxiv.org/abs/2105.04906. Official code: facebookresearch/vicreg, main_vicreg.py.
Where the paper's formulas and the code differ, the code is followed, for which the weights 25, 25
and 1 are meant: the invariance is a mean over the dimensions too (the paper sums over them), and
the variance term is the mean of the two views (the paper adds them). The covariance term is the sum
of the two views in both.

Not done here: the code starts the last batch norm of each residual block with weight 0, for which
the encoders have no setting; its learning rate ends at a thousandth of its maximum, here at 0.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from meanshift.config import Views, ViewSpec
from meanshift.methods.base import BuildContext, Method, Metrics, StepOutput
from meanshift.methods.decorrelation import variance_and_covariance
from meanshift.methods.embeddings import check_embedding, normalize
from meanshift.models.heads import head


class VICReg(Method):
    """Invariance of the embeddings of two views, variance and covariance of their dimensions.

    `encoder` is any module that maps an input to `dim` values (backbone and projector together).
    Variances and covariances are those of the batches of all processes.

    >>> method = VICReg(encoder, dim=8192)
    >>> output = method(first, second)
    >>> output.loss.backward(); optimizer.step(); method.after_update()
    """

    def __init__(
        self,
        encoder: nn.Module,
        dim: int = 8192,
        *,
        invariance: float = 25.0,
        variance: float = 25.0,
        covariance: float = 1.0,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.invariance = invariance
        self.variance = variance
        self.covariance = covariance
        self.online = encoder

    def forward(
        self,
        first: Any,
        second: Any,
        *,
        ids: Int[Tensor, " batch"] | None = None,
        labels: Int[Tensor, " batch"] | None = None,
    ) -> StepOutput:
        """One step of the paper, up to the loss; ids and labels are not used."""
        z1, z2 = self.embed(first), self.embed(second)
        with torch.autocast(z1.device.type, enabled=False):
            invariance = (z1 - z2).square().mean()
            low1, correlated1 = variance_and_covariance(z1)
            low2, correlated2 = variance_and_covariance(z2)
        variance = (low1 + low2) / 2
        covariance = correlated1 + correlated2
        loss = (
            self.invariance * invariance + self.variance * variance + self.covariance * covariance
        )
        unit1, unit2 = normalize(z1.detach()), normalize(z2.detach())
        metrics: Metrics = {
            "agreement": ((unit1 * unit2).sum(1).mean(), len(z1)),
            "invariance": (invariance.detach(), len(z1)),
            "variance": (variance.detach(), len(z1)),
            "covariance": (covariance.detach(), len(z1)),
        }
        return StepOutput(loss, unit1, metrics)

    def embed(self, view: Any) -> Float[Tensor, "batch dim"]:
        """The embedding, in at least float32 whatever the precision of autocast."""
        z = check_embedding(self.online(view), self.dim)
        return z.to(torch.promote_types(z.dtype, torch.float32))

    @classmethod
    def views(cls, settings: Any, operators: Views) -> tuple[ViewSpec, ...]:
        return operators.pair(asymmetric=settings.asymmetric_views)

    @classmethod
    def build(cls, settings: Any, context: BuildContext) -> VICReg:
        def projector(features: int) -> nn.Module:
            return head([features, settings.hidden, settings.hidden, settings.dim], bias=False)

        return cls(
            context.encoder(dim=settings.dim, projector=projector),
            settings.dim,
            invariance=settings.invariance,
            variance=settings.variance,
            covariance=settings.covariance,
        )
