"""Bytes of files at any offset, on a disk or at an http address."""

from __future__ import annotations

import http.client
import io
import re
import time
import urllib.error
import urllib.request
from email.message import Message
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

RETRY_DELAYS = (0.5, 1.0, 2.0, 4.0)
"""seconds before each further try of a request that failed"""
_TIMEOUT = 30.0


class LocalFile:
    """Bytes of a file; it is opened for each read, so no handle is shared with a worker."""

    def __init__(self, path: str) -> None:
        status = Path(path).stat()
        self.address = path
        self.size = status.st_size
        self.version = f"{status.st_size} {status.st_mtime_ns}"

    def read_at(self, offset: int, size: int) -> bytes:
        with Path(self.address).open("rb", buffering=0) as file:
            file.seek(offset)
            content = file.read(size)
        if len(content) != size:
            raise OSError(
                f"{self.address}: ends before byte {offset + size}, which was there when it was "
                f"opened; restore it, or start again"
            )
        return content


class RemoteFile:
    """Bytes at an http address, by Range requests that are repeated when the network fails."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.size = -1
        _, headers = self._request(0, 1)
        self.size = int(headers["Content-Range"].rpartition("/")[2])
        self.version = f"{self.size} {headers.get('ETag') or headers.get('Last-Modified')}"

    def read_at(self, offset: int, size: int) -> bytes:
        return self._request(offset, size)[0] if size else b""

    def _request(self, offset: int, size: int) -> tuple[bytes, Message]:
        """The bytes and the headers of a response; tries again after errors that may pass."""
        span = {"Range": f"bytes={offset}-{offset + size - 1}", "Accept-Encoding": "identity"}
        request = urllib.request.Request(self.address, headers=span)
        reason = ""
        for delay in (*RETRY_DELAYS, None):
            try:
                with urllib.request.urlopen(request, timeout=_TIMEOUT) as response:
                    status = response.status
                    headers = response.headers
                    content = response.read(size) if status == 206 else b""
                if status == 206 and len(content) < size:
                    raise http.client.IncompleteRead(content, size - len(content))
            except urllib.error.HTTPError as error:
                error.close()
                reason = f"HTTP {error.code} {error.reason}"
                if error.code < 500 and error.code not in (408, 429):
                    break
            except (http.client.HTTPException, OSError) as error:
                reason = f"{type(error).__name__}: {error}"
            else:
                self._refuse_other_bytes(status, headers.get("Content-Range", ""), offset)
                return content, headers
            if delay is not None:
                time.sleep(delay)
        raise OSError(
            f"{self.address}: could not be read ({reason}); need a server that answers: check the "
            f"address and the network, then type the command again"
        )

    def _refuse_other_bytes(self, status: int, span: str, offset: int) -> None:
        """Refuse bytes that are not those that were asked for."""
        found = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", span)
        if status != 206 or found is None or int(found[1]) != offset:
            raise OSError(
                f"{self.address}: its server ignores Range requests (it answered {status}), so "
                f"single images cannot be read; use another server, or download the file"
            )
        if self.size not in (-1, int(found[2])):
            raise OSError(
                f"{self.address}: has {found[2]} bytes now and had {self.size} when it was opened; "
                f"restore it, or start again"
            )


class FileStream(io.RawIOBase):
    """A local or remote file as a Python file object, for tarfile and pyarrow."""

    def __init__(self, file: LocalFile | RemoteFile) -> None:
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


def open_file(address: str) -> LocalFile | RemoteFile:
    """The file at a path or an http address."""
    return RemoteFile(address) if is_remote(address) else LocalFile(address)


def is_remote(address: str) -> bool:
    return address.startswith(("http://", "https://"))


def base_name(address: str) -> str:
    """The last part of a path, or of an address without its query."""
    path = unquote(urlsplit(address).path) if is_remote(address) else address
    return path.rpartition("/")[2]


def split_name(name: str) -> str | None:
    """The split whose name begins the name of a file or a folder: train, val or test."""
    splits = r"(?P<train>train)(?:ing)?|(?P<val>val)(?:id(?:ation)?)?|(?P<test>test)(?:ing)?"
    found = re.match(rf"(?:{splits})(?![a-z])", name, re.IGNORECASE)
    return found.lastgroup if found else None
