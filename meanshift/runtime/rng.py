"""Random numbers as a pure function of (seed, epoch, sample id, stream), without hidden state.

Every random choice of a run has an address. A view can be computed again years later, by any number
of loader workers, on any device, and a run that was killed continues with the same bits.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

# Streams separate the uses of randomness. The numbers are frozen: changing one changes every run.
TARGET = 0
"""target views"""
ONLINE = 1
"""online views"""
ORDER = 2
"""order of the images in an epoch"""
SPLIT = 3
"""splits of a dataset"""
SAMPLE = 4
"""samples of images: snapshot images, k-means, figures"""
REPLACEMENT = 5
"""images that replace unreadable ones"""
NETWORK = 6
"""randomness inside a network, such as dropout"""
INITIAL = 7
"""initial weights"""
SHUFFLE = 8
"""permutation of images over processes"""
INITIAL_IMAGES = 9
"""images that the encoder is initialized from, and samples of their patches"""
NEGATIVES = 10
"""samples that a step is contrasted with"""


def bits(
    seed: int, epoch: int, ids: Int[Tensor, " n"], stream: int, count: int
) -> Int[Tensor, "n count"]:
    """Return `count` words of 64 random bits per id: SplitMix64's finalizer over the address."""
    key = _mix(_mix(_mix(torch.tensor(seed) ^ _GOLDEN) ^ epoch) ^ stream)
    return _mix(
        _mix(key ^ ids.to("cpu", torch.int64))[:, None] + _GOLDEN * torch.arange(1, count + 1)
    )


def uniform(
    seed: int, epoch: int, ids: Int[Tensor, " n"], stream: int, count: int
) -> Float[Tensor, "n count"]:
    """Return `count` numbers in [0, 1) per id, in float64."""
    return _shift_right(bits(seed, epoch, ids, stream, count), 11).double() * 2.0**-53


def permutation(seed: int, epoch: int, size: int) -> Int[Tensor, " size"]:
    """Return the order in which an epoch visits `size` images."""
    return bits(seed, epoch, torch.arange(size), ORDER, 1)[:, 0].argsort(stable=True)


def choice(seed: int, size: int, count: int, stream: int) -> Int[Tensor, " chosen"]:
    """Return `count` random indices below `size` (all, if there are no more) in ascending order."""
    rank = bits(seed, 0, torch.arange(size), stream, 1)[:, 0]
    return rank.argsort(stable=True)[:count].sort().values


def derive_seed(seed: int, step: int, stream: int) -> int:
    """Return a seed for a library's own generator (initial weights, dropout)."""
    return int(bits(seed, step, torch.zeros(1, dtype=torch.int64), stream, 1)) & (2**63 - 1)


_GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # torch has only signed 64-bit integers


def _shift_right(words: Tensor, by: int) -> Tensor:
    """A logical shift: torch's `>>` is arithmetic."""
    return (words >> by) & ((1 << (64 - by)) - 1)


def _mix(words: Tensor) -> Tensor:
    words = (words ^ _shift_right(words, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    words = (words ^ _shift_right(words, 27)) * (0x94D049BB133111EB - 2**64)
    return words ^ _shift_right(words, 31)
