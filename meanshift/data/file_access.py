"""Bytes of files at any offset; disks that may not answer; what the names of files say."""

from __future__ import annotations

import errno
import io
import os
import queue
import re
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from meanshift.data.remote_folder import RemotePath

T = TypeVar("T")
Stream = io.BytesIO | io.BufferedReader
"""an opened file"""

AT_ONCE = 64 << 20
"""bytes of a file that are read in one piece"""
DISK_TIMEOUT = 30.0
"""seconds to wait for a disk before a file is unreadable"""
_MAX_HUNG = 8  # calls of this process that hang at a time: with more, the disk is gone
_hung = list[threading.Thread]()


class DiskTimeout(OSError):
    """A disk that does not answer at all, unlike one unreadable file."""


class _Reader:
    """A thread for calls that may never return: starting one for each call is 20 times slower."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.calls = queue.SimpleQueue[Callable[[], Any]]()
        self.results = queue.SimpleQueue[tuple[Any, BaseException | None]]()
        self.abandoned = False
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while not self.abandoned:
            call = self.calls.get()
            try:
                self.results.put((call(), None))
            except BaseException as error:
                self.results.put((None, error))


_readers = threading.local()  # one for each thread that reads


def with_timeout(call: Callable[[], T], path: os.PathLike[str] | str) -> T:
    """Call what reads a disk; raise `TimeoutError` where the disk does not answer.

    A read of a hung mount cannot be interrupted, so it is left behind in its thread.
    """
    reader: _Reader | None = getattr(_readers, "reader", None)
    if reader is None or reader.process != os.getpid():  # a forked process has no threads
        reader = _Reader()
    _readers.reader = None  # until it has answered: the next call must not get a late result
    reader.calls.put(call)
    try:
        result, error = reader.results.get(timeout=DISK_TIMEOUT)
    except BaseException as interruption:  # or a signal
        reader.abandoned = True
        if not isinstance(interruption, queue.Empty):
            raise
        _hung[:] = [reader.thread, *(other for other in _hung if other.is_alive())]
        if len(_hung) >= _MAX_HUNG:
            raise DiskTimeout(
                f"{path}: no answer within {DISK_TIMEOUT:g} s, nor from {len(_hung) - 1} files "
                f"before it; check that their disk is mounted, then type the command again"
            ) from None
        reason = f"no answer from the disk within {DISK_TIMEOUT:g} s"
        raise TimeoutError(errno.ETIMEDOUT, reason, str(path)) from None
    _readers.reader = reader
    if error is not None:
        raise error
    return result  # type: ignore[no-any-return]


def open_regular(path: Path | RemotePath, *, at_once: int | None = None) -> Stream:
    """A regular file, to be read; a FIFO or a device is refused, not waited for.

    A file of up to `at_once` bytes is read in one piece; of others only what is needed.
    """
    limit = AT_ONCE if at_once is None else at_once
    if not isinstance(path, Path):
        return path.stream(at_once=limit)

    def read() -> bytes | None:
        size = _regular(path).st_size
        with path.open("rb") as file:
            return file.read(size) if size <= limit else None

    content = with_timeout(read, path)
    if content is not None:
        return io.BytesIO(content)
    return io.BufferedReader(FileStream(LocalFile(str(path))), 1 << 20)


def _regular(path: Path) -> os.stat_result:
    """The status of a file; what could be read for ever is an error."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        kinds = {"d": "a directory", "p": "a FIFO", "s": "a socket"}
        kind = kinds.get(stat.filemode(status.st_mode)[0], "a device")
        raise OSError(errno.EINVAL, f"{kind}, not a file", str(path))
    return status


@runtime_checkable
class RandomAccessFile(Protocol):
    """Bytes of a file at any offset: a `LocalFile` or a `RemoteFile`."""

    address: str
    size: int
    version: str
    """changes with the file"""

    def read_at(self, offset: int, size: int) -> bytes: ...


class LocalFile:
    """Bytes of a file; it is opened for each read, so no handle is shared with a worker."""

    def __init__(self, path: str) -> None:
        status = with_timeout(lambda: _regular(Path(path)), path)
        self.address = path
        self.size = status.st_size
        self.version = f"{status.st_size} {status.st_mtime_ns}"

    def read_at(self, offset: int, size: int) -> bytes:
        def read() -> bytes:
            with Path(self.address).open("rb", buffering=0) as file:
                file.seek(offset)
                return file.read(size)

        content = with_timeout(read, self.address)
        if len(content) != size:
            raise OSError(
                f"{self.address}: ends before byte {offset + size}, which was there when it was "
                f"opened; restore it, or start again"
            )
        return content


class FileStream(io.RawIOBase):
    """A local or remote file as a Python file object, for tarfile and pyarrow."""

    def __init__(self, file: RandomAccessFile) -> None:
        super().__init__()
        self.file = file
        self.position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self.position = offset + (0, self.position, self.file.size)[whence]
        return self.position

    def readinto(self, buffer: Any) -> int:
        size = max(0, min(len(buffer), self.file.size - self.position))
        if size:
            buffer[:size] = self.file.read_at(self.position, size)
        self.position += size
        return size


def is_remote(address: str) -> bool:
    """Whether a path is an address, as s3://bucket/photos."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", address) is not None


def is_http(address: str) -> bool:
    return address.startswith(("http://", "https://"))


def base_name(address: str) -> str:
    """The last part of a path, or of an address without its query."""
    path = unquote(urlsplit(address).path) if is_http(address) else address
    return path.rpartition("/")[2]


_SPLITS = r"(?:(?P<train>train)(?:ing)?|(?P<val>val)(?:id(?:ation)?)?|(?P<test>test)(?:ing)?)"


def split_name(name: str) -> str | None:
    """The split whose name begins the name of a file or a folder: train, val or test."""
    found = re.match(rf"{_SPLITS}(?![a-z])", name, re.IGNORECASE)
    return found.lastgroup if found else None


def is_split_name(name: str) -> bool:
    """Whether a name is that of a split, and no more."""
    return re.fullmatch(_SPLITS, name, re.IGNORECASE) is not None
