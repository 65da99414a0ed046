"""Names the process that failed: each leaves its status in the store that all processes share."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from typing import Any

from torch import distributed


class RankFailure(OSError):
    """Another process does not answer any more; the message names it."""


class RankStatus:
    """The status of each process in the shared store: its host, and why it ended."""

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self.store = store
        self.rank = rank
        self.world_size = world_size
        store.set(f"host/{self.rank}", socket.gethostname())

    def report_failure(self, error: BaseException) -> None:
        """Store why this process ends.

        The store may end with the first process, which therefore gives others time to read it.
        """
        with suppress(RuntimeError):
            self.store.set(f"failure/{self.rank}", first_line(error))
            if self.rank == 0:
                time.sleep(2.0)

    def describe_failure(self, timeout: float) -> str:
        """Find out which processes do not answer, and return the error message."""
        patience = min(15.0, max(2.0, timeout / 4))
        answers: list[str] = []

        def ask() -> None:
            with suppress(RuntimeError):
                answers.append(self._find_missing(patience, timeout))

        thread = threading.Thread(target=ask, daemon=True)  # the store itself may never answer
        thread.start()
        thread.join(patience + 5.0)
        # The store belongs to the first process, or to torchrun on its host.
        cause = answers[0] if answers else "process 0, or the host that it runs on, does not answer"
        return (
            f"process {self.rank} of {self.world_size} gives up: {cause}; the same command "
            f"continues from the last checkpoint, and torchrun --max-restarts 3 does so by itself"
        )

    def _find_missing(self, patience: float, timeout: float) -> str:
        """All processes that still run report it; the others are missing."""
        self.store.set(f"alive/{self.rank}", "yes")
        deadline = time.monotonic() + patience
        missing: list[int] = []
        while time.monotonic() < deadline:
            missing = [r for r in range(self.world_size) if not self.store.check([f"alive/{r}"])]
            if len(missing) == 1:
                break
            time.sleep(0.1)
        causes = "; ".join(self._describe(rank, timeout) for rank in missing)
        return causes or "the connection broke, though all processes still run"

    def _describe(self, rank: int, timeout: float) -> str:
        host = self.store.get(f"host/{rank}").decode()
        if self.store.check([f"failure/{rank}"]):
            reason = self.store.get(f"failure/{rank}").decode()
            return f"process {rank} on {host} left ({reason})"
        return (
            f"process {rank} on {host} does not answer (it was killed, or hangs for {timeout:g} s)"
        )


def is_connection_loss(error: BaseException) -> bool:
    """Whether a collective call failed, rather than something in this process."""
    words = ("gloo", "timed out", "connection closed", "connection reset", "nccl", "watchdog")
    text = str(error).lower()
    return isinstance(error, distributed.DistError) or (
        isinstance(error, RuntimeError) and any(word in text for word in words)
    )


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type."""
    return (str(error) or type(error).__name__).splitlines()[0]
