"""Mean Shift for self-supervised learning (Koohpayegani, Tejankar, Pirsiavash 2021) on one page.

Read `MeanShift.forward`. The names are the paper's: the online encoder g with its predictor h, the
target encoder f, u = f(T1(x)), v = h(g(T2(x))), the memory bank, the k nearest neighbors z of u.
With k=1 this is BYOL with an asymmetric loss (`byol-asym`).

Paper: https://arxiv.org/abs/2105.07269. Where paper and released code differ, the order of a step,
the loss and the heads are the code's, and purity is the paper's (self not counted).
"""

from __future__ import annotations

import copy
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from meanshift.methods.base import BuildContext, Metrics, Progress, StepOutput, average
from meanshift.methods.decorrelation import Decorrelation
from meanshift.methods.embeddings import check_embedding, normalize
from meanshift.methods.memory_bank import build_bank
from meanshift.methods.momentum_target import MomentumTarget
from meanshift.methods.neighbor_weight import mean_neighbor
from meanshift.methods.purity import neighbor_metrics, purity_of_views
from meanshift.methods.schedules import stepwise
from meanshift.methods.whitening import Whitening, agreement
from meanshift.models.heads import mlp

Neighbors = tuple[Float[Tensor, "batch k dim"], Tensor | None, Tensor | None]  # rows, ids, labels


