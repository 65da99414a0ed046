"""Weights of the neighbors: how much they count beside the target's own embedding.

The paper's k neighbors count equally, the target itself is one of them. Where few of the neighbors
are of the same class, less weight for them is better (docs/experiments.md). This is ours; related:
the weighting of mean-shifted neighbors in MNN.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor


def mean_neighbor(
    z: Float[Tensor, "batch k dim"], neighbor_weight: float
) -> Float[Tensor, "batch dim"]:
    """The mean of the target itself, which is first, and of its k-1 neighbors.

    `neighbor_weight` is the weight of all k-1 neighbors together; 0: all k count equally.
    """
    if neighbor_weight == 0 or z.shape[1] == 1:
        return z.mean(1)
    return (1 - neighbor_weight) * z[:, 0] + neighbor_weight * z[:, 1:].mean(1)
