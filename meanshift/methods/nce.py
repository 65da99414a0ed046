"""Noise-contrastive estimation with one constant normalizer (Wu et al. 2018, used by PIRL)."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from meanshift.runtime import distributed


class NCELoss(nn.Module):
    """Tell the row of a sample from negatives that are drawn uniformly from `samples` rows.

    A row has the probability P = exp(similarity / temperature) / Z. Z is estimated from the first
    batch in training, over all processes, and then constant, as in VISSL; in logarithms, so that no
    temperature overflows.
    """

    log_normalizer: Float[Tensor, ""]
    """log Z; minus infinity before the first batch"""

    def __init__(self, samples: int, temperature: float) -> None:
        super().__init__()
        self.samples = samples
        self.temperature = temperature
        self.register_buffer("log_normalizer", torch.tensor(-torch.inf))

    def forward(
        self,
        embeddings: Float[Tensor, "batch dim"],
        rows: Float[Tensor, "batch dim"],
        negatives: Float[Tensor, "negatives dim"],
    ) -> Float[Tensor, ""]:
        """The logistic loss of P against m/samples, the probability of m negatives."""
        with torch.autocast(embeddings.device.type, enabled=False):
            positive = (embeddings * rows.to(embeddings)).sum(1, keepdim=True)
            similar = torch.cat([positive, embeddings @ negatives.to(embeddings).T], 1)
            exponents = similar / self.temperature
            log_noise = math.log(len(negatives) / self.samples)
            logits = exponents - self._log_z(exponents.detach()) - log_noise
            return (F.softplus(-logits[:, 0]) + F.softplus(logits[:, 1:]).sum(1)).mean()

    def _log_z(self, exponents: Float[Tensor, "batch compared"]) -> Float[Tensor, ""]:
        own = exponents.logsumexp((0, 1))
        count = own.new_full((), exponents.numel())
        totals = distributed.all_gather_rows(
            torch.stack([own, count])[None], [1] * distributed.world_size()
        )
        mean = totals[:, 0].logsumexp(0) - totals[:, 1].sum().log()
        known = self.log_normalizer.to(mean)
        log_z = torch.where(known.isfinite(), known, mean + math.log(self.samples))
        if self.training:
            self.log_normalizer.copy_(log_z)
        return log_z
