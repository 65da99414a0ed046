"""t-SNE of some thousand points: exact gradients, from a start that is given.

The objective and the optimizer are those of scikit-learn: the affinities are those of the nearest
neighbors, the descent has momentum and a gain for each coordinate. scikit-learn approximates the
forces between distant points by a tree. Here all pairs are computed by a C kernel, which takes less
time up to some thousand points (docs/performance.md), and by torch's operators without a compiler.
"""

from __future__ import annotations

import ctypes
import math
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from meanshift.ops.topk import nearest_neighbors
from meanshift.runtime.c_library import CLibrary, address, compute_in_threads, load

_SOURCE = Path(__file__).with_name("tsne_kernel.c")
_SUMS = 5  # as in the source
_PADDING = 16
"""the columns of affinities are filled up to a multiple of this"""
_FAR = 1e15
"""coordinate of the points that fill up the last vector"""
_THREAD_PAIRS = 2**19
"""pairs that are worth a thread: fewer are computed before another one has started"""

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
    points = start.float().clone()
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


def tsne_gradient(
    points: Float[Tensor, "n 2"], affinities: Float[Tensor, "n padded"], exaggeration: float = 1.0
) -> Float[Tensor, "n 2"]:
    """The gradient of the Kullback-Leibler divergence between affinities and map."""
    library = load(_SOURCE)
    if library is None or points.device.type != "cpu":
        sums = _forces_by_operators(points, affinities)
    else:
        sums = _forces(library, points, affinities)
    attraction, repulsion, weights = sums[:, :2], sums[:, 2:4], sums[:, 4]
    normalizer = weights.double().sum() - len(points)  # without the pairs of a point and itself
    return 4 * (exaggeration * attraction - repulsion / normalizer.float())


def _forces(library: CLibrary, points: Tensor, affinities: Tensor) -> Float[Tensor, "n 5"]:
    size, padded = affinities.shape
    x, y = F.pad(points.T, (0, padded - size), value=_FAR).contiguous()
    sums = torch.empty(size, _SUMS)

    def compute(first: int, last: int) -> int:
        limits = map(ctypes.c_long, (padded, first, last))
        arrays = map(address, (x, y, affinities))
        status: int = library.functions.tsne_forces(*arrays, *limits, address(sums))
        return status

    threads = min(torch.get_num_threads(), size * padded // _THREAD_PAIRS)
    compute_in_threads(compute, size, threads)
    return sums


def _forces_by_operators(points: Tensor, affinities: Tensor) -> Float[Tensor, "n 5"]:
    x, y = points.T
    squares = (x[:, None] - x).square_().add_((y[:, None] - y).square_())
    weights = squares.add_(1).reciprocal_()
    pull = affinities[:, : len(points)] * weights
    push = weights.square()
    forces = [  # the sums of force * (own point - other point)
        force.sum(1, keepdim=True) * points - force @ points for force in (pull, push)
    ]
    return torch.cat([*forces, weights.sum(1, keepdim=True)], 1)
