"""Momentum Contrast, MoCo v2 (Chen, Fan, Girshick, He 2020).

The query q of one view of an image must be more similar to the key k of the other view than to the
keys of past images, which a queue stores.

Papers: https://arxiv.org/abs/2003.04297 (v2), https://arxiv.org/abs/1911.05722 (v1). Official code:
facebookresearch/moco, `moco/builder.py`; for CIFAR `colab/moco_cifar10_demo.ipynb`, where
`symmetric`, the sum of both directions, is an option. Paper and code agree: a batch is compared
with the queue before its keys are enqueued, so they are no negatives of each other. The code moves
the target encoder before it computes the keys. Here it is moved after the optimizer, which is the
same, since both encoders begin equal. The demo also splits the batch into 8 groups for batch norm
and shuffles the keys over them, as images of at most 32 pixels have it here too.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from meanshift.methods.base import BuildContext, StepOutput, average
from meanshift.methods.embeddings import check_embedding, normalize
from meanshift.methods.memory_bank import MemoryBank
from meanshift.methods.momentum_target import MomentumTarget
from meanshift.models.heads import head


class MoCo(MomentumTarget):
    """Classify the key of the same image among the keys of past images.

    `encoder` is any module that maps an input to `dim` values (backbone and head together); the
    target encoder, which computes the keys, is a copy of it.

    >>> method = MoCo(encoder, dim=128, temperature=0.2, bank_size=65_536)
    >>> output = method(online_view, target_view, ids=ids, labels=labels)
    >>> output.loss.backward(); optimizer.step(); method.after_update()
    """

    own_settings: ClassVar[tuple[str, ...]] = ("temperature", "bank_size", "momentum", "symmetric")
    """arguments that are settings of the same name"""

    def __init__(
        self,
        encoder: nn.Module,
        dim: int = 128,
        *,
        temperature: float = 0.2,
        bank_size: int = 65_536,
        momentum: float = 0.999,
        symmetric: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.temperature = temperature
        self.momentum = momentum
        self.symmetric = symmetric
        self.online = encoder
        self.target = copy.deepcopy(encoder).requires_grad_(False)
        self.bank = MemoryBank(bank_size, dim, seed=seed)  # whole in each process

    def forward(
        self,
        online_view: Any,
        target_view: Any,
        *,
        ids: Int[Tensor, " batch"] | None = None,
        labels: Int[Tensor, " batch"] | None = None,
    ) -> StepOutput:
        """One step of the paper, up to the loss; in eval mode nothing is enqueued."""
        q = self.query(online_view)
        k = self.project(target_view)
        queue = self.queue(q.dtype)
        output = self.compare(q, k, queue)
        keys = [k]
        if self.symmetric:
            other_k = self.project(online_view)
            other = self.compare(self.query(target_view), other_k, queue)
            output = replace(average(output, other), loss=output.loss + other.loss)
            keys = [other_k, k]
        if self.training:
            for rows in keys:
                self.bank.enqueue(rows, ids=ids, labels=labels)
        return output

    def query(self, view: Any) -> Float[Tensor, "batch dim"]:
        """q: the online embedding, of unit length."""
        return normalize(check_embedding(self.online(view), self.dim))

    def queue(self, dtype: torch.dtype) -> Float[Tensor, "slots dim"]:
        """A copy of the queue: the batch is enqueued before the backward pass needs the rows."""
        return self.bank.rows.to(dtype, copy=True)

    def compare(
        self,
        q: Float[Tensor, "batch dim"],
        k: Float[Tensor, "batch dim"],
        queue: Float[Tensor, "slots dim"],
    ) -> StepOutput:
        """The cross entropy of q's similarities to its key and to the queue; the key is class 0."""
        positive = (q * k).sum(1, keepdim=True)
        logits = torch.cat([positive, similarities(q, queue)], 1) / self.temperature
        loss = F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.int64, device=q.device))
        return StepOutput(loss, k, {"agreement": (positive.detach().mean(), len(q))})

    @classmethod
    def build(cls, settings: Any, context: BuildContext) -> MoCo:
        """From the settings `MoCo` or `CO2`; the head has no batch norm."""

        def projector(features: int) -> nn.Module:
            hidden = [settings.hidden or features] * (settings.layers - 1)
            return head([features, *hidden, settings.dim], batch_norm=False)

        encoder = context.encoder(dim=settings.dim, projector=projector)
        kwargs = {name: getattr(settings, name) for name in cls.own_settings}
        method = cls(encoder, settings.dim, seed=context.seed, **kwargs)
        method.settings = settings
        return method


def similarities(
    rows: Float[Tensor, "batch dim"], queue: Float[Tensor, "slots dim"]
) -> Float[Tensor, "batch slots"]:
    """The cosines of unit rows, in their own precision whatever that of autocast."""
    with torch.autocast(rows.device.type, enabled=False):
        return rows @ queue.T
