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
    batch in training, over all processes, and then constant, as in VISSL.
    """

    normalizer: Float[Tensor, ""]
    """Z; 0 before the first batch"""

    def __init__(self, samples: int, temperature: float) -> None:
        super().__init__()
        self.samples = samples
        self.temperature = temperature
        self.register_buffer("normalizer", torch.zeros(()))

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
            logits = exponents - self._normalize(exponents.detach()).log() - log_noise
            return (F.softplus(-logits[:, 0]) + F.softplus(logits[:, 1:]).sum(1)).mean()

    def _normalize(self, exponents: Float[Tensor, "batch compared"]) -> Float[Tensor, ""]:
        estimate = exponents.exp().mean() * self.samples
        distributed.all_mean_(estimate)
        z = torch.where(self.normalizer > 0, self.normalizer.to(estimate), estimate)
        if self.training:
            self.normalizer.copy_(z)
        return z
