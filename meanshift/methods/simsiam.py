"""SimSiam (Chen and He 2020): two views predict each other, with a stopped gradient and no target.

Paper: https://arxiv.org/abs/2011.10566. Official code: facebookresearch/simsiam,
simsiam/builder.py and main_simsiam.py. The predictor's constant learning rate is the option
`--fix-pred-lr` of the code, with which its results were made. The projector's hidden layers have
2048 values as in the paper; in the code they have as many as the backbone's features, which for
ResNet-50 is the same. The small-scale recipe is that of the paper's appendix on CIFAR-10 as others
cite it (no official code).

Not done here: the code starts the last batch norm of each residual block with weight 0, for which
the encoders have no setting.
"""

from __future__ import annotations

from typing import Any

from jaxtyping import Float, Int
from torch import Tensor, nn

from meanshift.config import Views, ViewSpec
from meanshift.methods.base import BuildContext, Method, Metrics, StepOutput
from meanshift.methods.embeddings import check_embedding, normalize
from meanshift.models.heads import head


class SimSiam(Method):
    """Predict the embedding of each view from that of the other; no gradient flows to the latter.

    `encoder` is any module that maps an input to `dim` values (backbone and projector together).
    The paper's projector ends in a batch norm without weight and bias: see `build`.

    >>> method = SimSiam(encoder, dim=2048)
    >>> optimizer = torch.optim.SGD(method.parameters(), 0.05, momentum=0.9)
    >>> output = method(first, second)
    >>> output.loss.backward(); optimizer.step(); method.after_update()
    """

    def __init__(
        self,
        encoder: nn.Module,
        dim: int = 2048,
        *,
        predictor_hidden: int = 512,
        constant_predictor_lr: bool = True,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.constant_predictor_lr = constant_predictor_lr
        self.online = encoder
        self.predictor = head([dim, predictor_hidden, dim])

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
        p1, p2 = self.predictor(z1), self.predictor(z2)
        loss = -(_cosine(p1, z2.detach()) + _cosine(p2, z1.detach())) / 2
        metrics: Metrics = {"agreement": (-loss.detach(), len(z1))}
        return StepOutput(loss, normalize(z1.detach()), metrics)

    def embed(self, view: Any) -> Float[Tensor, "batch dim"]:
        """The embedding before the predictor."""
        return check_embedding(self.online(view), self.dim)

    def parameter_groups(self) -> list[dict[str, Any]]:
        """The encoder, and the predictor whose learning rate has no schedule."""
        encoder, predictor = (
            [p for p in module.parameters() if p.requires_grad]
            for module in (self.online, self.predictor)
        )
        scheduled = not self.constant_predictor_lr
        return [{"params": encoder}, {"params": predictor, "scheduled": scheduled}]

    @classmethod
    def views(cls, settings: Any, operators: Views) -> tuple[ViewSpec, ...]:  # noqa: ARG003
        return operators.pair(asymmetric=False)

    @classmethod
    def build(cls, settings: Any, context: BuildContext) -> SimSiam:
        hidden = [settings.hidden] * (settings.projector_layers - 1)

        def projector(features: int) -> nn.Module:
            sizes = [features, *hidden, settings.dim]
            return head(sizes, last_batch_norm=True, last_affine=False, bias=False)

        return cls(
            context.encoder(dim=settings.dim, projector=projector),
            settings.dim,
            predictor_hidden=settings.predictor_hidden,
            constant_predictor_lr=settings.constant_predictor_lr,
        )


def _cosine(a: Float[Tensor, "batch dim"], b: Float[Tensor, "batch dim"]) -> Float[Tensor, ""]:
    """The mean cosine of the rows."""
    return (normalize(a) * normalize(b)).sum(1).mean()
