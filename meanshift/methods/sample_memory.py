"""One row per training sample, the same in every process.

InvP, PIRL, CMSF, DeepCluster-v2 and SeLa-v2 have it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from meanshift.methods.embeddings import check_embedding, normalize
from meanshift.methods.finite import require_finite
from meanshift.models.features import eval_mode
from meanshift.runtime import distributed

if TYPE_CHECKING:
    from meanshift.methods.base import Batch


class SampleMemory(nn.Module):
    """A memory of `size` rows of `dim` values, addressed by the ids 0 to size-1 of the samples.

    It starts with random rows of unit length. With several processes all of them call `update`
    together, each with samples of its own.

    >>> memory = SampleMemory(50_000, 128, momentum=0.5)
    >>> past = memory.read(ids)
    >>> memory.update(ids, embeddings)
    """

    rows: Float[Tensor, "size dim"]
    seen: Bool[Tensor, " size"]
    """samples whose row was ever written"""

    def __init__(self, size: int, dim: int, *, momentum: float = 0.0, seed: int = 0) -> None:
        super().__init__()
        if size < 1 or dim < 1:
            raise ValueError(
                f"a memory of {size} samples of {dim} values; need at least 1 of each: give the "
                f"number of samples of the dataset"
            )
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum of a sample memory: got {momentum}, need 0 <= momentum < 1")
        self.momentum = momentum
        generator = torch.Generator().manual_seed(seed)
        rows = nn.functional.normalize(torch.randn(size, dim, generator=generator), dim=1)
        self.register_buffer("rows", rows)
        self.register_buffer("seen", torch.zeros(size, dtype=torch.bool))

    @torch.no_grad()
    def read(self, ids: Int[Tensor, " batch"]) -> Float[Tensor, "batch dim"]:
        """The rows of these samples, as a copy."""
        return self.rows[ids.to(self.rows.device, non_blocking=True)]

    @torch.no_grad()
    def update(
        self, ids: Int[Tensor, " batch"], rows: Float[Tensor, "batch dim"], *, replace: bool = False
    ) -> None:
        """Write the rows of the samples of all processes.

        With a momentum, a row becomes momentum times the old row plus the rest of the new one, of
        unit length, unless it is to `replace` the old one. Of a sample that is in a batch more than
        once the last row counts.
        """
        require_finite(rows.detach(), "the embeddings for the memory")
        counts = distributed.all_lengths(len(ids))
        ids = distributed.all_gather_rows(ids.to(self.rows.device, non_blocking=True), counts)
        new = distributed.all_gather_rows(rows.detach().to(self.rows), counts)
        if self.momentum and not replace:
            new = normalize(torch.lerp(new, self.rows[ids], self.momentum))
        self.rows[ids] = new[last_of_each(ids)]
        self.seen[ids] = True

    def fill(self, encoder: nn.Module, batches: Iterator[Batch]) -> None:
        """Write the embedding of every sample; `encoder` is not trained by it."""
        ids, embeddings = embed_samples(encoder, batches, self.rows)
        self.update(ids, normalize(embeddings), replace=True)


@torch.no_grad()
def embed_samples(
    encoder: nn.Module, batches: Iterator[Batch], like: Float[Tensor, "size dim"]
) -> tuple[Int[Tensor, " n"], Float[Tensor, "n dim"]]:
    """The ids and embeddings of all samples of this process, in the type of `like`."""
    ids = [torch.empty(0, dtype=torch.int64, device=like.device)]
    outputs = [like[:0]]
    with eval_mode(encoder):
        for batch in batches:  # another number of them in each process: exchanged at the end
            ids.append(batch.ids)
            outputs.append(check_embedding(encoder(batch.views[0]), like.shape[1]).to(like))
    return torch.cat(ids), torch.cat(outputs)


def require_ids(ids: Int[Tensor, " batch"] | None, name: str) -> Int[Tensor, " batch"]:
    """The ids of a step, or an error that names who needs them."""
    if ids is None:
        raise ValueError(f"{name} needs the ids of the samples: pass ids to the step")
    return ids


def last_of_each(ids: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
    """Where the last occurrence of each id is; writes by it do not depend on their order."""
    order = ids.argsort(stable=True)
    return order[torch.searchsorted(ids[order], ids, right=True) - 1]
