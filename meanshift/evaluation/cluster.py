"""k-means on frozen features, against the labels where there are any: NMI, ARI, Hungarian."""

from __future__ import annotations

import math

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from meanshift.evaluation.context import EvaluationContext, Result
from meanshift.runtime import rng


def evaluate(
    subject: EvaluationContext, *, clusters: int = 0, iterations: int = 20, restarts: int = 0
) -> Result:
    """Cluster the training images into as many groups as there are classes (or `clusters`)."""
    if not clusters and subject.sources[1] is None:
        raise ValueError(f"{subject.data}: no labels to count classes by; say --clusters N")
    part = subject.train
    labels = None if subject.sources[1] is None else part.labels
    clusters = clusters or len(part.labels.unique())
    restarts = restarts or (3 if clusters <= 100 else 1)  # with many clusters a start matters less
    assigned, spread = kmeans(
        part.features,
        clusters,
        iterations=iterations,
        restarts=restarts,
        seed=subject.seed,
        device=subject.device,
    )
    figures = {} if labels is None else agreement(assigned, labels)
    sizes = assigned.bincount(minlength=clusters)
    figures |= {"mean squared distance": spread, "empty clusters": float((sizes == 0).sum())}
    settings = {
        "clusters": clusters,
        "iterations": iterations,
        "restarts": restarts,
        "start": "greedy k-means++ on a sample",
        "features": "L2-normalized",
        "of": "training images",
    }
    files = [part.source.title(index) for index in range(len(part.source))]
    kept = {"assigned": assigned.numpy(), "image": np.array(files)}
    return Result("cluster", figures, settings, kept)


def agreement(assigned: Int[Tensor, " n"], labels: Int[Tensor, " n"]) -> dict[str, float]:
    """How clusters agree with labels, in percent: NMI, ARI, accuracy of the best matching."""
    from scipy.optimize import linear_sum_assignment
    from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score

    truth, found = labels.numpy(), assigned.numpy()
    table = np.zeros((found.max() + 1, truth.max() + 1), dtype=np.int64)
    np.add.at(table, (found, truth), 1)
    rows, columns = linear_sum_assignment(table, maximize=True)
    return {
        "NMI": 100 * float(normalized_mutual_info_score(truth, found)),
        "ARI": 100 * float(adjusted_rand_score(truth, found)),
        "Hungarian accuracy": 100 * float(table[rows, columns].sum() / len(truth)),
    }


def groups(features: Float[Tensor, "n features"], count: int = 10) -> tuple[list[str], Tensor]:
    """Names and clusters by which images without labels are colored, the same in every place."""
    count = max(1, min(count, len(features)))
    assigned, _ = kmeans(features, count, restarts=3)
    return [f"cluster {i + 1}" for i in range(count)], assigned


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
    """Lloyd's k-means on unit rows, the best of some starts: (cluster of each row, mean distance²).

    The rows are read in chunks, so they may be a mapped file larger than memory.
    """
    if not 1 <= clusters <= len(features):
        raise ValueError(
            f"k-means: got {clusters} clusters for {len(features)} images, need 1 to as many"
        )
    device, best = device or features.device, None
    for start in range(restarts):
        centers = _starts(features, clusters, rng.derive_seed(seed, start, rng.PROBE)).to(device)
        before = None
        for turn in range(iterations + 1):
            parts, far = [], []
            sums, sizes = torch.zeros_like(centers), centers.new_zeros(clusters)
            for rows in features.split(chunk):
                rows = F.normalize(rows.to(device), dim=1)
                # |row - center|² orders as -2 row·center + |center|²
                score = torch.addmm(-0.5 * centers.square().sum(1), rows, centers.T)
                value, which = score.max(1)
                parts.append(which)
                far.append(1 - 2 * value)
                if device.type == "cpu":
                    sums.index_add_(0, which, rows)
                else:  # where adding by index has no fixed order
                    sums += F.one_hot(which, clusters).to(rows).T @ rows
                sizes += which.bincount(minlength=clusters)
            assigned, distance = torch.cat(parts), torch.cat(far)
            if turn == iterations or (before is not None and torch.equal(assigned, before)):
                break
            before = assigned
            empty = (sizes == 0).nonzero()[:, 0]
            centers = sums / sizes.clamp(min=1)[:, None]
            if len(empty):  # an empty cluster starts again at the images that fit worst
                worst = distance.topk(len(empty)).indices.cpu()
                centers[empty] = F.normalize(features[worst].to(device), dim=1)
        spread = float(distance.double().mean())
        if best is None or spread < best[1]:
            best = assigned.cpu(), spread
    assert best is not None
    return best


def _starts(features: Tensor, clusters: int, seed: int) -> Tensor:
    """Greedy k-means++ on a sample of the rows: of some candidates the one that helps most."""
    chosen = rng.choice(seed, len(features), max(5_000, 8 * clusters), rng.PROBE)
    rows, tries = F.normalize(features[chosen], dim=1), 2 + int(math.log(clusters))
    draws = rng.uniform(seed, 1, torch.arange(clusters), rng.PROBE, tries)
    picked = [int(draws[0, 0] * len(rows))]
    distance = (2 - 2 * rows @ rows[picked[0]]).clamp(min=0)
    for draw in draws[1:]:
        reach = distance.double().cumsum(0)
        candidates = torch.searchsorted(reach, draw * reach[-1], right=True).clamp(
            max=len(rows) - 1
        )
        would = torch.minimum((2 - 2 * rows[candidates] @ rows.T).clamp(min=0), distance)
        best = int(would.sum(1).argmin())
        picked.append(int(candidates[best]))
        distance = would[best]
    return rows[picked]
