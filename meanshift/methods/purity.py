"""Purity: how many of the neighbors have the label of their query. For metrics, never the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from meanshift.config import Views, ViewSpec
from meanshift.runtime import distributed

if TYPE_CHECKING:
    from meanshift.methods.base import Batch
    from meanshift.methods.msf import MeanShift


def neighbor_metrics(
    near_ids: Tensor | None, near_labels: Tensor | None, ids: Tensor | None, labels: Tensor | None
) -> dict[str, tuple[Tensor, Tensor | int]]:
    """Metrics of the neighbors 2..k of each query, as (mean, number of queries).

    `purity` is the paper's: the fraction of them with the query's label, where it is known (>= 0).
    `same_image` is the fraction of queries with an older view of the same image among them.
    """
    metrics: dict[str, tuple[Tensor, Tensor | int]] = {}
    if near_labels is not None and labels is not None:
        known = (labels >= 0).float()
        pure = (near_labels == labels[:, None]).float().mean(1)
        metrics["purity"] = ((pure * known).sum() / known.sum().clamp(min=1), known.sum())
    if near_ids is not None and ids is not None:
        metrics["same_image"] = ((near_ids == ids[:, None]).any(1).float().mean(), len(ids))
    return metrics


@torch.no_grad()
def purity_of_views(
    method: MeanShift, operators: Views, batches: Callable[[Sequence[ViewSpec]], Iterator[Batch]]
) -> dict[str, float]:
    """The purity of the neighbors in the present bank, by weak and by strong target views.

    Several processes share the images and search a sharded bank together.
    """
    if method.bank is None or method.k < 2 or method.bank.filled < method.k:
        return {}
    weak = operators.spec("weak", "weak", index=0)
    strong = operators.spec("strong", "strong", index=1)
    sums = torch.zeros(3, dtype=torch.float64)  # of weak views, of strong views, of images
    for batch in batches([weak, strong]):
        assert batch.labels is not None
        for index, view in enumerate(batch.views):
            u = method.project(view)
            output = method.compare(u, u, ids=batch.ids, labels=batch.labels)
            purity, count = output.metrics["purity"]
            sums[index] += purity.cpu() * torch.as_tensor(count).cpu()
        sums[2] += (batch.labels >= 0).sum().cpu()
    weak_sum, strong_sum, count = distributed.all_sum(sums).tolist()
    if not count:
        return {}
    return {"purity_weak": weak_sum / count, "purity_strong": strong_sum / count}
