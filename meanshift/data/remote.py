"""Files and folders at an address, through fsspec: https://, s3://, gs://, hf://, memory://, ..."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from meanshift.data.file_access import DiskTimeout, is_http

K = TypeVar("K")
T = TypeVar("T")
CONCURRENT = 32
"""requests that a process makes at a time"""
RETRY_DELAYS = (0.5, 1.0, 2.0, 4.0)
"""seconds before each further try of a request that failed"""
_LONGEST = 600.0  # seconds of any request
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, ValueError)
_VERSIONS = "ETag etag blob_id xet_hash md5Hash content_md5 Last-Modified LastModified".split()
_VERSIONS += "last_modified mtime modified modify created".split()  # of the many file systems
_PACKAGES = {
    **dict.fromkeys(("http", "https"), "aiohttp"),
    **dict.fromkeys(("s3", "s3a"), "s3fs"),
    **dict.fromkeys(("gs", "gcs"), "gcsfs"),
    **dict.fromkeys(("az", "abfs", "adl"), "adlfs"),
    **dict.fromkeys(("sftp", "ssh"), "paramiko"),
    "hf": "huggingface_hub",
}
_EXTRAS = {"aiohttp": "'meanshift[remote]'", "huggingface_hub": "'meanshift[huggingface]'"}
# Every file system of this process and of those that it was forked from. In a forked process fsspec
# drops those of the parent; if they were deleted, they would close their copies of its connections
# and remove these from the epoll that both processes share, and the parent would wait for ever.
_systems = set[Any]()


def _reset_after_fork() -> None:
    """Forget the event loop of the parent, whose thread a forked process does not have.

    fsspec does so itself from 2025.3.1 on; before, every request would wait for ever.
    """
    if "fsspec.asyn" in sys.modules:
        sys.modules["fsspec.asyn"].reset_lock()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_reset_after_fork)


class RemoteError(DiskTimeout):
    """A server that does not answer as it should, unlike one file that is missing."""


def no_ranges(address: str, status: int) -> RemoteError:
    """The error of a server that sends a whole file in place of a part of it."""
    return RemoteError(
        f"{address}: its server ignores Range requests (it answered {status}), so single images "
        f"cannot be read; use another server, or download the file"
    )


def file_system(address: str) -> Any:
    """The file system of an address; a process, also a forked one, has its own."""
    from fsspec.core import url_to_fs

    from meanshift.data.remote_http import open_http

    protocol = address.partition("://")[0]
    try:
        system = open_http() if is_http(address) else url_to_fs(address)[0]
    except ImportError as error:
        package = _PACKAGES.get(protocol)
        if package is None:
            raise ValueError(f"{address}: {protocol}:// needs another package; {error}") from None
        advice = f"type: pip install {_EXTRAS.get(package, package)}"
        raise ValueError(f"{address}: {protocol}:// needs {package}; {advice}") from None
    except ValueError as error:
        if "Protocol not known" not in str(error):
            raise
        raise ValueError(
            f"{address}: fsspec knows no {protocol}://; need a path, or an address that it knows, "
            f"as https://, s3:// and gs://"
        ) from None
    _systems.add(system)
    return system


@dataclass(slots=True)
class RemoteFile:
    """Bytes at an address; it holds no connection, so it can be sent to a worker."""

    address: str
    size: int
    """-1 where it is not known"""
    version: str
    """changes with the file; empty where it is not known"""

    def read_at(self, offset: int, size: int) -> bytes:
        """Some bytes of the file."""
        return unless_error(read_ranges([(self, offset, size)])[0])

    def read(self) -> bytes:
        """The whole file."""
        return unless_error(read_files([self])[0])


def open_remote(addresses: Sequence[str]) -> list[RemoteFile]:
    """The files at some addresses, whose sizes and versions are requested together."""
    files = list[RemoteFile]()
    for address, info in zip(addresses, describe(addresses), strict=True):
        info = unless_error(info)
        if info.get("partial") is False:
            raise no_ranges(address, 200)
        if info.get("size") is None:
            raise RemoteError(f"{address}: its server states no size; download the file")
        files.append(RemoteFile(address, info["size"], version_of(info)))
    return files


def read_ranges(ranges: Sequence[tuple[RemoteFile, int, int]]) -> list[bytes | OSError]:
    """Bytes of files, as (file, offset, size), requested together; an error in place of each."""
    results: list[bytes | OSError] = [b""] * len(ranges)
    wanted = [index for index, (_, _, size) in enumerate(ranges) if size]
    requests = list[Request]()
    for index in wanted:
        file, offset, size = ranges[index]
        limits: dict[str, Any] = {"start": offset, "end": offset + size}
        if is_http(file.address):
            limits["version"] = file.version
        requests.append(Request(file.address, limits))
    for index, content in zip(wanted, request_all("cat_file", requests), strict=True):
        file, offset, size = ranges[index]
        if isinstance(content, bytes) and len(content) != size:
            content = RemoteError(
                f"{file.address}: ends before byte {offset + size}, which was there when it was "
                f"opened; restore it, or start again"
            )
        results[index] = content
    return results


def read_files(files: Sequence[RemoteFile]) -> list[bytes | OSError]:
    """The contents of whole files, requested together; an error in place of each."""
    results: list[bytes | OSError] = []
    contents = request_all("cat_file", [Request(file.address, {}) for file in files])
    for file, content in zip(files, contents, strict=True):
        if isinstance(content, bytes) and file.size not in (-1, len(content)):
            content = RemoteError(
                f"{file.address}: has {len(content)} bytes now and had {file.size} when it was "
                f"listed; restore it, or start again"
            )
        results.append(content)
    return results


def unless_error(result: T | OSError) -> T:
    """A result, or its error raised."""
    if isinstance(result, OSError):
        raise result
    return result


def take(contents: dict[K, bytes | OSError], key: K) -> bytes | None:
    """What was read before of some contents; none where it was not, and an error is raised once."""
    if isinstance(contents.get(key), OSError):
        return unless_error(contents.pop(key))
    return contents.get(key)  # type: ignore[return-value]


def find_remote(pattern: str) -> list[str]:
    """The addresses that a pattern with `*` matches; empty where none does, or none is listed."""
    system = file_system(pattern)
    system.invalidate_cache()
    answer = request_all("glob", [Request(pattern, {})])[0]
    if isinstance(answer, FileNotFoundError):
        return []
    above = re.split(r"[*?\[]", pattern)[0].rpartition("/")[0]
    return sorted(full_address(name, above, system) for name in unless_error(answer))


def full_address(name: str, above: str, system: Any) -> str:
    """The address of a file by its name in its file system, below an address that was typed."""
    stripped = str(system._strip_protocol(above)).rstrip("/")
    if name.startswith(f"{stripped}/"):
        return above.rstrip("/") + name.removeprefix(stripped)
    return system.unstrip_protocol(name)  # type: ignore[no-any-return]


def version_of(info: Mapping[str, Any]) -> str:
    """What tells the versions of a file apart, of the properties that its file system knows."""
    return f"{info.get('size')} {next((info[key] for key in _VERSIONS if info.get(key)), None)}"


def describe(addresses: Sequence[str]) -> list[Any]:
    """What file systems know of some files, requested together; an error in place of each."""
    return request_all("info", [Request(address, {}) for address in addresses])


class Request(NamedTuple):
    """What to call a method of a file system with."""

    address: str
    options: dict[str, Any]


def request_all(method: str, requests: Sequence[Request]) -> list[Any]:
    """Call a method of a file system for each request, and again after errors that may pass.

    In place of a result there may be an `OSError`: `RemoteError`, or of one file that is missing.
    """
    results: list[Any] = [None] * len(requests)
    pending = list(range(len(requests)))
    for delay in (*RETRY_DELAYS, None):
        if not pending:
            break
        answers = _call_all(method, [requests[index] for index in pending])
        for index, answer in zip(pending, answers, strict=True):
            results[index] = answer
        pending = [index for index in pending if _may_pass(results[index])]
        if pending and delay is not None:
            time.sleep(delay)
    return [
        _describe_failure(request.address, result) if isinstance(result, Exception) else result
        for request, result in zip(requests, results, strict=True)
    ]


def _call_all(method: str, requests: Sequence[Request]) -> list[Any]:
    """Results, or exceptions, of one try."""
    system = file_system(requests[0].address)
    if system.async_impl:
        from fsspec.asyn import sync

        call = getattr(system, f"_{method}")
        return list(sync(system.loop, _gather, call, requests))
    results = list[Any]()
    for address, options in requests:
        try:
            results.append(getattr(system, method)(address, **options))
        except Exception as error:  # of any library
            results.append(error)
    return results


async def _gather(call: Callable[..., Awaitable[Any]], requests: Sequence[Request]) -> list[Any]:
    limit = asyncio.Semaphore(CONCURRENT)

    async def one(request: Request) -> Any:
        async with limit:
            return await asyncio.wait_for(call(request.address, **request.options), _LONGEST)

    return await asyncio.gather(*map(one, requests), return_exceptions=True)


def _may_pass(result: Any) -> bool:
    """Whether a result is an error that another try may not give."""
    if not isinstance(result, Exception) or isinstance(result, (RemoteError, *_FINAL)):
        return False
    status = getattr(result, "status", 500)
    return not isinstance(status, int) or status >= 500 or status in (408, 429)


def _describe_failure(address: str, error: Exception) -> OSError:
    """An error that names the address: of a missing file, or else of the server."""
    if isinstance(error, RemoteError):
        return error
    status = getattr(error, "status", None)
    is_status = isinstance(status, int) and status
    reason = f"{type(error).__name__}: {error}"
    if is_status:
        reason = f"HTTP {status} {getattr(error, 'message', '')}".rstrip()
    kind: type[OSError] = RemoteError
    if isinstance(error, FileNotFoundError) or status in (404, 410):
        kind = FileNotFoundError
    elif isinstance(error, PermissionError) or status in (401, 403):
        kind = PermissionError
    return kind(
        f"{address}: could not be read ({reason}); need a server that answers: check the address "
        f"and the network, then type the command again"
    )
