"""Schedules of a method's settings as plain functions of the progress of training."""

from __future__ import annotations

import math


def cosine_to_one(start: float, fraction: float) -> float:
    """From `start` to 1 along half a cosine: BYOL's schedule of the target's momentum."""
    return 1 - (1 - start) * ((1 + math.cos(math.pi * fraction)) / 2)


def stepwise(first: int, last: int, epoch: int, epochs: int) -> int:
    """From `first` to `last` in equal stretches of epochs.

    With fewer epochs than values some values are left out; the last epoch always has `last`.
    """
    if epochs == 1:
        return last
    if epochs <= last - first:
        return first + round((last - first) * epoch / (epochs - 1))
    return first + (last - first + 1) * epoch // epochs
