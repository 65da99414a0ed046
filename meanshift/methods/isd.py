"""ISD, Iterative Similarity Distillation (Tejankar et al. 2021).

The online encoder learns how similar the target encoder's embedding of the other view is to each
past embedding in a queue. There are no positive pairs and no negatives.

Paper: https://arxiv.org/abs/2012.09259. Official code: UMBCvision/ISD, `train_isd_plus.py`, which
this follows: encoders, heads, views and optimizer of Mean Shift, a colder target, and a queue that
does not yet contain the batch. The paper's first version (`train_isd.py`, ResNet-18, one
temperature of 0.02) is not here. The code also logs the purity of 5 neighbors in the queue; this
does not. For small images nothing was published: those settings are ours.
"""

from __future__ import annotations

from typing import Any, ClassVar

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from meanshift.methods.base import BuildContext, StepOutput
from meanshift.methods.embeddings import check_embedding, normalize
from meanshift.methods.moco import MoCo, similarities
from meanshift.models.heads import mlp


class ISD(MoCo):
    """Distill the target's similarities to a queue into the online encoder.

    >>> method = ISD(encoder, dim=512, bank_size=128_000)
    >>> output = method(online_view, target_view, ids=ids, labels=labels)
    >>> output.loss.backward(); optimizer.step(); method.after_update()

    The step is that of `MoCo` with another loss and a predictor.
    """

    own_settings: ClassVar[tuple[str, ...]] = (
        "temperature",
        "target_temperature",
        "bank_size",
        "momentum",
    )

    def __init__(
        self,
        encoder: nn.Module,
        dim: int = 512,
        *,
        temperature: float = 0.1,
        target_temperature: float = 0.01,
        bank_size: int = 128_000,
        momentum: float = 0.99,
        hidden: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(
            encoder,
            dim,
            temperature=temperature,
            bank_size=bank_size,
            momentum=momentum,
            seed=seed,
        )
        self.target_temperature = target_temperature
        self.predictor = mlp(dim, hidden or 8 * dim, dim)

    def query(self, view: Any) -> Float[Tensor, "batch dim"]:
        """q: the online embedding through the predictor, of unit length."""
        return normalize(self.predictor(check_embedding(self.online(view), self.dim)))

    def compare(
        self,
        q: Float[Tensor, "batch dim"],
        k: Float[Tensor, "batch dim"],
        queue: Float[Tensor, "slots dim"],
    ) -> StepOutput:
        """KL(P || Q) of the target's distribution P over the queue and the online one Q."""
        log_q = (similarities(q, queue) / self.temperature).log_softmax(1)
        p = (similarities(k, queue) / self.target_temperature).softmax(1)
        loss = F.kl_div(log_q, p, reduction="batchmean")
        agreement = (q.detach() * k).sum(1).mean()
        return StepOutput(loss, k, {"agreement": (agreement, len(q))})

    @classmethod
    def build(cls, settings: Any, context: BuildContext) -> ISD:
        """From the settings `ISD`; the heads follow the authors' rule, as in Mean Shift."""
        encoder = context.encoder(dim=settings.dim, hidden=settings.hidden)
        arguments = {name: getattr(settings, name) for name in cls.own_settings}
        method = cls(encoder, encoder.dim, hidden=encoder.hidden, seed=context.seed, **arguments)
        method.settings = settings
        return method
