"""All talk with other processes; every call is valid in one process on a CPU."""

from __future__ import annotations

import os

from torch import distributed


def rank() -> int:
    """This process's number; 0 when there is only one."""
    return (
        distributed.get_rank() if distributed.is_initialized() else int(os.environ.get("RANK", 0))
    )


def world_size() -> int:
    """How many processes run this program together, as `torchrun` tells it."""
    if distributed.is_initialized():
        return distributed.get_world_size()
    return int(os.environ.get("WORLD_SIZE", 1))
