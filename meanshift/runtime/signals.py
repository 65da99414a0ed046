"""Signals that ask a run to stop: it finishes its step, saves a checkpoint, and exits."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

REQUEUE = 75
"""exit code (EX_TEMPFAIL) of a run that a scheduler stopped and should start again"""


class Stopped(Exception):
    """A signal asked the run to stop, and the run has saved a checkpoint."""

    def __init__(self, signal_number: int, step: int) -> None:
        super().__init__(f"stopped and saved at step {step}; the same command continues from there")
        terminated = signal_number == signal.SIGTERM
        self.code = REQUEUE if terminated else 128 + signal_number


@contextmanager
def catch_signals(*, patience: float = 0.0) -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM, so that a step is finished and saved before the run stops.

    A second signal stops the run at once, but not in the first `patience` seconds: a launcher
    forwards a signal that the whole process group has received.
    """
    received: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    first_time = time.monotonic()

    def handle(number: int, _: object) -> None:
        nonlocal first_time
        if not received:
            received.append(number)
            first_time = time.monotonic()
            print("stopping after this step, to save it; once more stops at once", file=sys.stderr)
        elif time.monotonic() - first_time >= patience:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    try:
        previous = [signal.signal(number, handle) for number in numbers]
    except ValueError:  # only the main thread may set handlers
        yield received
        return
    try:
        yield received
    finally:
        for number, handler in zip(numbers, previous, strict=True):
            signal.signal(number, handler)
