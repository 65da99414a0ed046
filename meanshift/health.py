"""Label-free signs of learning: effective rank, spread, neighbour stability, collapse alarm."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor


@torch.no_grad()
def effective_rank(embeddings: Float[Tensor, "batch dim"]) -> float:
    """exp(entropy) of the centred embeddings' spectrum: how many directions are really in use."""
    centred = embeddings.float() - embeddings.float().mean(0)
    energy = torch.linalg.svdvals(centred).square()
    if float(energy.sum()) <= 1e-12 * embeddings.numel():
        return 0.0
    share = energy / energy.sum()
    return float(torch.special.entr(share).sum().exp())


@torch.no_grad()
def spread(embeddings: Float[Tensor, "batch dim"]) -> float:
    """How far unit vectors are from all being one: 0 when they coincide, 1 when their mean is 0."""
    return float((1 - embeddings.float().mean(0).square().sum()).clamp(min=0).sqrt())


def stability(before: Int[Tensor, "n k"], now: Int[Tensor, "n k"]) -> float:
    """Share of neighbours that a probe set kept between two moments."""
    return float((before[:, :, None] == now[:, None, :]).any(2).float().mean())


def collapse(*, rank: float, spread: float, same_view: bool) -> str | None:
    """A warning with its likely cause when the embeddings have lost their variety, else None."""
    if spread >= 0.15 and rank >= 2.5:
        return None
    cause = (
        "both encoders see the same view (views.same_view): give them different views"
        if same_view
        else "the learning rate may be too high (halve train.lr), the target too quick "
        "(method.momentum 0.99 or more) or the views too alike (views.online strong)"
    )
    return (
        f"collapse: the embeddings are nearly all the same (spread {spread:.3f}, "
        f"effective rank {rank:.1f}); likely cause: {cause}"
    )
