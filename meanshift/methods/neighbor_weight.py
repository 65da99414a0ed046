"""Weights of the neighbors: how much they count beside the target's own embedding.

The paper's k neighbors count equally, the target itself is one of them. Where few of the neighbors
are of the same class, less weight for them, or only the most similar ones, is better
(docs/experiments.md, docs/results.md). This is ours; related: the weighting of mean-shifted
neighbors in MNN.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def mean_neighbor(
    z: Float[Tensor, "batch k dim"], neighbor_weight: float, neighbor_fraction: float = 1.0
) -> Float[Tensor, "batch dim"]:
    """The mean of the target itself, which is first, and of its k-1 neighbors.

    `neighbor_weight` is the weight of all k-1 neighbors together; 0: all k count equally. The
    target replaces all neighbors but the given fraction that `most_similar` selects.
    """
    if neighbor_fraction < 1 and z.shape[1] > 1:
        target, near = z[:, :1], z[:, 1:]
        counted = most_similar(z, neighbor_fraction)
        z = torch.cat([target, torch.where(counted[..., None], near, target)], 1)
    if neighbor_weight == 0 or z.shape[1] == 1:
        return z.mean(1)
    return (1 - neighbor_weight) * z[:, 0] + neighbor_weight * z[:, 1:].mean(1)


def most_similar(z: Float[Tensor, "batch k dim"], fraction: float) -> Bool[Tensor, "batch k-1"]:
    """Which neighbors are among the given fraction of the batch's, by similarity to the target."""
    similarities = torch.einsum("bd,bkd->bk", z[:, 0], z[:, 1:])
    count = max(1, round(fraction * similarities.numel()))
    return similarities >= similarities.flatten().topk(count).values[-1]
