"""Whitening of target embeddings: zero mean, and the same variance in every direction.

This is ours, not the paper's. In the first epochs of a short run the embeddings of Mean Shift and
BYOL lose nearly all dimensions; with whitened targets they lose fewer (docs/results-resnet.md).
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from meanshift.methods.finite import NotFiniteError, require_finite
from meanshift.runtime import distributed


class Whitening(nn.Module):
    """Whitens rows by the running mean and covariance of the rows seen in training.

    The initial statistics are those of evenly spread rows, so that whitening does nothing at first
    and takes effect over about `1 / (1 - momentum)` batches. All processes have the same
    statistics.
    """

    mean: Float[Tensor, " dim"]
    square: Float[Tensor, "dim dim"]
    """second moment: the mean of the outer products of the rows"""

    def __init__(self, dim: int, *, momentum: float = 0.99, floor: float = 0.05) -> None:
        super().__init__()
        self.momentum = momentum
        self.floor = floor
        self.register_buffer("mean", torch.zeros(dim, dtype=torch.float64))
        self.register_buffer("square", torch.eye(dim, dtype=torch.float64) / dim)
        self.inverse: Tensor | None = None
        """undoes the last whitening, up to the mean"""

    @torch.no_grad()
    def forward(self, rows: Float[Tensor, "batch dim"]) -> Float[Tensor, "batch dim"]:
        """Return whitened rows of unit length.

        `floor` times the mean variance is added to the variance of each direction, so that
        directions of little variance are not amplified without bound.
        """
        require_finite(rows, "the embeddings to whiten")
        if self.training:
            self._update(rows.double())
        covariance = self.square - torch.outer(self.mean, self.mean)
        epsilon = self.floor * covariance.diagonal().mean()
        variances, directions = self._eigenvectors(covariance)
        scale = (variances.clamp_min(0) + epsilon).rsqrt()
        with torch.autocast(rows.device.type, enabled=False):
            matrix = (directions * scale @ directions.T).to(rows)
            self.inverse = (directions / scale @ directions.T).to(rows)
            white = (rows - self.mean.to(rows)) @ matrix
        return nn.functional.normalize(white, dim=1)

    def _eigenvectors(self, covariance: Tensor) -> tuple[Tensor, Tensor]:
        """Variances and directions; the CPU waits for a GPU here, since torch checks the result."""
        try:
            variances, directions = torch.linalg.eigh(covariance)
        except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
            raise NotFiniteError("NaN in the covariance to whiten by") from error
        return variances, directions

    def _update(self, rows: Tensor) -> None:
        """Move the statistics towards those of the batches of all processes."""
        sums = torch.cat([rows.sum(0), (rows.T @ rows).flatten(), rows.new_full((1,), len(rows))])
        total = distributed.all_sum(sums)
        mean, square = (total[:-1] / total[-1]).split([rows.shape[1], rows.shape[1] ** 2])
        self.mean.lerp_(mean, 1 - self.momentum)
        self.square.lerp_(square.view_as(self.square), 1 - self.momentum)


@torch.no_grad()
def agreement(
    v: Float[Tensor, "batch dim"], white: Float[Tensor, "batch dim"], whiten: nn.Module
) -> Float[Tensor, ""]:
    """Return the mean cosine of predictions and targets as it is without the whitening.

    Whitened targets consist mostly of directions of little variance, which nobody predicts well;
    by undoing the whitening runs with and without it can be compared, and a collapse detected.
    """
    if isinstance(whiten, Whitening):
        assert whiten.inverse is not None  # it has just made the white targets
        with torch.autocast(v.device.type, enabled=False):
            v, white = (nn.functional.normalize(t @ whiten.inverse, dim=1) for t in (v, white))
    return (v * white).sum(1).mean()
