"""Mean Shift for self-supervised learning: the paper's step on one page.

Read `MeanShift.forward`. The names are the paper's: the online encoder g with its predictor h, the
target encoder f, u = f(T1(x)), v = h(g(T2(x))), the memory bank, the k nearest neighbors z of u.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import get_ema_multi_avg_fn

from meanshift.methods.memory_bank import MemoryBank
from meanshift.methods.whitening import Whitening
from meanshift.models.encoder import mlp
from meanshift.runtime import distributed


@dataclass(frozen=True)
class StepOutput:
    """What one step tells; only `loss` carries a gradient, and nothing waits for the device."""

    loss: Float[Tensor, ""]
    agreement: Float[Tensor, ""]
    """mean cosine of v and u: how well the online view predicts the target's"""
    purity: Float[Tensor, ""] | None
    """share of neighbors 2..k with the label of their query (the paper's); None without labels"""
    same_image: Float[Tensor, ""] | None
    """share of queries with an older view of the same image among their neighbors"""
    embeddings: Float[Tensor, "batch dim"]
    """u, the target's embeddings"""


Neighbors = tuple[Float[Tensor, "batch k dim"], Tensor | None, Tensor | None]  # rows, ids, labels


class MeanShift(nn.Module):
    """Pull each online embedding towards the k nearest neighbors of its target embedding.

    `encoder` is any module that gives `dim` values an input (backbone and projector together); the
    target is a copy of it. With k=1 this is BYOL with an asymmetric loss, and no bank is kept.

    >>> method = MeanShift(encoder, dim=512, k=5, bank_size=128_000)
    >>> step = method(online_view, target_view, ids=ids, labels=labels)
    >>> step.loss.backward(); optimizer.step(); method.follow()
    `k`, `momentum` and `shuffle` (None, or the seed by which the target's images are permuted
    over all processes, so that batch norm tells nothing) are attributes to set between steps.
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
        sharded: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if k < 1 or (k > 1 and k > bank_size):
            raise ValueError(
                f"k={k} with a bank of {bank_size} rows; need 1 <= k <= bank_size: "
                f"raise bank_size or lower k (k=1 is BYOL and needs no bank)"
            )
        self.dim, self.k, self.momentum, self.symmetric = dim, k, momentum, symmetric
        self.same_image, self.search_filled_only = same_image, search_filled_only
        self.shuffle: int | None = None
        self.online, self.target = encoder, copy.deepcopy(encoder).requires_grad_(False)
        self.predictor = mlp(dim, hidden or 8 * dim, dim)  # 512-4096-512 in the paper
        self.whiten = Whitening(dim) if whiten else nn.Identity()
        kept: dict[str, Any] = {"dtype": bank_dtype, "seed": seed, "sharded": sharded}
        self.bank = MemoryBank(bank_size, dim, **kept) if k > 1 else None

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
            return self._both_ways(online_view, target_view, ids, labels)
        v = self.predict(online_view)
        u = self.project(target_view)
        return self.compare(v, u, ids=ids, labels=labels)

    def compare(
        self,
        v: Float[Tensor, "batch dim"],
        u: Float[Tensor, "batch dim"],
        *,
        ids: Int[Tensor, " batch"] | None = None,
        labels: Int[Tensor, " batch"] | None = None,
    ) -> StepOutput:
        """Remember u, find its neighbors, and measure how far v is from them."""
        ids, labels = (t if t is None else t.to(u.device, non_blocking=True) for t in (ids, labels))
        own = self._remember(u, ids, labels)
        return self._judge(v, u, self._nearest(u, own, ids), ids, labels)

    @torch.no_grad()
    def after_update(self) -> None:
        """Move the target towards the online encoder, parameters only; after the optimizer."""
        targets, onlines = (list(e.parameters()) for e in (self.target, self.online))
        get_ema_multi_avg_fn(self.momentum)(targets, onlines, None)

    def predict(self, view: Any) -> Float[Tensor, "batch dim"]:
        """v: the online embedding through the predictor, of unit length."""
        return _unit(self.predictor(self._encode(self.online, view)))

    @torch.no_grad()
    def project(self, view: Any) -> Float[Tensor, "batch dim"]:
        """u: the target embedding, of unit length; batch norm uses the batch's own statistics."""
        seed = self.shuffle if self.training else None
        encode = partial(self._encode, self.target)
        u: Tensor = self.whiten(_unit(distributed.apply_shuffled(encode, view, seed)))
        return u

    def _encode(self, encoder: nn.Module, view: Any) -> Tensor:
        embedding: Tensor = encoder(view)
        if embedding.ndim != 2 or embedding.shape[1] != self.dim:
            raise ValueError(
                f"the encoder gives shape {tuple(embedding.shape)}; need (batch, {self.dim}): "
                f"pass dim={embedding.shape[-1]} or end the encoder in a layer of {self.dim} values"
            )
        return embedding

    def _remember(self, u: Tensor, ids: Tensor | None, labels: Tensor | None) -> Tensor | None:
        if self.bank is None or not self.training:
            return None
        return self.bank.enqueue(u, ids=ids, labels=labels)

    def _nearest(self, u: Tensor, own: Tensor | None, ids: Tensor | None) -> Neighbors:
        """The k neighbors of u: u itself first, by construction, then k-1 found in the bank."""
        if self.k == 1:
            return u[:, None], None, None
        if self.bank is None:
            raise ValueError(f"k={self.k}, but this was built with k=1 and keeps no bank")
        if ids is None and self.same_image == "skip":
            raise ValueError("same_image='skip' needs to know the images: pass ids to the step")
        slots, similarity = self.bank.search(
            u,
            self.k - 1,
            leave_out=own,
            skip_ids=ids if self.same_image == "skip" else None,
            filled_only=self.search_filled_only,
        )
        missing = similarity == -torch.inf  # too few eligible rows: u stands in for them
        rows, *about = self.bank.look_up(slots)
        rows = torch.where(missing[:, :, None], u[:, None], rows.to(u.dtype))
        near_ids, near_labels = (held.masked_fill(missing, -1) for held in about)
        return torch.cat([u[:, None], rows], 1), near_ids, near_labels

    def _judge(
        self, v: Tensor, u: Tensor, near: Neighbors, ids: Tensor | None, labels: Tensor | None
    ) -> StepOutput:
        z, near_ids, near_labels = near
        # Squared distances of unit vectors are linear in z: the mean neighbor serves for all k.
        loss, purity, same_image = (2 - 2 * (v * z.mean(1)).sum(1)).mean(), None, None
        if near_labels is not None and labels is not None:
            known = (labels >= 0).float()
            pure = (near_labels == labels[:, None]).float().mean(1)
            purity = (pure * known).sum() / known.sum()  # not a number where no label is known
        if near_ids is not None and ids is not None:
            same_image = (near_ids == ids[:, None]).any(1).float().mean()
        return StepOutput(loss, (v.detach() * u).sum(1).mean(), purity, same_image, u)

    def _both_ways(self, a: Any, b: Any, ids: Tensor | None, labels: Tensor | None) -> StepOutput:
        """The symmetric loss: both directions are searched before either is remembered."""
        v_a, v_b = self.predict(a), self.predict(b)
        u_a, u_b = self.project(a), self.project(b)
        one = self._judge(v_a, u_b, self._nearest(u_b, None, ids), ids, labels)
        two = self._judge(v_b, u_a, self._nearest(u_a, None, ids), ids, labels)
        self._remember(u_b, ids, labels)
        self._remember(u_a, ids, labels)
        pairs = [(name, a, vars(two)[name]) for name, a in vars(one).items()]
        told: Any = {name: None if a is None else (a + b) / 2 for name, a, b in pairs}
        return StepOutput(**{**told, "embeddings": u_b})


def _unit(embeddings: Tensor) -> Tensor:
    """Unit length, in at least float32 whatever the precision of autocast."""
    return F.normalize(embeddings.to(torch.promote_types(embeddings.dtype, torch.float32)), dim=1)
