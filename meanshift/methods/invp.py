"""Invariance propagation (Wang, Liu, Guo, Sun 2020): positives by walking over neighbors.

Read `InvP.forward`. A memory has one row per sample. L_ins recognizes an image among its most
similar samples; L_inv pulls it towards the least similar of those that a walk over nearest
neighbors reaches.

Paper: https://arxiv.org/abs/2010.11694. Official file: WangFeng18/InvariancePropagation
`objective.py` (`main.py` for the order of a step), which is followed: the walk may reach a sample
several times and counts it as often (the paper: a breadth-first search without repetition), and
the neighbors of a sample are those of its last view.
Differences: memory rows start with unit length (the code: uniform values) or, with `fill_memory`,
as the embeddings of the samples; the head starts with PyTorch's weights (the code: Xavier's, and
biases of 0). A sample that was not seen yet is its own neighbor (the code: sample 0). The
background of L_inv is without the sample; the code subtracts it also where it is not among the most
similar ones. In short runs L_inv starts after a quarter of the epochs.
Not verified: the settings of the paper's CIFAR experiments beyond the comments in `main.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from meanshift.config import Views, ViewSpec
from meanshift.methods.base import Batch, BuildContext, Method, Metrics, Progress, StepOutput
from meanshift.methods.embeddings import check_embedding, normalize
from meanshift.methods.neighbor_graph import NeighborGraph
from meanshift.methods.sample_memory import SampleMemory, require_ids
from meanshift.models.heads import head

EPSILON = 1e-7  # added to a probability before its logarithm, as in the code


class InvP(Method):
    """Recognize each sample, and pull it towards the hardest of its propagated neighbors.

    `encoder` is any module that maps an input to `dim` values; `samples` is the size of the
    dataset, whose ids are 0 to samples-1.

    >>> method = InvP(encoder, dim=128, samples=50_000)
    >>> output = method(view, ids=ids)
    >>> output.loss.backward(); optimizer.step(); method.after_update()
    """

    warmup_epochs = 0

    def __init__(
        self,
        encoder: nn.Module,
        dim: int = 128,
        *,
        samples: int,
        temperature: float = 0.2,
        background: int = 4096,
        k: int = 4,
        layers: int = 3,
        positives: int = 50,
        invariance: float = 0.6,
        memory_momentum: float = 0.5,
        fill_memory: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.temperature = temperature
        self.background = min(background, samples)
        self.k = k
        self.layers = layers
        self.positives = positives
        self.invariance = invariance
        self.weight = invariance  # the present one: 0 in the warm-up
        self.online = encoder
        self.fill_memory = fill_memory
        self.memory = SampleMemory(samples, dim, momentum=memory_momentum, seed=seed)
        if k >= self.background:
            raise ValueError(f"k={k} neighbors of {self.background} samples; need fewer: lower k")
        self.graph = NeighborGraph(samples, k)
        self._updates: list[tuple[Tensor, Tensor, Tensor]] = []  # ids, embeddings, neighbors

    def begin_epoch(self, now: Progress, batches: Callable[[], Iterator[Batch]]) -> None:
        """Before the first step, fill the memory if the settings ask for it."""
        if self.fill_memory and not bool(self.memory.seen.any()):
            self.memory.fill(self.online, batches())

    def forward(
        self,
        view: Any,
        *,
        ids: Int[Tensor, " batch"] | None = None,
        labels: Int[Tensor, " batch"] | None = None,
    ) -> StepOutput:
        """One step of the paper, up to the loss; `after_update` writes the memory."""
        ids = require_ids(ids, "InvP").to(self.memory.rows.device, non_blocking=True)
        v = normalize(check_embedding(self.online(view), self.dim))
        with torch.autocast(v.device.type, enabled=False):
            similar = v @ self.memory.rows.to(v.dtype).T  # to all samples
            nearest, nearest_ids = similar.topk(self.background, 1)
            own = similar.gather(1, ids[:, None])
            instance = self._loss(own, nearest)
            reached = similar.gather(1, self.graph.walk(ids, self.layers))
            count = min(self.positives, reached.shape[1])
            hardest = reached.topk(count, 1, largest=False).values
            others = nearest.masked_fill(nearest_ids == ids[:, None], -torch.inf)
            invariance = self._loss(hardest, others)
        if self.training:
            self._updates.append((ids, v.detach(), nearest_ids[:, : self.k + 1]))
        metrics: Metrics = {
            "agreement": (own.detach().mean(), len(ids)),
            "loss_instance": (instance.detach(), len(ids)),
            "loss_invariance": (invariance.detach(), len(ids)),
        }
        return StepOutput(instance + self.weight * invariance, v.detach(), metrics)

    def _loss(
        self, part: Float[Tensor, "batch n"], whole: Float[Tensor, "batch m"]
    ) -> Float[Tensor, ""]:
        """The negative logarithm of the probability of a part of the samples."""
        part, whole = ((s / self.temperature).logsumexp(1) for s in (part, whole))
        return -((part - whole).exp() + EPSILON).log().mean()

    @torch.no_grad()
    def after_update(self, now: Progress | None = None) -> None:
        """Write embeddings and neighbors; not before, since the backward pass needs the memory."""
        for ids, embeddings, near in self._updates:
            self.memory.update(ids, embeddings)
            self.graph.update(ids, near)
        self._updates.clear()

    def set_progress(self, now: Progress) -> dict[str, float | int]:
        started = now.epoch >= min(self.warmup_epochs, now.epochs // 4)
        self.weight = self.invariance if started else 0.0
        return {"invariance": self.weight}

    def memory_use(self, batch_size: int) -> dict[str, int]:
        return super().memory_use(batch_size) | {
            "their neighbors, also in each checkpoint": self.graph.neighbors.nbytes,
            "similarities of a step": batch_size * len(self.memory.rows) * 4,
        }

    @classmethod
    def views(cls, settings: Any, operators: Views) -> tuple[ViewSpec, ...]:  # noqa: ARG003
        return (operators.spec("online", "strong", index=1),)

    @classmethod
    def build(cls, settings: Any, context: BuildContext) -> InvP:
        def projector(features: int) -> nn.Module:
            hidden = [settings.hidden or features] if settings.head == "mlp" else []
            return head([features, *hidden, settings.dim], batch_norm=False)

        names = "temperature background k layers positives invariance".split()
        names += ["memory_momentum", "fill_memory"]
        method = cls(
            context.encoder(projector=projector),
            settings.dim,
            samples=context.dataset_size,
            seed=context.seed,
            **{name: getattr(settings, name) for name in names},
        )
        method.warmup_epochs = settings.warmup_epochs
        return method
