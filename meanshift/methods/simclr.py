"""SimCLR (Chen, Kornblith, Norouzi, Hinton 2020).

Two views of an image must be more similar to each other than to the views of all other images of
the batch. With several processes the batch is that of all of them.

Paper: https://arxiv.org/abs/2002.05709. Official code: google-research/simclr, `tf2/objective.py`
and `tf2/model.py`. Followed is the code: the loss is the mean over images of the *sum* of both
views' losses, twice the paper's average over views; both views go through the encoder as one batch,
so that batch norm sees both; the head has 3 layers (version 2; the paper has 2), each with batch
norm, the last one without a shift. Not done here: the code initializes the head by N(0, 0.01), and
starts the last batch norm of each residual block with weight 0, for which the encoders have no
setting.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from meanshift.config import Views, ViewSpec
from meanshift.methods.base import BuildContext, Method, StepOutput
from meanshift.methods.embeddings import check_embedding, normalize
from meanshift.models.heads import head
from meanshift.runtime import distributed


class SimCLR(Method):
    """Find the other view of each image among all views of the batch.

    `encoder` is any module that maps an input to `dim` values (backbone and head together).

    >>> method = SimCLR(encoder, dim=128, temperature=0.1)
    >>> output = method(first_view, second_view)
    >>> output.loss.backward(); optimizer.step(); method.after_update()
    """

    def __init__(self, encoder: nn.Module, dim: int = 128, *, temperature: float = 0.1) -> None:
        super().__init__()
        self.dim = dim
        self.temperature = temperature
        self.online = encoder

    @classmethod
    def views(cls, settings: Any, operators: Views) -> tuple[ViewSpec, ...]:  # noqa: ARG003
        """Two strong views."""
        return operators.pair(asymmetric=False)

    def forward(
        self,
        first_view: Tensor,
        second_view: Tensor,
        *,
        ids: Int[Tensor, " batch"] | None = None,
        labels: Int[Tensor, " batch"] | None = None,
    ) -> StepOutput:
        """One step of the paper, up to the loss."""
        views = torch.cat([first_view, second_view])
        a, b = normalize(check_embedding(self.online(views), self.dim)).chunk(2)
        loss = nt_xent(a, b, temperature=self.temperature)
        agreement = (a.detach() * b.detach()).sum(1).mean()
        return StepOutput(loss, a.detach(), {"agreement": (agreement, len(a))})

    @classmethod
    def build(cls, settings: Any, context: BuildContext) -> SimCLR:
        """From the settings `SimCLR`."""

        def projector(features: int) -> nn.Module:
            hidden = [settings.hidden or features] * (settings.layers - 1)
            return projection_head([features, *hidden, settings.dim])

        encoder = context.encoder(dim=settings.dim, projector=projector)
        return cls(encoder, settings.dim, temperature=settings.temperature)


def nt_xent(
    a: Float[Tensor, "batch dim"], b: Float[Tensor, "batch dim"], *, temperature: float
) -> Float[Tensor, ""]:
    """The normalized, temperature-scaled cross entropy of two views, summed over both.

    Each row of this process is compared with the rows of all processes, which receive a gradient.
    """
    counts = distributed.all_lengths(len(a))
    every = distributed.all_gather_with_gradient(torch.stack([a, b], 1), counts)
    every_a, every_b = every.unbind(1)
    own = sum(counts[: distributed.rank()]) + torch.arange(len(a), device=a.device)
    itself = own[:, None] == torch.arange(len(every_a), device=a.device)

    def identify(rows: Tensor, others: Tensor, alike: Tensor) -> Tensor:
        """Classify the other view of each row among all other views and the alike ones."""
        logits = torch.cat([rows @ others.T, (rows @ alike.T).masked_fill(itself, -torch.inf)], 1)
        return F.cross_entropy(logits / temperature, own)

    with torch.autocast(a.device.type, enabled=False):
        return identify(a, every_b, every_a) + identify(b, every_a, every_b)


def projection_head(sizes: list[int]) -> nn.Sequential:
    """Build the head of the official code: batch norm behind every layer, no bias in the last."""
    layers = head(sizes, last_batch_norm=True, bias=False)
    last = layers[-1]
    assert isinstance(last, nn.BatchNorm1d)
    last.bias.requires_grad_(False)  # stays 0
    return layers
