"""k-means on frozen features, compared with the labels: NMI, ARI and Hungarian accuracy."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int
from torch import Tensor

from meanshift.evaluation.context import EvaluationContext
from meanshift.evaluation.result import Result
from meanshift.ops.kmeans import kmeans
from meanshift.runtime.extras import require


def evaluate(
    context: EvaluationContext, *, clusters: int = 0, iterations: int = 20, restarts: int = 0
) -> Result:
    """Cluster the training images; by default into as many clusters as there are classes."""
    labeled = context.test_source is not None
    if not clusters and not labeled:
        raise ValueError(f"{context.data}: no labels to count classes by; type --clusters N")
    train = context.train
    classes = len(train.labels.unique()) if labeled else 0
    clusters = clusters or classes
    # With many clusters the start matters less.
    restarts = restarts or (3 if clusters <= 100 else 1)
    assigned, mean_distance = kmeans(
        train.features,
        clusters,
        iterations=iterations,
        restarts=restarts,
        seed=context.seed,
        device=context.device,
    )
    metrics = agreement(assigned, train.labels) if labeled else {}
    sizes = assigned.bincount(minlength=clusters)
    metrics["mean squared distance"] = mean_distance
    metrics["empty clusters"] = float((sizes == 0).sum())
    settings = {
        "clusters": clusters,
        "iterations": iterations,
        "restarts": restarts,
        "start": "greedy k-means++ on a sample",
        "features": "L2-normalized",
        "of": "training images",
    }
    titles = [train.source.title(index) for index in range(len(train.source))]
    arrays = {"clusters": assigned.numpy(), "titles": np.array(titles)}
    options = {} if clusters == classes else {"clusters": clusters}
    return Result("cluster", metrics, settings, arrays, options=options)


def agreement(assigned: Int[Tensor, " n"], labels: Int[Tensor, " n"]) -> dict[str, float]:
    """How clusters agree with labels, in percent: NMI, ARI, accuracy of the best matching."""
    require("sklearn", extra="report", what="cluster metrics")
    from scipy.optimize import linear_sum_assignment
    from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score

    truth = labels.numpy()
    found = assigned.numpy()
    table = np.zeros((found.max() + 1, truth.max() + 1), dtype=np.int64)
    np.add.at(table, (found, truth), 1)
    rows, columns = linear_sum_assignment(table, maximize=True)
    return {
        "NMI": 100 * float(normalized_mutual_info_score(truth, found)),
        "ARI": 100 * float(adjusted_rand_score(truth, found)),
        "Hungarian accuracy": 100 * float(table[rows, columns].sum() / len(truth)),
    }
