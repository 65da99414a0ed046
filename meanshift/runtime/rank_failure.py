"""Which process is missing, and why: what each leaves in the common store for those that wait."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from typing import Any

from torch import distributed


class RankFailure(OSError):
    """Another process does not answer any more; the message says which."""


class AddressBook:
    """What processes leave in the common store, for those that miss them."""

    def __init__(self, store: Any, own: int, count: int) -> None:
        self.store, self.own, self.count = store, own, count
        store.set(f"host/{self.own}", socket.gethostname())

    def leave(self, error: BaseException) -> None:
        """Say why; the first process, which may take the store along, gives others time to read."""
        with suppress(RuntimeError):
            self.store.set(f"left/{self.own}", first_line(error))
            time.sleep(0.0 if self.own else 2.0)

    def who_is_missing(self, timeout: float) -> str:
        """After a silence all who still live say so; it is about those who do not."""
        patience, told = min(15.0, max(2.0, timeout / 4)), list[str]()

        def ask() -> None:
            with suppress(RuntimeError):
                told.append(self._ask(patience, timeout))

        asking = threading.Thread(target=ask, daemon=True)  # a store that hangs never answers
        asking.start()
        asking.join(patience + 5.0)
        # The store is kept by the first process, or by torchrun on its host.
        lost = told[0] if told else "process 0, or the host that it runs on, does not answer"
        return (
            f"process {self.own} of {self.count} gives up: {lost}; the same command continues from "
            f"the last checkpoint, and torchrun --max-restarts 3 does so by itself"
        )

    def _ask(self, patience: float, timeout: float) -> str:
        self.store.set(f"alive/{self.own}", "yes")
        until, missing = time.monotonic() + patience, list[int]()
        while time.monotonic() < until:
            missing = [r for r in range(self.count) if not self.store.check([f"alive/{r}"])]
            if len(missing) == 1:
                break
            time.sleep(0.1)
        told = "; ".join(self._about(one, timeout) for one in missing)
        return told or "the connection broke, though all processes still run"

    def _about(self, one: int, timeout: float) -> str:
        host = self.store.get(f"host/{one}").decode()
        if self.store.check([f"left/{one}"]):
            return f"process {one} on {host} left ({self.store.get(f'left/{one}').decode()})"
        return (
            f"process {one} on {host} does not answer (it was killed, or hangs for {timeout:g} s)"
        )


def is_connection_loss(error: BaseException) -> bool:
    """Whether a collective call failed, rather than something in this process."""
    words = ("gloo", "timed out", "connection closed", "connection reset", "nccl", "watchdog")
    text = str(error).lower()
    return isinstance(error, distributed.DistError) or (
        isinstance(error, RuntimeError) and any(word in text for word in words)
    )


def first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
