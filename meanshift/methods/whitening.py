"""White targets: embeddings without their mean, and with the same variance in every direction.

Ours, not the paper's. In the first epochs of a short run Mean Shift and BYOL lose nearly all
dimensions of their embeddings; a target that is whitened cannot (docs/reproduce.md).
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from meanshift.runtime import distributed


class Whitening(nn.Module):
    """Whitens rows by the running mean and covariance of all that it has seen while training.

    It begins as if rows had been spread evenly, so that it does nothing at first and sets in over
    some `1 / (1 - momentum)` batches. In several processes all of them have the same statistics.
    """

    mean: Float[Tensor, " dim"]
    square: Float[Tensor, "dim dim"]

    def __init__(self, dim: int, *, momentum: float = 0.99, floor: float = 0.05) -> None:
        super().__init__()
        self.momentum, self.floor = momentum, floor
        self.register_buffer("mean", torch.zeros(dim, dtype=torch.float64))
        self.register_buffer("square", torch.eye(dim, dtype=torch.float64) / dim)

    @torch.no_grad()
    def forward(self, rows: Float[Tensor, "batch dim"]) -> Float[Tensor, "batch dim"]:
        """Unit rows; directions of little variance count as if they had `floor` of the mean's."""
        if self.training:
            self._see(rows.double())
        spread = self.square - torch.outer(self.mean, self.mean)
        least = self.floor * spread.diagonal().mean()
        values, vectors = torch.linalg.eigh(spread)
        scale = (values.clamp_min(0) + least).rsqrt()
        with torch.autocast(rows.device.type, enabled=False):
            white = (rows - self.mean.to(rows)) @ (vectors * scale @ vectors.T).to(rows)
        return nn.functional.normalize(white, dim=1)

    def _see(self, rows: Tensor) -> None:
        own = torch.cat([rows.sum(0), (rows.T @ rows).flatten(), rows.new_tensor([len(rows)])])
        total = distributed.all_sum(own)
        mean, square = (total[:-1] / total[-1]).split([rows.shape[1], rows.shape[1] ** 2])
        self.mean.lerp_(mean, 1 - self.momentum)
        self.square.lerp_(square.view_as(self.square), 1 - self.momentum)
