"""Printing in several processes: the first one prints, and an error of all is printed once."""

from __future__ import annotations

import os
import sys
import traceback

from meanshift.runtime.errors import SharedError


def world_size() -> int:
    """The number of processes that `torchrun` started, without importing torch."""
    return int(os.environ.get("WORLD_SIZE", 1))


def rank() -> int:
    """The number of this process among them."""
    return int(os.environ.get("RANK", 0)) if world_size() > 1 else 0


def print_status(text: str) -> None:
    """Print to standard error, in the first process only."""
    if rank() == 0:
        print(text, file=sys.stderr)


def print_result(text: str) -> None:
    """Print to standard output, in the first process only."""
    if rank() == 0:
        print(text)


def print_error(error: Exception) -> None:
    """Print an error: once if every process raises it, else with the number of the process.

    With the environment variable MEANSHIFT_TRACEBACK the traceback is printed before it.
    """
    if rank() > 0 and isinstance(error, SharedError):
        return
    if os.environ.get("MEANSHIFT_TRACEBACK"):
        traceback.print_exception(error)
    process = f" process {rank()}:" if rank() else ""
    print(f"meanshift:{process} {error}", file=sys.stderr)


def check_single_process(command: str) -> None:
    """Refuse several processes for a command in which they would overwrite each other's files."""
    if world_size() > 1:
        raise SharedError(
            f"{world_size()} processes were started; meanshift {command} needs one: leave torchrun "
            f"out (pretrain, embed, evaluate knn and evaluate detect work in several)"
        )
