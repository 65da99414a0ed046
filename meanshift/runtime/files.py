"""Files that survive a kill: atomic writes, locks between processes, growing JSON-lines files."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Iterator
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
        with temporary.open("wb") as file:
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


def write_text(path: Path, content: str) -> None:
    """Write a text file completely or not at all."""
    with atomic_writer(path, shared=True) as file:
        file.write(content.encode())


@contextmanager
def exclusive_lock(path: Path, activity: str, alternative: str) -> Iterator[None]:
    """Lock a file until the context ends; refuse if another process has locked it.

    The system releases the lock when the process dies. `activity` and `alternative` complete the
    error message. A file called .lock names the process that locks it.
    """
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
        if names_owner:
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
            file.flush()
        try:
            yield
        finally:
            if names_owner:
                file.truncate(0)


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
        self.records += [json.loads(line) for line in lines.splitlines()]
        self._offset += len(added)
        self._last_bytes = (self._last_bytes + added)[-256:]
        return self.records
