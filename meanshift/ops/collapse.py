"""Signs of learning without labels: effective rank, spread, neighbor stability, collapse."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor


@torch.no_grad()
def effective_rank(embeddings: Float[Tensor, "batch dim"]) -> float:
    """Return exp(entropy) of the spectrum of the centered embeddings: the dimensions in use."""
    if not embeddings.isfinite().all():
        return 0.0
    centered = embeddings.float() - embeddings.float().mean(0)
    energy = torch.linalg.svdvals(centered).square()
    if float(energy.sum()) <= 1e-12 * embeddings.numel():
        return 0.0
    fraction = energy / energy.sum()
    return float(torch.special.entr(fraction).sum().exp())


@torch.no_grad()
def spread(embeddings: Float[Tensor, "batch dim"]) -> float:
    """Return 0 if all unit vectors are equal, 1 if their mean is 0."""
    return float((1 - embeddings.float().mean(0).square().sum()).clamp(min=0).sqrt())


def neighbor_stability(before: Int[Tensor, "n k"], now: Int[Tensor, "n k"]) -> float:
    """Return the fraction of neighbors that two snapshots have in common."""
    return float((before[:, :, None] == now[:, None, :]).any(2).float().mean())


def collapse_warning(
    *, rank: float, spread: float, dim: int, hint: str, agreement: float | None = None
) -> str | None:
    """Return a warning with its likely cause if the embeddings have collapsed, else None.

    There are two kinds: all embeddings are equal (no spread), or the views are predicted perfectly
    while few of the `dim` dimensions are in use. Healthy runs agree less while their rank is low.
    The positive control is `method.same_view`; its measurements are in docs/experiments.md.
    """
    constant = spread < 0.1
    trivial = agreement is not None and agreement > 0.95 and rank < min(16, dim / 4)
    if not constant and not trivial:
        return None
    agreement_text = "" if agreement is None else f"agreement {agreement:.2f}, "
    return (
        f"collapse: the embeddings have lost their variety ({agreement_text}spread {spread:.2f}, "
        f"effective rank {rank:.1f}); likely cause: {hint}"
    )
