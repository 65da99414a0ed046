"""t-SNE of some thousand points: exact gradients, from a start that is given.

The objective and the optimizer are those of scikit-learn: the affinities are those of the nearest
neighbors, the descent has momentum and a gain for each coordinate. scikit-learn approximates the
forces between distant points by a tree. Here all pairs are computed by a C kernel, which takes less
time up to some thousand points (docs/performance.md), and by torch's operators without a compiler.
"""

from __future__ import annotations

import ctypes
import functools
import math
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from meanshift.ops.topk import nearest_neighbors
from meanshift.runtime.c_library import FINITE, CLibrary, address, load

_SOURCE = Path(__file__).with_name("tsne_kernel.c")
_PADDING = 16
"""the columns of affinities are filled up to a multiple of this"""
_FAR = 1e8
"""coordinate of the points that fill up the last vector; further away weights underflow, slowly"""

EXPLORATION = 250
"""iterations with exaggerated affinities and little momentum"""
_BISECTIONS = 50
_MIN_GAIN = 0.01


def tsne(
    features: Float[Tensor, "n dim"],
    start: Float[Tensor, "n 2"],
    *,
    perplexity: float,
    exaggeration: float,
    iterations: int,
) -> Float[Tensor, "n 2"]:
    """Move the points of a map until near points are those with near features.

    For the first `EXPLORATION` iterations the affinities are multiplied by `exaggeration`.
    """
    affinities = joint_affinities(features, perplexity)
    rate = max(len(features) / exaggeration / 4, 50.0)
    library = load(_SOURCE, FINITE)
    descend = _descend_by_operators if library is None else functools.partial(_descend, library)
    points: Tensor = descend(affinities, start.float(), exaggeration, rate, iterations)
    return points


def joint_affinities(
    features: Float[Tensor, "n dim"], perplexity: float
) -> Float[Tensor, "n padded"]:
    """The probability of each pair of rows to be neighbors; the columns are filled up with zeros.

    A row is a Gaussian over its nearest neighbors, as wide as the perplexity says.
    """
    size = len(features)
    centered = (features - features.mean(0)).float()
    squares = centered.square().sum(1)
    # The nearest rows have the largest products with the row, after half of their squares.
    queries = torch.cat([centered, torch.ones(size, 1)], 1)
    rows = torch.cat([centered, -squares[:, None] / 2], 1)
    count = min(size - 1, int(3 * perplexity + 1))
    neighbors, products = nearest_neighbors(queries, rows, count, exclude=torch.arange(size))
    distances = (squares[:, None] - 2 * products).clamp(min=0).double()
    affinities = torch.zeros(size, size)
    affinities.scatter_(1, neighbors, _probabilities(distances, perplexity).float())
    affinities = (affinities + affinities.T) / (2 * size)
    return F.pad(affinities, (0, -size % _PADDING))


def _probabilities(distances: Tensor, perplexity: float) -> Float[Tensor, "n neighbors"]:
    """Gaussian probabilities of each row's neighbors, nearest first, with this perplexity."""
    distances = distances - distances[:, :1]  # no probability changes, and not all can vanish
    low = torch.zeros_like(distances[:, :1])
    high = torch.full_like(low, torch.inf)
    precision = torch.ones_like(low)
    for _ in range(_BISECTIONS):
        weights = torch.exp(-precision * distances)
        total = weights.sum(1, keepdim=True)
        mean = (weights * distances).sum(1, keepdim=True) / total
        too_wide = total.log() + precision * mean > math.log(perplexity)  # the entropy
        low = torch.where(too_wide, precision, low)
        high = torch.where(too_wide, high, precision)
        precision = torch.where(high.isinf(), 2 * precision, (low + high) / 2)
    return weights / total


def _descend(
    library: CLibrary,
    affinities: Tensor,
    start: Tensor,
    exaggeration: float,
    rate: float,
    iterations: int,
) -> Float[Tensor, "n 2"]:
    size, padded = affinities.shape
    points = F.pad(start.T, (0, padded - size), value=_FAR).contiguous()
    failed = library.functions.tsne_descend(
        address(affinities),
        *map(ctypes.c_long, (size, padded)),
        *map(ctypes.c_float, (exaggeration, rate, _MIN_GAIN)),
        *map(ctypes.c_long, (EXPLORATION, iterations)),
        *map(address, points),
    )
    if failed:
        raise MemoryError(f"a map of {size:,} points does not fit into the memory")
    return points[:, :size].T.contiguous()


def _descend_by_operators(
    affinities: Tensor, start: Tensor, exaggeration: float, rate: float, iterations: int
) -> Float[Tensor, "n 2"]:
    points = start.clone()
    update = torch.zeros_like(points)
    gains = torch.ones_like(points)
    for iteration in range(iterations):
        exploring = iteration < EXPLORATION
        gradient = tsne_gradient(points, affinities, exaggeration if exploring else 1.0)
        turned = update * gradient < 0.0
        gains = torch.where(turned, gains + 0.2, gains * 0.8).clamp_(min=_MIN_GAIN)
        update.mul_(0.5 if exploring else 0.8).sub_(rate * gains * gradient)
        points += update
    return points


def tsne_gradient(
    points: Float[Tensor, "n 2"], affinities: Float[Tensor, "n padded"], exaggeration: float = 1.0
) -> Float[Tensor, "n 2"]:
    """The gradient of the Kullback-Leibler divergence between affinities and map."""
    x, y = points.T
    squares = (x[:, None] - x).square_().add_((y[:, None] - y).square_())
    weights = squares.add_(1).reciprocal_()
    pull = affinities[:, : len(points)] * weights
    push = weights.square()
    # The sums of force * (own point - other point).
    attraction = pull.sum(1, keepdim=True) * points - pull @ points
    repulsion = push.sum(1, keepdim=True) * points - push @ points
    normalizer = weights.sum() - len(points)  # without the pairs of a point and itself
    gradient: Tensor = 4 * (exaggeration * attraction - repulsion / normalizer)
    return gradient
