"""Label-free signs of learning: effective rank, spread, neighbor stability, collapse alarm."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor


@torch.no_grad()
def effective_rank(embeddings: Float[Tensor, "batch dim"]) -> float:
    """exp(entropy) of the centered embeddings' spectrum: how many directions are really in use."""
    if not embeddings.isfinite().all():
        return 0.0
    centered = embeddings.float() - embeddings.float().mean(0)
    energy = torch.linalg.svdvals(centered).square()
    if float(energy.sum()) <= 1e-12 * embeddings.numel():
        return 0.0
    share = energy / energy.sum()
    return float(torch.special.entr(share).sum().exp())


@torch.no_grad()
def spread(embeddings: Float[Tensor, "batch dim"]) -> float:
    """How far unit vectors are from all being one: 0 when they coincide, 1 when their mean is 0."""
    return float((1 - embeddings.float().mean(0).square().sum()).clamp(min=0).sqrt())


def neighbor_stability(before: Int[Tensor, "n k"], now: Int[Tensor, "n k"]) -> float:
    """Share of neighbors that a probe set kept between two moments."""
    return float((before[:, :, None] == now[:, None, :]).any(2).float().mean())


def collapse_warning(
    *, rank: float, spread: float, dim: int, hint: str, agreement: float | None = None
) -> str | None:
    """A warning with its likely cause if the embeddings have lost their variety, else None.

    Two kinds: all embeddings are one (no spread), or the views are predicted perfectly while few of
    the `dim` directions are in use. Healthy runs agree less as long as their rank is low. The
    positive control is `method.same_view`; its measurements are in docs/experiments.md.
    """
    constant = spread < 0.1
    trivial = agreement is not None and agreement > 0.95 and rank < min(16, dim / 4)
    if not constant and not trivial:
        return None
    agreed = "" if agreement is None else f"agreement {agreement:.2f}, "
    return (
        f"collapse: the embeddings have lost their variety ({agreed}spread {spread:.2f}, "
        f"effective rank {rank:.1f}); likely cause: {hint}"
    )
