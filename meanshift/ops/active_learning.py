"""Which samples to label next: typical ones of clusters without a label, then uncertain ones."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from meanshift.ops.kmeans import kmeans
from meanshift.runtime import rng

BATCH = 10
"""samples that are proposed at a time"""
TYPICAL_SIZE = 10
"""samples of a cluster, on average, from which its center is called typical"""
MAX_CANDIDATES = 5000
"""samples of a large set that proposals are chosen from"""


def propose(
    features: Float[Tensor, "n features"],
    labeled: Bool[Tensor, " n"],
    probabilities: Float[Tensor, "n classes"] | None,
    *,
    seed: int = 0,
) -> Int[Tensor, " chosen"]:
    """The rows to label next, most useful first; `probabilities` are those of the newest probe.

    Typical samples come first, of as many clusters as there will be labels: with few labels they
    are worth more than uncertain ones (Hacohen et al., 2022). When the clusters have become small,
    uncertain ones follow.
    """
    unlabeled = (~labeled).nonzero()[:, 0]
    some = unlabeled[rng.choice(seed, len(unlabeled), MAX_CANDIDATES, rng.SAMPLE)]
    rows = torch.cat([some, labeled.nonzero()[:, 0]]).sort().values
    clusters = int(labeled.sum()) + BATCH
    most = len(rows) // TYPICAL_SIZE
    if probabilities is None or clusters <= most:
        clusters = max(BATCH, min(clusters, most))
        chosen = typical_samples(features[rows], labeled[rows], BATCH, clusters=clusters, seed=seed)
    else:
        chosen = uncertain_samples(
            features[rows], probabilities[rows], labeled[rows], BATCH, seed=seed + clusters
        )
    # All that is left may be copies of labeled samples.
    return rows[chosen] if len(chosen) else unlabeled[:BATCH]


def typical_samples(
    features: Float[Tensor, "n features"],
    labeled: Bool[Tensor, " n"],
    count: int,
    *,
    clusters: int,
    seed: int = 0,
) -> Int[Tensor, " chosen"]:
    """The sample nearest to the center of each cluster without a label, largest cluster first.

    There may be fewer than `count` such clusters.
    """
    assignment, _ = kmeans(features, min(clusters, len(features)), seed=seed)
    unit = F.normalize(features, dim=1)
    clusters = int(assignment.max()) + 1
    centers = torch.zeros(clusters, unit.shape[1]).index_add_(0, assignment, unit)
    closeness = (unit * F.normalize(centers, dim=1)[assignment]).sum(1)
    sizes = assignment.bincount(minlength=clusters)
    covered = torch.zeros(clusters, dtype=torch.bool)
    covered[assignment[labeled]] = True
    order = sizes.masked_fill(covered, 0).argsort(descending=True, stable=True)
    open_clusters = order[: int((~covered & (sizes > 0)).sum())][:count].tolist()
    chosen = [int(_nearest(closeness, assignment == cluster)) for cluster in open_clusters]
    return torch.tensor(chosen, dtype=torch.int64)


def uncertain_samples(
    features: Float[Tensor, "n features"],
    probabilities: Float[Tensor, "n classes"],
    labeled: Bool[Tensor, " n"],
    count: int,
    *,
    pool: int = 30,
    seed: int = 0,
) -> Int[Tensor, " chosen"]:
    """Samples whose two likeliest classes are nearly equally likely, and that differ.

    The `pool` * `count` least certain ones are clustered, and the least certain of each cluster is
    chosen.
    """
    highest = probabilities.topk(2, dim=1).values
    margins = (highest[:, 0] - highest[:, 1]).masked_fill(labeled, torch.inf)
    unlabeled = int((~labeled).sum())
    candidates = margins.argsort(stable=True)[: min(pool * count, unlabeled)]
    count = min(count, len(candidates))
    if not count:
        return candidates
    assignment, _ = kmeans(features[candidates], count, seed=seed)
    # Candidates are in the order of their margins, so the first of a cluster is its least certain.
    first = torch.full((count,), len(candidates)).scatter_reduce_(
        0, assignment, torch.arange(len(candidates)), "amin"
    )
    return candidates[first.sort().values]


def _nearest(closeness: Float[Tensor, " n"], members: Bool[Tensor, " n"]) -> Int[Tensor, ""]:
    return closeness.masked_fill(~members, -torch.inf).argmax()
