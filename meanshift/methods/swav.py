"""SwAV: swapping assignments between views (Caron et al. 2020) on one page. Read `SwAV.forward`.

Paper: https://arxiv.org/abs/2006.09882. Official code: facebookresearch/swav, `main_swav.py`, which
is followed where the paper is silent: the queue is used once it is full, and the prototypes are
frozen for 313 steps at a batch of 4,096 and 5,005 at 256: one epoch of ImageNet, here in epochs.

Differences from the official code: prototypes are renormalized after each update instead of before
each forward pass, which is the same; the projector's batch norm sees the crops of one size at a
time instead of all; the learning rate ends at 0 instead of a thousandth. Its LARC does not clip
(`clip=False`), so it is LARS with a trust of 0.001; it also adapts and decays norms and biases,
which `optim.name lars` does not.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from meanshift.config import Views, ViewSpec
from meanshift.methods.base import BuildContext, Method, Progress, StepOutput
from meanshift.methods.memory_bank import MemoryBank
from meanshift.methods.multi_crop import LARGE_CROPS, embed_crops, multi_crop_views
from meanshift.ops.sinkhorn import sinkhorn
from meanshift.runtime import distributed


class SwAV(Method):
    """Predict the cluster assignment of each large crop from all other crops of the image.

    `encoder` is any module that maps images to `dim` values. The first two views are the large
    crops; any number of small ones may follow.

    >>> method = SwAV(encoder, dim=128, prototypes=3000)
    >>> output = method(large_1, large_2, small_1, small_2)
    >>> output.loss.backward(); optimizer.step(); method.after_update()

    `use_queue` is an attribute to set between steps: whether the queue is filled and, once it is
    full, part of the assignment. `before_update` freezes the prototypes in the first epochs.
    """

    use_queue = True
    queue_epoch = 0

    def __init__(
        self,
        encoder: nn.Module,
        dim: int = 128,
        *,
        prototypes: int = 3000,
        temperature: float = 0.1,
        epsilon: float = 0.05,
        iterations: int = 3,
        queue_size: int = 0,
        freeze_epochs: int = 1,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.temperature = temperature
        self.epsilon = epsilon
        self.iterations = iterations
        self.freeze_epochs = freeze_epochs
        self.online = encoder
        self.prototypes = nn.Linear(dim, prototypes, bias=False)
        # A row has the embeddings of both large crops of an image.
        self.queue = MemoryBank(queue_size, LARGE_CROPS * dim, seed=seed) if queue_size else None
        self.after_update()

    def forward(
        self,
        *crops: Tensor,
        ids: Int[Tensor, " batch"] | None = None,
        labels: Int[Tensor, " batch"] | None = None,
    ) -> StepOutput:
        """One step of the paper, up to the loss; in eval mode the queue is not filled."""
        z = embed_crops(self.online, crops, self.dim)
        scores = self._scores(z)
        log_p = (scores / self.temperature).log_softmax(2)
        with torch.no_grad():
            past = self._scores(self._past_embeddings())
        total = log_p.sum(0)
        loss = z.new_zeros(())
        for crop in range(LARGE_CROPS):
            q = self._assign(torch.cat([past[crop], scores[crop]]))[len(past[crop]) :]
            others = (total - log_p[crop]) / (len(z) - 1)
            loss = loss - (q * others).sum(1).mean() / LARGE_CROPS
        if self.queue is not None and self.use_queue and self.training:
            self.queue.enqueue(torch.cat([*z[:LARGE_CROPS].detach()], 1))
        agreement = (z[0] * z[1]).sum(1).mean().detach()
        return StepOutput(loss, z[0].detach(), {"agreement": (agreement, len(z[0]))})

    def _scores(self, z: Tensor) -> Float[Tensor, "*batch prototypes"]:
        """Cosines with the prototypes, in full precision."""
        with torch.autocast(z.device.type, enabled=False):
            scores: Tensor = self.prototypes(z)
        return scores

    def _assign(self, scores: Float[Tensor, "rows prototypes"]) -> Float[Tensor, "rows prototypes"]:
        """The codes q: equal shares for the prototypes over the rows of all processes."""
        return sinkhorn(scores, epsilon=self.epsilon, iterations=self.iterations)

    def _past_embeddings(self) -> Float[Tensor, "large rows dim"]:
        """This process's share of the queue, if it is full; every process has a copy of it."""
        queue = self.queue if self.use_queue else None
        if queue is None or queue.filled < queue.size:
            return self.prototypes.weight.new_empty(LARGE_CROPS, 0, self.dim)
        first, last = distributed.shard_range(queue.size)
        return queue.rows[first:last].view(-1, LARGE_CROPS, self.dim).transpose(0, 1)

    def set_progress(self, now: Progress) -> dict[str, float | int]:
        self.use_queue = now.epoch >= self.queue_epoch
        return {}

    def before_update(self, now: Progress) -> None:
        if now.epoch < self.freeze_epochs:
            self.prototypes.weight.grad = None

    @torch.no_grad()
    def after_update(self, now: Progress | None = None) -> None:
        """Renormalize the prototypes."""
        self.prototypes.weight.copy_(nn.functional.normalize(self.prototypes.weight, dim=1))

    @classmethod
    def views(cls, settings: Any, operators: Views) -> tuple[ViewSpec, ...]:
        return multi_crop_views(settings, operators)

    @classmethod
    def build(cls, settings: Any, context: BuildContext) -> SwAV:
        encoder = context.encoder(dim=settings.dim, hidden=settings.hidden)
        names = ["temperature", "epsilon", "iterations", "queue_size", "freeze_epochs"]
        method = cls(
            encoder,
            encoder.dim,
            prototypes=settings.prototypes_for(context.dataset_size),
            seed=context.seed,
            **{name: getattr(settings, name) for name in names},
        )
        method.queue_epoch = settings.queue_epoch
        return method

    def collapse_hint(self) -> str:
        return (
            "the assignments are nearly uniform (method.epsilon 0.03), the prototypes move too "
            "early (raise method.freeze_epochs), or the learning rate is too high (halve optim.lr)"
        )
