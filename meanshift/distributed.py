"""All talk with other processes; every call is valid in one process on a CPU."""

from __future__ import annotations

import os

from torch import distributed


def world_size() -> int:
    """How many processes run this program together, as `torchrun` tells it."""
    if distributed.is_initialized():
        return distributed.get_world_size()
    return int(os.environ.get("WORLD_SIZE", 1))
