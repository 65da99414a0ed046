"""One voice of several processes: what is said by the first, and what each must say itself."""

from __future__ import annotations

import os
import sys


class SharedError(ValueError):
    """A mistake that every process makes, so that one of them need say it."""


def world_size() -> int:
    """How many `torchrun` started, without loading torch for it."""
    return int(os.environ.get("WORLD_SIZE", 1))


def rank() -> int:
    return int(os.environ.get("RANK", 0)) if world_size() > 1 else 0


def say(text: str, *, result: bool = False) -> None:
    """A line, once; what was asked for goes to standard output."""
    if rank() == 0:
        print(text, file=sys.stdout if result else sys.stderr)


def complain(error: Exception) -> None:
    """What went wrong: once where all know of it, else with the number of the process."""
    shared = rank() and type(error).__name__ == "Shared"
    if not shared:
        who = f" process {rank()}:" if rank() else ""
        print(f"meanshift:{who} {error}", file=sys.stderr)


def refuse_many(command: str) -> None:
    """Most commands are for one process; several would write over one another."""
    if world_size() > 1:
        raise SharedError(
            f"{world_size()} processes were started; meanshift {command} is for one: leave torchrun "
            f"out (pretrain, embed, evaluate knn and evaluate detect work in several)"
        )
