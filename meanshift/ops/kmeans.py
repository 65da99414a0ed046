"""k-means on unit vectors: Lloyd's iterations from greedy k-means++ starts, and spherical."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from meanshift.ops.inner_products import inner_products
from meanshift.runtime import distributed, rng


@torch.no_grad()
def kmeans(
    features: Float[Tensor, "n features"],
    clusters: int,
    *,
    iterations: int = 20,
    restarts: int = 1,
    seed: int = 0,
    device: torch.device | None = None,
    chunk: int = 16_384,
) -> tuple[Int[Tensor, " n"], float]:
    """Cluster L2-normalized rows: (cluster of each row, mean squared distance to its center).

    The best of `restarts` runs is returned. The rows are read in chunks, so `features` may be a
    memory-mapped file that is larger than memory.
    """
    if not 1 <= clusters <= len(features):
        raise ValueError(
            f"k-means: got {clusters} clusters for {len(features)} images, need 1 to as many"
        )
    device = device or features.device
    unit_chunks = _unit_chunks(features, chunk, device)
    best: tuple[Tensor, float] | None = None
    for restart in range(restarts):
        start_seed = rng.derive_seed(seed, restart, rng.SAMPLE)
        centers = kmeans_plusplus(features, clusters, seed=start_seed).to(device)
        assignment, distances = _lloyd(features, unit_chunks, centers, iterations)
        mean_distance = float(distances.double().mean())
        if best is None or mean_distance < best[1]:
            best = assignment.cpu(), mean_distance
    assert best is not None
    return best


@torch.no_grad()
def spherical_kmeans(
    features: Float[Tensor, "n features"],
    clusters: int,
    *,
    iterations: int = 10,
    seed: int = 0,
    chunk: int = 16_384,
) -> tuple[Int[Tensor, " n"], Float[Tensor, "clusters features"]]:
    """Cluster unit rows by cosine, from random rows: (cluster of each row, centers of unit length).

    An empty cluster keeps its center. Several processes, which all have the same features, divide
    the rows.
    """
    if not 1 <= clusters <= len(features):
        raise ValueError(
            f"k-means: got {clusters} clusters for {len(features)} images, need 1 to as many"
        )
    start = rng.choice(seed, len(features), clusters, rng.SAMPLE).to(features.device)
    centers = F.normalize(features[start], dim=1)
    first, last = distributed.shard_range(len(features))
    own_chunks = _unit_chunks(features[first:last], chunk, features.device)
    for _ in range(iterations):
        _, _, sums, sizes = _assign(own_chunks(), centers)
        sums = distributed.all_sum(sums)
        filled = distributed.all_sum(sizes) > 0
        centers = F.normalize(torch.where(filled[:, None], sums, centers), dim=1)
    assignment = _assign(own_chunks(), centers)[0]
    return distributed.all_gather_rows(assignment), centers


def kmeans_plusplus(
    features: Float[Tensor, "n features"], clusters: int, *, seed: int
) -> Float[Tensor, "clusters features"]:
    """Choose initial centers among a sample of the rows by greedy k-means++.

    Each center is the one of several candidates, drawn with probability proportional to the
    squared distance to the nearest center, that reduces the total distance most.
    """
    sample = rng.choice(seed, len(features), max(5_000, 8 * clusters), rng.SAMPLE)
    rows = F.normalize(features[sample], dim=1)
    trials = 2 + int(math.log(clusters))
    draws = rng.uniform(seed, 1, torch.arange(clusters), rng.SAMPLE, trials)
    chosen = [int(draws[0, 0] * len(rows))]
    distances = (2 - 2 * rows @ rows[chosen[0]]).clamp(min=0)
    for draw in draws[1:]:
        cumulative = distances.double().cumsum(0)
        candidates = torch.searchsorted(cumulative, draw * cumulative[-1], right=True)
        candidates = candidates.clamp(max=len(rows) - 1)
        candidate_distances = (2 - 2 * rows[candidates] @ rows.T).clamp(min=0)
        candidate_distances = torch.minimum(candidate_distances, distances)
        best = int(candidate_distances.sum(1).argmin())
        chosen.append(int(candidates[best]))
        distances = candidate_distances[best]
    return rows[chosen]


def _unit_chunks(
    features: Tensor, chunk: int, device: torch.device
) -> Callable[[], Iterable[Tensor]]:
    """A function that gives the L2-normalized rows in chunks; one chunk is normalized only once."""
    if len(features) <= chunk:
        only = [F.normalize(features.to(device), dim=1)]
        return lambda: only
    return lambda: (F.normalize(rows.to(device), dim=1) for rows in features.split(chunk))


def _lloyd(
    features: Tensor,
    unit_chunks: Callable[[], Iterable[Tensor]],
    centers: Tensor,
    iterations: int,
) -> tuple[Int[Tensor, " n"], Float[Tensor, " n"]]:
    """Iterate until no assignment changes: (cluster of each row, its squared distance)."""
    previous = None
    for iteration in range(iterations + 1):
        assignment, distances, sums, sizes = _assign(unit_chunks(), centers)
        converged = previous is not None and torch.equal(assignment, previous)
        if iteration == iterations or converged:
            break
        previous = assignment
        centers = sums / sizes.clamp(min=1)[:, None]
        empty = (sizes == 0).nonzero()[:, 0]
        if len(empty):  # an empty cluster restarts at the rows that fit worst
            worst = distances.topk(len(empty)).indices.cpu()
            centers[empty] = F.normalize(features[worst].to(centers.device), dim=1)
    return assignment, distances


def _assign(
    unit_chunks: Iterable[Tensor], centers: Tensor
) -> tuple[Int[Tensor, " n"], Float[Tensor, " n"], Tensor, Tensor]:
    """Assign unit rows to their nearest centers: (cluster, squared distance, sums, sizes)."""
    clusters = len(centers)
    device = centers.device
    sums = torch.zeros_like(centers)
    sizes = centers.new_zeros(clusters)
    assignments = []
    distances = []
    for rows in unit_chunks:
        # |row - center|² is 1 - 2 (row·center - |center|² / 2)
        scores = inner_products(rows, centers).sub_(0.5 * centers.square().sum(1))
        best_scores, nearest = scores.max(1)
        assignments.append(nearest)
        distances.append(1 - 2 * best_scores)
        if device.type == "cpu":
            sums.index_add_(0, nearest, rows)
        else:  # on a GPU, index_add_ adds in no fixed order
            sums += F.one_hot(nearest, clusters).to(rows).T @ rows
        sizes += nearest.bincount(minlength=clusters)
    return torch.cat(assignments), torch.cat(distances), sums, sizes
