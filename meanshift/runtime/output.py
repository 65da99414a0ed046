"""Standard output and error that outlive their reader: `tee`, `head` or a terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO, cast


@contextmanager
def survive_closed_output() -> Iterator[None]:
    """Let what is printed vanish once it cannot be written, instead of ending the work."""
    before = sys.stdout, sys.stderr
    for descriptor, stream in ((1, sys.stdout), (2, sys.stderr)):
        if stream is None:  # closed from the start: no file of ours may get its number
            _redirect_to_null(descriptor)
    sys.stdout, sys.stderr = (cast(TextIO, _SurvivingStream(stream)) for stream in before)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = before


class _SurvivingStream:
    """A text stream that goes on silently after an error of writing."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream or Path(os.devnull).open("w")  # noqa: SIM115

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._silent_after_an_error():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._silent_after_an_error():
            self._stream.flush()

    @contextmanager
    def _silent_after_an_error(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            with suppress(OSError):  # a notebook's stream has no descriptor
                _redirect_to_null(self._stream.fileno())


def _redirect_to_null(descriptor: int) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    if null != descriptor:
        os.dup2(null, descriptor)
        os.close(null)
