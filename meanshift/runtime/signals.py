"""Signals and a file that ask a run to stop: it finishes its step, saves, and exits."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

REQUEUE = 75
"""exit code (EX_TEMPFAIL) of a run that a scheduler stopped and should start again"""

GRACE = 5.0
"""seconds from a signal to the end of a program that does not react, before its first step"""

STOP_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)
"""Ctrl-C, a scheduler, a closed terminal (which Windows does not signal)"""


class Stopped(SystemExit):
    """A signal asked the run to stop, and the run has saved a checkpoint if it took a step.

    No `except Exception` on the way takes it for an error. If nothing catches it, the process ends
    with its `code`.
    """

    code: int

    def __init__(self, signal_number: int, step: int | None = None) -> None:
        done = "stopped" if step is None else f"stopped and saved at step {step}"
        super().__init__(f"{done}; the same command continues from there")
        terminated = signal_number == signal.SIGTERM
        self.code = REQUEUE if terminated else 128 + signal_number


@contextmanager
def stop_at_once() -> Iterator[None]:
    """Raise `Stopped` when a signal arrives: before the first step there is nothing to save.

    Python calls no handler while a library waits, as torch does for a process that never comes.
    After `GRACE` seconds a thread therefore ends the program with the same code.
    """

    def handle(number: int, _: object) -> None:
        raise Stopped(number)

    def watch() -> None:
        while received := os.read(reader, 1):
            number = received[0]
            if signal.getsignal(number) is handle:  # else `catch_signals` has it
                time.sleep(GRACE)
                if signal.getsignal(number) is handle:
                    os._exit(Stopped(number).code)
        os.close(reader)

    with _handle_signals(handle) as set_here:
        if not set_here or not hasattr(os, "set_blocking"):  # Windows has it from Python 3.12
            yield
            return
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        previous = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=watch, daemon=True).start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(previous)
            os.close(writer)


@contextmanager
def catch_signals(*, patience: float = 0.0) -> Iterator[list[int]]:
    """Collect the signals, so that a step is finished and saved before the run stops.

    A second signal stops the run at once, but not in the first `patience` seconds: a launcher
    forwards a signal that the whole process group has received.
    """
    received: list[int] = []
    first_time = time.monotonic()

    def handle(number: int, _: object) -> None:
        nonlocal first_time
        if not received:
            received.append(number)
            first_time = time.monotonic()
            # Not print: the signal may have interrupted another one, and the reader may be gone.
            with suppress(OSError):
                os.write(2, b"stopping after this step, to save it; once more stops at once\n")
        elif time.monotonic() - first_time >= patience:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    with _handle_signals(handle):
        yield received


@contextmanager
def watch_stop_request(path: Path, *, every: float = 1.0) -> Iterator[Callable[[], int]]:
    """Watch for a file by which another program asks the run to stop as Ctrl-C does.

    Yields a function that returns SIGINT once the file is there and 0 before; it looks at most once
    in `every` seconds. The file is deleted at the start, since it asked an earlier session, and at
    the end.
    """
    path.unlink(missing_ok=True)
    found = 0
    last_look = time.monotonic()

    def requested() -> int:
        nonlocal found, last_look
        now = time.monotonic()
        if not found and now - last_look >= every:
            last_look = now
            if path.exists():
                found = signal.SIGINT
                with suppress(OSError):
                    os.write(2, b"asked to stop: stopping after this step, to save it\n")
        return found

    try:
        yield requested
    finally:
        path.unlink(missing_ok=True)


@contextmanager
def _handle_signals(handle: Callable[[int, object], None]) -> Iterator[bool]:
    """Set the handler of all signals, but not of SIGHUP under nohup, which ignores it.

    Yields False in a thread, where none can be set.
    """
    previous = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    hangup = getattr(signal, "SIGHUP", None)
    if previous.get(hangup) == signal.SIG_IGN:
        del previous[hangup]
    try:
        for number in previous:
            signal.signal(number, handle)
    except ValueError:  # only the main thread may
        yield False
        return
    try:
        yield True
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
