"""Files that survive a kill: atomic writes, locks between runs, growing JSON-lines files."""

from __future__ import annotations

import errno
import json
import math
import os
import socket
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

if sys.platform != "win32":
    import fcntl


@contextmanager
def atomic_writer(path: Path, *, shared: bool = False) -> Iterator[BinaryIO]:
    """Open a temporary file beside `path` that replaces it only when all of it is on the disk.

    Use `shared` where several processes may write the same path: each gets its own temporary file.
    """
    suffix = f".{os.getpid()}" if shared else ""
    temporary = path.with_name(f".{path.name}{suffix}.part")
    try:
        with name_full_disk(path), temporary.open("w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        if hasattr(os, "O_DIRECTORY"):  # make the rename durable, where folders can be opened
            folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def name_full_disk(path: Path) -> Iterator[None]:
    """Name the file that a full disk or quota keeps from being written; the system does not."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise OSError(
            f"{path}: could not be written ({error}); make room and type the same command again"
        ) from error


def write_text(path: Path, content: str) -> None:
    """Write a text file completely or not at all."""
    with atomic_writer(path, shared=True) as file:
        file.write(content.encode())


_locked: dict[tuple[int, Path], object] = {}
"""locks by process and path: those of the system do not keep two calls in one process apart, and
another lock would outlive a killed process in its loader workers"""


@contextmanager
def exclusive_lock(path: Path, activity: str, alternative: str) -> Iterator[None]:
    """Lock a file until the context ends; refuse if it is locked.

    The system releases the lock when the process dies. `activity` and `alternative` complete the
    error message. A file called .lock names the process that locks it. On a disk without locks
    only this process is refused, and a warning says so.
    """
    key = os.getpid(), path.resolve()
    token = object()
    # Before the file is opened: to close it a second time would release the lock.
    if _locked.setdefault(key, token) is not token:
        raise ValueError(
            f"{path.parent}: this process already {activity}; "
            f"wait until it ends, or choose {alternative}"
        )
    try:
        with _system_lock(path, activity, alternative):
            yield
    finally:
        del _locked[key]


@contextmanager
def _system_lock(path: Path, activity: str, alternative: str) -> Iterator[None]:
    names_owner = path.name == ".lock"
    with path.open("a+b") as file:
        if sys.platform != "win32":
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                owner = file.read().decode(errors="replace").strip() if names_owner else ""
                raise ValueError(
                    f"{path.parent}: {owner or 'another process'} {activity}; "
                    f"wait until it ends, or choose {alternative}"
                ) from None
            except OSError as error:
                if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                    raise
                warnings.warn(
                    f"{path.parent}: this disk has no locks ({error.strerror}), so a second "
                    f"process in this directory is not noticed; start none",
                    stacklevel=2,
                )
        if names_owner:
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
            file.flush()
        try:
            yield
        finally:
            if names_owner:
                file.truncate(0)


def parse_lines(path: Path, lines: Iterable[bytes], *, first: int = 1) -> list[dict[str, Any]]:
    """The records of a JSON-lines file; an error names the line, `first` being the first number."""
    records = []
    for number, line in enumerate(lines, first):
        try:
            record = json.loads(line, parse_float=_finite, parse_int=_finite)
        except ValueError:
            record = None
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            raise ValueError(f"{path}: line {number} is damaged ({line[:60]!r}); delete this line")
        records.append(record)
    return records


def _finite(text: str) -> float | int:
    """A number of a JSON file that a float can hold; NaN and Infinity are words and pass."""
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:20]} is too large")
    return int(text) if text.lstrip("-").isdigit() else value


class JSONLTail:
    """Reads a JSON-lines file that grows; a file that was replaced is read from its beginning."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: list[dict[str, Any]] = []
        self._offset = 0
        self._last_bytes = b""

    def read(self) -> list[dict[str, Any]]:
        """Return all records; only lines that were added since the last call are parsed."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return []
        with file:
            file.seek(self._offset - len(self._last_bytes))
            if file.read(len(self._last_bytes)) != self._last_bytes:  # the file was replaced
                self.records = []
                self._offset = 0
                self._last_bytes = b""
                file.seek(0)
            lines, newline, _ = file.read().rpartition(b"\n")  # the last line may be incomplete
        added = lines + newline
        first = len(self.records) + 1
        self.records += parse_lines(self.path, added.split(b"\n")[:-1], first=first)
        self._offset += len(added)
        self._last_bytes = (self._last_bytes + added)[-256:]
        return self.records
