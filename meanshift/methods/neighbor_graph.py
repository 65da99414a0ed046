"""The nearest neighbors of every sample, and walks over them (InvP)."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor, nn

from meanshift.methods.sample_memory import last_of_each
from meanshift.runtime import distributed


class NeighborGraph(nn.Module):
    """The ids of the k nearest neighbors of each sample, the same in every process.

    A sample whose neighbors were never written is its own neighbor.
    """

    neighbors: Int[Tensor, "samples k"]

    def __init__(self, samples: int, k: int) -> None:
        super().__init__()
        self.register_buffer("neighbors", torch.arange(samples)[:, None].repeat(1, k))

    def walk(self, ids: Int[Tensor, " batch"], steps: int) -> Int[Tensor, "batch reached"]:
        """The samples that are reached in 1 to `steps` steps, each as often as there are ways."""
        reached = [self.neighbors[ids]]
        for _ in range(steps - 1):
            reached.append(self.neighbors[reached[-1]].flatten(1))
        return torch.cat(reached, 1)

    @torch.no_grad()
    def update(self, ids: Int[Tensor, " batch"], nearest: Int[Tensor, "batch k1"]) -> None:
        """Write the neighbors of the samples of all processes: of k+1 nearest ones, the sample
        itself is replaced by the last. Of a sample that is in a batch twice the last row counts."""
        near = torch.where(nearest == ids[:, None], nearest[:, -1:], nearest)[:, :-1]
        rows = distributed.all_gather_rows(torch.cat([ids[:, None], near], 1))
        written = rows[:, 0].contiguous()
        self.neighbors[written] = rows[last_of_each(written), 1:]
