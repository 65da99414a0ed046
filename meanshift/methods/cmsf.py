"""CMSF (Navaneet et al. 2022), self-supervised: Mean Shift with neighbors of a previous epoch.

Half of the loss is that of MSF. For the other half the neighbors are constrained to images that
were near an epoch ago, in other views: they may be far now, and are still related.

Paper: https://arxiv.org/abs/2112.04607. Official code: UCDvision/CMSF,
self_supervised/train_cmsf_self.py, which is followed, with k = k' = 5 of its run_selfsup.sh. It
keeps the last two embeddings of each image; here the last one is kept, and the previous embeddings
of the images in the bank are in a second bank, which is the same if no image is in the bank twice.
In the first epoch there is no previous embedding: the present one takes its place, so that the
first epoch is MSF's; the code has random vectors there. Not verified: the text of the paper.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from meanshift.methods.base import BuildContext, StepOutput
from meanshift.methods.memory_bank import MemoryBank
from meanshift.methods.msf import MeanShift, Neighbors
from meanshift.methods.sample_memory import SampleMemory, require_ids


class CMSF(MeanShift):
    """Pull each online embedding towards the present and the constrained neighbors of its target.

    `samples` is the number of images, whose ids are 0 to samples-1: a row is kept for each.

    >>> method = CMSF(encoder, dim=512, samples=50_000)
    >>> output = method(online_view, target_view, ids=ids)
    >>> output.loss.backward(); optimizer.step(); method.after_update()
    """

    bank: MemoryBank

    def __init__(
        self,
        encoder: nn.Module,
        dim: int = 512,
        *,
        samples: int,
        k: int = 5,
        candidates: int = 5,
        bank_size: int = 128_000,
        bank_dtype: torch.dtype = torch.float32,
        momentum: float = 0.99,
        hidden: int | None = None,
        search_filled_only: bool = False,
        sharded: bool = False,
        seed: int = 0,
    ) -> None:
        if not 2 <= k <= candidates <= bank_size:
            raise ValueError(
                f"k={k}, candidates={candidates}, bank_size={bank_size}; "
                f"need 2 <= k <= candidates <= bank_size"
            )
        super().__init__(
            encoder,
            dim,
            k=k,
            bank_size=bank_size,
            bank_dtype=bank_dtype,
            momentum=momentum,
            hidden=hidden,
            search_filled_only=search_filled_only,
            sharded=sharded,
            seed=seed,
        )
        self.candidates = candidates
        self.memory = SampleMemory(samples, dim, seed=seed)
        self.previous_bank = MemoryBank(
            bank_size, dim, dtype=bank_dtype, seed=seed, sharded=sharded
        )

    def compare(
        self,
        v: Float[Tensor, "batch dim"],
        u: Float[Tensor, "batch dim"],
        *,
        ids: Int[Tensor, " batch"] | None = None,
        labels: Int[Tensor, " batch"] | None = None,
    ) -> StepOutput:
        """Half of the distance to the neighbors of u, half of that to the constrained ones."""
        ids = require_ids(ids, "CMSF").to(u.device, non_blocking=True)
        labels = None if labels is None else labels.to(u.device, non_blocking=True)
        previous = self._previous(u, ids)
        slots = self._enqueue(u, ids, labels)
        if self.training:
            self.previous_bank.enqueue(previous)  # into the same slots
            self.memory.update(ids, u)
        near = self._loss(v, u, self._neighbors(u, slots, ids), ids, labels)
        related = self._loss(v, u, self._constrained(u, previous, slots), ids, labels)
        constrained = {f"{name}_constrained": value for name, value in related.metrics.items()}
        constrained.pop("agreement_constrained")  # the same
        return StepOutput((near.loss + related.loss) / 2, u, {**near.metrics, **constrained})

    def _previous(self, u: Tensor, ids: Tensor) -> Float[Tensor, "batch dim"]:
        """The target embeddings of the images an epoch ago, or u where there is none yet."""
        return torch.where(self.memory.seen[ids][:, None], self.memory.read(ids).to(u), u)

    def _constrained(self, u: Tensor, previous: Tensor, slots: Tensor | None) -> Neighbors:
        """u itself, and the k-1 nearest of the images that were nearest in previous embeddings."""
        candidates, similarities = self.previous_bank.search(
            previous,
            self.candidates - 1,
            exclude_slots=slots,
            filled_only=self.search_filled_only,
        )
        rows, ids, labels = self.bank.lookup(candidates)
        missing = similarities == -torch.inf  # replaced by u itself
        rows = torch.where(missing[:, :, None], u[:, None], rows.to(u.dtype))
        now = (rows * u[:, None]).sum(2).masked_fill(missing, -torch.inf)
        chosen = now.topk(self.k - 1).indices
        z = rows.gather(1, chosen[:, :, None].expand(-1, -1, rows.shape[2]))
        near_ids, near_labels = (
            t.masked_fill(missing, -1).gather(1, chosen) for t in (ids, labels)
        )
        return torch.cat([u[:, None], z], 1), near_ids, near_labels

    @classmethod
    def build(cls, settings: Any, context: BuildContext) -> CMSF:
        """From the settings `CMSF`; the heads follow the rule of MSF's authors."""
        encoder = context.encoder(dim=settings.dim, hidden=settings.hidden)
        names = ("k", "candidates", "bank_size", "momentum", "search_filled_only")
        method = cls(
            encoder,
            encoder.dim,
            samples=context.dataset_size,
            hidden=encoder.hidden,
            bank_dtype=getattr(torch, settings.bank_dtype),
            sharded=settings.bank_layout == "sharded",
            seed=context.seed,
            **{name: getattr(settings, name) for name in names},
        )
        method.settings = settings
        return method