class MeanShift(MomentumTarget):
    """Pull each online embedding towards the k nearest neighbors of its target embedding.

    `encoder` is any module that maps an input to `dim` values (backbone and projector together);
    the target is a copy of it.

    >>> method = MeanShift(encoder, dim=512, k=5, bank_size=128_000)
    >>> output = method(online_view, target_view, ids=ids, labels=labels)
    >>> output.loss.backward(); optimizer.step(); method.after_update()

    `k`, `momentum` and `shuffle_seed` (None, or the seed by which the target's images are permuted
    over all processes, so that batch norm leaks nothing) are attributes to set between steps.
    `project` gives u, the target embedding of unit length.
    """

    def __init__(
        self,
        encoder: nn.Module,
        dim: int = 512,
        *,
        k: int = 5,
        bank_size: int = 128_000,
        bank_dtype: torch.dtype = torch.float32,
        momentum: float = 0.99,
        hidden: int | None = None,
        same_image: Literal["keep", "skip"] = "keep",
        search_filled_only: bool = False,
        symmetric: bool = False,
        whiten: bool = False,
        neighbor_weight: float = 0.0,
        neighbor_fraction: float = 1.0,
        variance: float = 0.0,
        covariance: float = 0.0,
        sharded: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.k = k
        self.momentum = momentum
        self.symmetric = symmetric
        self.same_image = same_image
        self.search_filled_only = search_filled_only
        self.online = encoder
        self.target = copy.deepcopy(encoder).requires_grad_(False)
        self.predictor = mlp(dim, hidden or 8 * dim, dim)  # 512-4096-512 in the paper
        self.whiten = Whitening(dim) if whiten else nn.Identity()
        self.neighbor_weight = neighbor_weight
        self.neighbor_fraction = neighbor_fraction
        self.decorrelation = Decorrelation(variance, covariance)  # does nothing in the paper
        self.bank = build_bank(k, bank_size, dim, dtype=bank_dtype, seed=seed, sharded=sharded)

    def forward(
        self,
        online_view: Any,
        target_view: Any,
        *,
        ids: Int[Tensor, " batch"] | None = None,
        labels: Int[Tensor, " batch"] | None = None,
    ) -> StepOutput:
        """One step of the paper, up to the loss; in eval mode the bank is only searched."""
        if self.symmetric:
            return self._both_directions(online_view, target_view, ids, labels)
        embedding = self.embed(online_view)
        v = self.predict(embedding)
        u = self.project(target_view)
        return self.decorrelation.add_to(self.compare(v, u, ids=ids, labels=labels), embedding)

    def compare(
        self,
        v: Float[Tensor, "batch dim"],
        u: Float[Tensor, "batch dim"],
        *,
        ids: Int[Tensor, " batch"] | None = None,
        labels: Int[Tensor, " batch"] | None = None,
    ) -> StepOutput:
        """Add u to the bank, search its neighbors, and compute how far v is from them."""
        ids, labels = (t if t is None else t.to(u.device, non_blocking=True) for t in (ids, labels))
        white = self.whiten(u)  # u itself in the paper
        slots = self._enqueue(white, ids, labels)
        return self._loss(v, u, self._neighbors(white, slots, ids), ids, labels)

    def embed(self, view: Any) -> Float[Tensor, "batch dim"]:
        """The online embedding before the predictor."""
        return check_embedding(self.online(view), self.dim)

    def predict(self, embedding: Float[Tensor, "batch dim"]) -> Float[Tensor, "batch dim"]:
        """v: the online embedding through the predictor, of unit length."""
        return normalize(self.predictor(embedding))

    def _enqueue(self, u: Tensor, ids: Tensor | None, labels: Tensor | None) -> Tensor | None:
        if self.bank is None or not self.training:
            return None
        return self.bank.enqueue(u, ids=ids, labels=labels)

    def _neighbors(self, u: Tensor, slots: Tensor | None, ids: Tensor | None) -> Neighbors:
        """The k neighbors of u: u itself first, by construction, then k-1 found in the bank."""
        if self.k == 1:
            return u[:, None], None, None
        if self.bank is None:
            raise ValueError(f"k={self.k}, but this was built with k=1 and has no bank")
        if ids is None and self.same_image == "skip":
            raise ValueError("same_image='skip' needs the ids of the images: pass ids to the step")
        rows, near_ids, near_labels = self.bank.neighbors(
            u,
            self.k - 1,
            exclude_slots=slots,
            exclude_ids=ids if self.same_image == "skip" else None,
            filled_only=self.search_filled_only,
        )
        return torch.cat([u[:, None], rows], 1), near_ids, near_labels

    def _loss(
        self, v: Tensor, u: Tensor, near: Neighbors, ids: Tensor | None, labels: Tensor | None
    ) -> StepOutput:
        z, near_ids, near_labels = near
        # Squared distances of unit vectors are linear in z: the mean neighbor serves for all k.
        mean = mean_neighbor(z, self.neighbor_weight, self.neighbor_fraction)
        loss = (2 - 2 * (v * mean).sum(1)).mean()
        metrics: Metrics = {"agreement": (agreement(v, z[:, 0], self.whiten), len(u))}
        metrics |= neighbor_metrics(near_ids, near_labels, ids, labels)
        return StepOutput(loss, u, metrics)

    def _both_directions(
        self, a: Any, b: Any, ids: Tensor | None, labels: Tensor | None
    ) -> StepOutput:
        """The symmetric loss: both directions are searched before either is enqueued."""
        embedding_a, embedding_b = self.embed(a), self.embed(b)
        v_a, v_b = self.predict(embedding_a), self.predict(embedding_b)
        u_a, u_b = self.project(a), self.project(b)
        white_a, white_b = self.whiten(u_a), self.whiten(u_b)
        one = self._loss(v_a, u_b, self._neighbors(white_b, None, ids), ids, labels)
        two = self._loss(v_b, u_a, self._neighbors(white_a, None, ids), ids, labels)
        self._enqueue(white_b, ids, labels)
        self._enqueue(white_a, ids, labels)
        one = self.decorrelation.add_to(one, embedding_a)
        two = self.decorrelation.add_to(two, embedding_b)
        return average(one, two)

    @classmethod
    def build(cls, settings: Any, context: BuildContext) -> MeanShift:
        """From the settings `MSF` or `BYOLAsym`; the heads follow the authors' rule."""
        settings = settings.for_batch(context.batch_size)
        encoder = context.encoder(dim=settings.dim, hidden=settings.hidden)
        names = ["k", "momentum", "symmetric", "whiten", "variance", "covariance"]
        if settings.k > 1:
            names += ["bank_size", "same_image", "search_filled_only"]
            names += ["neighbor_weight", "neighbor_fraction"]
        kwargs = {name: getattr(settings, name) for name in names}
        if settings.k > 1:
            kwargs["bank_dtype"] = getattr(torch, settings.bank_dtype)
            kwargs["sharded"] = settings.bank_layout == "sharded"
        method = cls(encoder, encoder.dim, hidden=encoder.hidden, seed=context.seed, **kwargs)
        method.settings = settings
        return method

    def set_progress(self, now: Progress) -> dict[str, float | int]:
        """The schedules of k and of the momentum."""
        if self.settings is not None and self.settings.k_schedule == "linear":
            self.k = stepwise(self.settings.k_start, self.settings.k, now.epoch, now.epochs)
        return {"k": self.k, **super().set_progress(now)}

    def snapshot_metrics(self, *arguments: Any) -> dict[str, float]:
        return purity_of_views(self, *arguments)
