"""The variance and covariance terms of VICReg: embeddings that keep their variety by themselves.

This is ours, not the paper's. Mean Shift keeps its variety by a target that changes slowly, which
takes long. With these terms the target may follow quickly, so that a short run learns more
(docs/experiments.md). There are no negatives.

Paper: Bardes, Ponce, LeCun 2022, https://arxiv.org/abs/2105.04906
"""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from meanshift.methods.base import StepOutput
from meanshift.runtime import distributed


class Decorrelation:
    """Adds a loss for embeddings that vary too little or whose dimensions are correlated.

    `variance` weighs the mean of max(0, 1 - std) over the dimensions, `covariance` the sum of the
    squared covariances of different dimensions divided by the number of dimensions. The statistics
    are those of the batches of all processes. With both weights 0 nothing is computed.
    """

    def __init__(self, variance: float, covariance: float) -> None:
        self.variance = variance
        self.covariance = covariance

    def add_to(self, output: StepOutput, embeddings: Float[Tensor, "batch dim"]) -> StepOutput:
        """Return the output of a step with this loss added for its online embeddings."""
        if not (self.variance or self.covariance):
            return output
        with torch.autocast(embeddings.device.type, enabled=False):
            low, correlated = variance_and_covariance(embeddings.float())
        penalty = self.variance * low + self.covariance * correlated
        metrics = {**output.metrics, "decorrelation": (penalty.detach(), len(embeddings))}
        return replace(output, loss=output.loss + penalty, metrics=metrics)


def variance_and_covariance(
    rows: Float[Tensor, "batch dim"],
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """The two terms, over the rows of all processes."""
    covariance = _covariance(rows)
    variances = covariance.diagonal()
    low = (1 - (variances + 1e-4).sqrt()).relu().mean()
    correlated = (covariance.square().sum() - variances.square().sum()) / len(covariance)
    return low, correlated


def _covariance(rows: Float[Tensor, "batch dim"]) -> Float[Tensor, "dim dim"]:
    """The unbiased covariance of the rows of all processes, with a gradient."""
    count = distributed.all_sum(rows.new_full((), float(len(rows))))
    centered = rows - distributed.all_sum(rows.sum(0)) / count
    return distributed.all_sum(centered.mT @ centered) / (count - 1)
