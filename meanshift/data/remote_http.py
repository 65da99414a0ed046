"""Files at http addresses, through fsspec, with a check of what each answer is."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

from meanshift.data.remote import RemoteError, no_ranges, version_of

TIMEOUT = 30.0
"""seconds to wait for a connection, and without a byte of an answer"""


def open_http() -> Any:
    """The file system, with the options of fsspec's configuration and the system's proxies."""
    import aiohttp
    from fsspec.config import conf

    given = {key: value for name in ("http", "https") for key, value in conf.get(name, {}).items()}
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=TIMEOUT, sock_read=TIMEOUT)
    client = {"trust_env": True, "timeout": timeout, **given.get("client_kwargs", {})}
    return _http_class()(client_kwargs=client)


@functools.cache
def _http_class() -> Any:
    """fsspec's file system for http, which would take any bytes of any version for those meant."""
    from fsspec.implementations.http import HTTPFileSystem

    class CheckedHTTPFileSystem(HTTPFileSystem):
        """Checks of every answer which bytes of which version it has."""

        async def _cat_file(
            self, url: str, start: int | None = None, end: int | None = None, version: str = ""
        ) -> bytes:
            async with self._get(url, start, end) as response:
                if start is not None:
                    info = _http_info(response)
                    if info.get("partial") is False or info["start"] != start:
                        raise no_ranges(url, response.status)
                    if version and version_of(info) != version:
                        raise RemoteError(
                            f"{url}: is another file now than when it was opened (size and "
                            f"version {version_of(info)}, not {version}); restore it, or start "
                            f"again"
                        )
                content: bytes = await response.read()
            return content

        async def _info(self, url: str) -> dict[str, Any]:
            """By a GET of one byte: signed addresses often allow no HEAD."""
            async with self._get(url, 0, 1) as response:
                return {"name": url, "type": "file", **_http_info(response)}

        @contextlib.asynccontextmanager
        async def _get(self, url: str, start: int | None, end: int | None) -> Any:
            options = dict(self.kwargs)
            headers = {**options.pop("headers", {}), "Accept-Encoding": "identity"}
            if start is not None and end is not None:
                headers["Range"] = f"bytes={start}-{end - 1}"
            session = await self.set_session()
            async with session.get(self.encode_url(url), headers=headers, **options) as response:
                response.raise_for_status()
                yield response

    return CheckedHTTPFileSystem


def _http_info(response: Any) -> dict[str, Any]:
    """Size and version of a file by an answer, and the first byte that the answer has."""
    headers = response.headers
    info = {key: headers[key] for key in ("ETag", "Last-Modified") if key in headers}
    span, _, size = headers.get("Content-Range", "").removeprefix("bytes ").partition("/")
    start = span.partition("-")[0]
    if response.status == 206 and size.isdecimal() and start.isdecimal():
        return {**info, "size": int(size), "start": int(start)}
    length = headers.get("Content-Length", "")
    return {**info, "size": int(length) if length.isdecimal() else None, "partial": False}
