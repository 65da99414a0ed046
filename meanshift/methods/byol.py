"""BYOL (Grill et al. 2020) with its symmetric loss: each view predicts the target of the other.

Paper: https://arxiv.org/abs/2006.07733. Official code: google-deepmind/deepmind-research,
byol/byol_experiment.py. Paper and code agree: both directions are summed, and the target moves
after the optimizer. As in the code, the last layer of each head has no bias.

What differs: the target starts as a copy of the online encoder, in the code with weights of its own
(its authors see no significant difference). In the views, brightness is a factor, in the code an
offset; crops are bilinear, in the paper bicubic. Not done here: the code's ResNets start the last
batch norm of each residual block with weight 0, for which the encoders have no setting.
"""

from __future__ import annotations

import copy
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor, nn

from meanshift.config import Views, ViewSpec
from meanshift.methods.base import Batch, BuildContext, Method, StepOutput
from meanshift.methods.embeddings import check_embedding, normalize
from meanshift.methods.momentum_target import MomentumTarget
from meanshift.models.heads import head


class BYOL(MomentumTarget):
    """Predict the target embedding of each view from the online embedding of the other.

    `encoder` is any module that maps an input to `dim` values (backbone and projector together);
    the target is a copy of it.

    >>> method = BYOL(encoder, dim=256)
    >>> output = method(first, second)
    >>> output.loss.backward(); optimizer.step(); method.after_update()

    `momentum` is an attribute to set between steps: the paper raises it to 1 by a cosine.
    """

    def __init__(
        self, encoder: nn.Module, dim: int = 256, *, hidden: int = 4096, momentum: float = 0.99
    ) -> None:
        super().__init__()
        self.dim = dim
        self.momentum = momentum
        self.online = encoder
        self.target = copy.deepcopy(encoder).requires_grad_(False)
        self.predictor = head([dim, hidden, dim], bias=False)

    def forward(
        self,
        first: Any,
        second: Any,
        *,
        ids: Int[Tensor, " batch"] | None = None,
        labels: Int[Tensor, " batch"] | None = None,
    ) -> StepOutput:
        """One step of the paper, up to the loss; ids and labels are not used."""
        prediction1, prediction2 = self.predict(first), self.predict(second)
        target1, target2 = self.project(first), self.project(second)
        loss = _distance(prediction1, target2) + _distance(prediction2, target1)
        agreement = 1 - loss.detach() / 4  # the mean cosine of both directions
        return StepOutput(loss, target1, {"agreement": (agreement, len(target1))})

    def predict(self, view: Any) -> Float[Tensor, "batch dim"]:
        """The online embedding through the predictor, of unit length."""
        return normalize(self.predictor(check_embedding(self.online(view), self.dim)))

    def step(self, batch: Batch) -> StepOutput:
        """Both views in their order: there is no target view and no online view."""
        self.shuffle_seed = batch.shuffle_seed
        return Method.step(self, batch)

    @classmethod
    def views(cls, settings: Any, operators: Views) -> tuple[ViewSpec, ...]:
        return operators.pair(asymmetric=settings.asymmetric_views)

    @classmethod
    def build(cls, settings: Any, context: BuildContext) -> BYOL:
        encoder = context.encoder(
            dim=settings.dim,
            projector=lambda features: head([features, settings.hidden, settings.dim], bias=False),
        )
        method = cls(encoder, settings.dim, hidden=settings.hidden, momentum=settings.momentum)
        method.settings = settings
        return method

    def collapse_hint(self) -> str:
        return (
            "the learning rate is too high (halve optim.lr), the target encoder changes too fast "
            "(raise method.momentum), or the views are too alike (smaller views.crop_area)"
        )


def _distance(
    prediction: Float[Tensor, "batch dim"], target: Float[Tensor, "batch dim"]
) -> Float[Tensor, ""]:
    """The mean squared distance of rows of unit length."""
    return (2 - 2 * (prediction * target).sum(1)).mean()
