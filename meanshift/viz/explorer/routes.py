"""The routes of the live page: each asks the explorer one thing and returns JSON or an image."""

from __future__ import annotations

import contextlib
import json
import threading
from importlib import resources
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from meanshift.data import UnreadableSample
from meanshift.viz.explorer.background import Pending, Stopped
from meanshift.viz.explorer.model import Explorer
from meanshift.viz.explorer.search import decode_upload
from meanshift.viz.explorer.thumbnails import SIDES
from meanshift.viz.run_reader import MissingData

MAX_UPLOAD = 20 * 2**20  # bytes of an image to search with
_ASSETS = {
    "explorer.html": "text/html",
    "explorer.js": "text/javascript",
    "explorer-map.js": "text/javascript",
    "explorer-search.js": "text/javascript",
    "explorer-clean.js": "text/javascript",
    "explorer.css": "text/css",
    "style.css": "text/css",
    "map.js": "text/javascript",
    "curves.js": "text/javascript",
}


class TooLarge(ValueError):
    """An upload beyond the limit."""


class _JSON(JSONResponse):
    """JSON in ASCII: file names may be any bytes, and what is no character is escaped."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


class _Handlers:
    """One method per route; `explorer` is replaced when another run starts in the folder."""

    def __init__(self, explorer: Explorer) -> None:
        self.explorer = explorer
        self._lock = threading.Lock()

    def page(self, _: Request) -> Response:
        return _asset("explorer.html")

    def asset(self, request: Request) -> Response:
        return _asset(request.path_params["name"])

    def run(self, request: Request) -> Response:
        with self._lock:
            self.explorer = self.explorer.current()
        if request.query_params.get("since") == self.explorer.live.version():
            return Response(status_code=204)
        return _JSON(self.explorer.state())

    def images(self, _: Request) -> Response:
        return _JSON(self.explorer.images())

    def map(self, request: Request) -> Response:
        return _JSON(self.explorer.map(have=request.query_params.get("have", "")))

    def colors(self, request: Request) -> Response:
        by = request.query_params.get("by", "")
        return _JSON(self.explorer.colors(by, epoch=_number(request, "epoch")))

    def point(self, request: Request) -> Response:
        return _JSON(self.explorer.point(request.path_params["row"]))

    def thumbnail(self, request: Request) -> Response:
        source = request.path_params["source"]
        index = request.path_params["index"]
        side = _number(request, "side", default=128)
        if side not in SIDES:
            raise ValueError(f"side: got {side}, need one of {', '.join(map(str, SIDES))}")
        key = self.explorer.cache_key
        tag = f'"{key}-{source}-{index}-{side}"'
        caching = "no-cache"
        if request.query_params.get("v") == key:  # the image at such an address never changes
            caching = "max-age=31536000, immutable"
        headers = {"ETag": tag, "Cache-Control": f"private, {caching}"}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        content, media_type = self.explorer.thumbnail(source, index, side)
        return Response(content, media_type=media_type, headers=headers)

    def prepare(self, request: Request) -> Response:
        self.explorer.prepare(_source(request), epoch=_number(request, "epoch"))
        return _JSON({})

    def rank(self, request: Request) -> Response:
        return _JSON(
            self.explorer.rank(
                request.query_params.get("order", "outliers"),
                name=_source(request),
                epoch=_number(request, "epoch"),
                start=_number(request, "start", default=0),
                count=_number(request, "count", default=60, largest=1000),
            )
        )

    async def search(self, request: Request) -> Response:
        upload = await _read_body(request)
        return await run_in_threadpool(self._search, request, upload)

    def _search(self, request: Request, upload: bytes) -> Response:
        name = _source(request)
        epoch = _number(request, "epoch")
        count = max(1, _number(request, "count", default=24, largest=200))
        self.explorer.prepare(name, epoch=epoch)
        if upload:
            with self.explorer.thumbnails.decoding:
                image = decode_upload(upload)
        else:
            query_source = request.query_params.get("of", "")
            image = self.explorer.read_image(query_source, _number(request, "index"))
        found = self.explorer.search(image, name=name, epoch=epoch, count=count)
        return _JSON({"found": found})

    def stop(self, _: Request) -> Response:
        self.explorer.searcher.tasks.stop()
        return _JSON({})


def application(explorer: Explorer) -> Starlette:
    """The page and its API; `Guard` belongs in front of it."""
    handlers = _Handlers(explorer)
    routes = [
        Route("/", handlers.page),
        Route("/assets/{name}", handlers.asset),
        Route("/api/run", handlers.run),
        Route("/api/images", handlers.images),
        Route("/api/map", handlers.map),
        Route("/api/colors", handlers.colors),
        Route("/api/point/{row:int}", handlers.point),
        Route("/thumbnail/{source}/{index:int}", handlers.thumbnail),
        Route("/api/prepare", handlers.prepare),
        Route("/api/rank", handlers.rank),
        Route("/api/search", handlers.search, methods=["POST"]),
        Route("/api/stop", handlers.stop, methods=["POST"]),
    ]
    exception_handlers: Any = {
        Pending: _report_pending,
        Stopped: _report_error(409),
        MissingData: _report_error(404),
        UnreadableSample: _report_error(404),
        TooLarge: _report_error(413),
        ValueError: _report_error(400),
        OSError: _report_error(500),
    }
    return Starlette(routes=routes, exception_handlers=exception_handlers)


def _asset(name: str) -> Response:
    if name not in _ASSETS:  # a fixed table: no name of a request reaches the disk
        raise MissingData(f"{name!r} is no part of the page")
    content = (resources.files("meanshift.viz") / "assets" / name).read_bytes()
    return Response(content, media_type=_ASSETS[name], headers={"Cache-Control": "no-cache"})


def _report_pending(_: Request, pending: Pending) -> Response:
    progress = {"pending": pending.title, "done": pending.done, "total": pending.total}
    return _JSON(progress, 202)


def _report_error(status: int) -> Any:
    def report(_: Request, error: Exception) -> Response:
        message = str(error)
        if isinstance(error, UnreadableSample):
            message = f"{error.title}: {error.reason}"
        headers = {"Connection": "close"} if status == 413 else None  # the rest is not read
        return _JSON({"error": message}, status, headers)

    return report


def _source(request: Request) -> str:
    return request.query_params.get("in", "snapshot")


def _number(
    request: Request, name: str, *, default: int | None = None, largest: int = 10**9 - 1
) -> int:
    """A whole number of the query; anything else is refused before it reaches the explorer."""
    text = request.query_params.get(name, "" if default is None else str(default))
    if not text.isdecimal() or not text.isascii() or len(text) > 9 or int(text) > largest:
        raise ValueError(f"{name}: got {text[:40]!r}, need a whole number from 0 to {largest}")
    return int(text)


async def _read_body(request: Request) -> bytes:
    """The body of a request, up to the limit."""
    too_large = TooLarge(f"the image is larger than {MAX_UPLOAD // 2**20} MB; make it smaller")
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > MAX_UPLOAD:
        raise too_large
    body = bytearray()
    with contextlib.suppress(ClientDisconnect):
        async for chunk in request.stream():
            if len(body) + len(chunk) > MAX_UPLOAD:
                raise too_large
            body += chunk
    return bytes(body)
