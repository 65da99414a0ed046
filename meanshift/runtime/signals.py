"""Signals that ask a run to stop: it finishes its step, saves itself, and leaves."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

REQUEUE = 75
"""exit code of a run that a scheduler stopped and that wants to go on (EX_TEMPFAIL)"""


class Stopped(Exception):
    """A signal asked the run to stop, and it has saved itself."""

    def __init__(self, signal_number: int, step: int) -> None:
        super().__init__(f"stopped and saved at step {step}; the same command continues from there")
        ended = signal_number == signal.SIGTERM
        self.code = REQUEUE if ended else 128 + signal_number


@contextmanager
def catch_signals(*, patience: float = 0.0) -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM, so that a step is finished and saved before the run leaves.

    A second one ends it at once; but not in the first seconds of `patience`, for a launcher hands
    a signal on that the whole group has had.
    """
    asked: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    first = time.monotonic()

    def ask(number: int, _: object) -> None:
        nonlocal first
        if not asked:
            asked.append(number)
            first = time.monotonic()
            print("stopping after this step, to save it; once more stops at once", file=sys.stderr)
        elif time.monotonic() - first >= patience:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    try:
        before = [signal.signal(number, ask) for number in numbers]
    except ValueError:  # not the main thread: whoever owns it decides
        yield asked
        return
    try:
        yield asked
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
