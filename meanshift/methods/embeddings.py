"""Checks and normalization of embeddings."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn


def check_embedding(embedding: Tensor, dim: int) -> Float[Tensor, "batch dim"]:
    """The embedding, or an error that says which encoder is needed."""
    if embedding.ndim != 2 or embedding.shape[1] != dim:
        raise ValueError(
            f"the encoder gives shape {tuple(embedding.shape)}; need (batch, {dim}): "
            f"pass dim={embedding.shape[-1]} or end the encoder in a layer of {dim} values"
        )
    return embedding


def normalize(embeddings: Tensor) -> Tensor:
    """Unit length, in at least float32 whatever the precision of autocast."""
    wide = embeddings.to(torch.promote_types(embeddings.dtype, torch.float32))
    return nn.functional.normalize(wide, dim=1)
