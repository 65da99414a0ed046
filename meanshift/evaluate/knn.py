"""k-NN on frozen features: exact, in chunks, plain majority vote, ties to the nearest among the tied."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from meanshift.bank import nearest


@torch.no_grad()
def knn_accuracy(
    train: Float[Tensor, "n features"],
    train_labels: Int[Tensor, " n"],
    test: Float[Tensor, "m features"],
    test_labels: Int[Tensor, " m"],
    *,
    ks: Sequence[int] = (1, 20),
    chunk: int = 1024,
) -> dict[str, float]:
    """Top-1 accuracy in percent for each k, by cosine similarity: `{"1-NN": ..., "20-NN": ...}`."""
    most = max(ks)
    if most > len(train):
        raise ValueError(f"k={most} neighbours among {len(train)} pictures; use a smaller k")
    classes = int(torch.cat([train_labels, test_labels]).max()) + 1
    train, right = F.normalize(train, dim=1), dict.fromkeys(ks, 0)
    for part, truth in zip(test.split(chunk), test_labels.split(chunk), strict=True):
        found, _ = nearest(F.normalize(part, dim=1), train, most)
        for k in ks:
            right[k] += int((vote(train_labels[found[:, :k]], classes) == truth).sum())
    return {f"{k}-NN": 100 * right[k] / len(test) for k in ks}


def vote(labels: Int[Tensor, "batch k"], classes: int) -> Int[Tensor, " batch"]:
    """The most frequent label of each row; of equally frequent ones the one that stands first."""
    batch, k = labels.shape
    counts = torch.zeros(batch, classes, dtype=torch.int64)
    counts.scatter_add_(1, labels, torch.ones_like(labels))
    earliness = torch.zeros_like(counts)
    rank = torch.arange(k, 0, -1).expand(batch, k)
    earliness.scatter_reduce_(1, labels, rank, "amax", include_self=True)
    return (counts * (k + 1) + earliness).argmax(1)
