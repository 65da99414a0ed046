"""Sinkhorn-Knopp: assign samples to prototypes so that every prototype gets an equal share.

Both functions keep one potential per prototype, in logarithms, so that no epsilon overflows. A
round scales the prototypes to equal shares, then each sample to a sum of 1 (a softmax).
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from meanshift.runtime import distributed


@torch.no_grad()
def sinkhorn(
    scores: Float[Tensor, "samples prototypes"], *, epsilon: float = 0.05, iterations: int = 3
) -> Float[Tensor, "samples prototypes"]:
    """The soft assignments of SwAV, which sum to 1 for each sample.

    With several processes, each has samples of its own and the shares are those of all of them.
    """
    logits = scores.to(torch.promote_types(scores.dtype, torch.float32)) / epsilon
    totals = distributed.all_gather_rows(logits.logsumexp(0, keepdim=True)).logsumexp(0)
    potentials = -totals
    codes = (logits + potentials).softmax(1)
    for _ in range(iterations - 1):
        potentials = potentials - _log(distributed.all_sum(codes.sum(0)))
        codes = (logits + potentials).softmax(1)
    return codes


@torch.no_grad()
def balanced_labels(
    features: Float[Tensor, "n features"],
    prototypes: Float[Tensor, "prototypes features"],
    *,
    epsilon: float,
    iterations: int = 100,
    tolerance: float = 0.05,
    chunk: int = 16_384,
) -> Int[Tensor, " n"]:
    """The hard labels of SeLa: the largest assignment of each row of a whole dataset.

    It ends after `iterations` rounds, or when shares differ from equal ones by the fraction
    `tolerance` on average. The scores are computed again in each round, in chunks, so that memory
    does not grow with n. Several processes, which all have the same features, divide the rows.
    """
    first, last = distributed.shard_range(len(features))
    chunks = features[first:last].split(chunk)
    potentials = prototypes.new_zeros(len(prototypes))
    for _ in range(iterations):
        codes = ((rows @ prototypes.T / epsilon + potentials).softmax(1) for rows in chunks)
        sums = sum((part.sum(0) for part in codes), torch.zeros_like(potentials))
        shares = distributed.all_sum(sums) * (len(prototypes) / len(features))
        if float((shares - 1).abs().mean()) < tolerance:
            break
        potentials = potentials - _log(shares)
    labels = [(rows @ prototypes.T / epsilon + potentials).argmax(1) for rows in chunks]
    return distributed.all_gather_rows(torch.cat(labels))


def _log(shares: Tensor) -> Tensor:
    """The logarithm; finite also for a share that is 0 after rounding."""
    return shares.clamp(min=torch.finfo(shares.dtype).tiny).log()
