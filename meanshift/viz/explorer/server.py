"""The routes of the live page: each asks the explorer one thing and answers in JSON or images."""

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
from meanshift.viz.explorer.model import Explorer
from meanshift.viz.explorer.search import decode
from meanshift.viz.explorer.thumbnails import SIDES
from meanshift.viz.explorer.work import Pending, Stopped
from meanshift.viz.run_reader import MissingData

UPLOAD = 20 * 2**20  # bytes of an image to search with
_ASSETS = {
    "explore.html": "text/html",
    "explore.js": "text/javascript",
    "explore-map.js": "text/javascript",
    "explore-find.js": "text/javascript",
    "explore.css": "text/css",
    "look.css": "text/css",
    "map.js": "text/javascript",
    "curves.js": "text/javascript",
}


class TooLarge(ValueError):
    """An upload beyond the limit."""


class _Answer(JSONResponse):
    """File names may be any bytes: what is no character goes as an escape."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


def application(explorer: Explorer) -> Starlette:
    """The pages and what they ask; `Guard` belongs in front of it."""
    looking = threading.Lock()

    def page(_: Request) -> Response:
        return _asset("explore.html")

    def asset(request: Request) -> Response:
        return _asset(request.path_params["name"])

    def run(request: Request) -> Response:
        nonlocal explorer
        with looking:
            explorer = explorer.current()
        if request.query_params.get("since") == explorer.live.version():
            return Response(status_code=204)
        return _Answer(explorer.state())

    def probe(_: Request) -> Response:
        return _Answer(explorer.probe())

    def map_(request: Request) -> Response:
        return _Answer(explorer.map(have=request.query_params.get("have", "")))

    def colors(request: Request) -> Response:
        by = request.query_params.get("by", "")
        return _Answer(explorer.colors(by, epoch=_number(request, "epoch")))

    def point(request: Request) -> Response:
        return _Answer(explorer.point(request.path_params["row"]))

    def thumbnail(request: Request) -> Response:
        part, index = request.path_params["part"], request.path_params["index"]
        side = _number(request, "side", 128)
        if side not in SIDES:
            raise ValueError(f"side: got {side}, need one of {', '.join(map(str, SIDES))}")
        tag = f'"{explorer.mark}-{part}-{index}-{side}"'
        asked = request.query_params.get("v") == explorer.mark  # such an address never changes
        headers = {
            "ETag": tag,
            "Cache-Control": "private, " + ("max-age=31536000, immutable" if asked else "no-cache"),
        }
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        content, kind = explorer.thumbnail(part, index, side)
        return Response(content, media_type=kind, headers=headers)

    def ready(request: Request) -> Response:
        explorer.prepare(_part(request), epoch=_number(request, "epoch"))
        return _Answer({})

    def clean(request: Request) -> Response:
        return _Answer(
            explorer.clean(
                request.query_params.get("order", "outliers"),
                part=_part(request),
                epoch=_number(request, "epoch"),
                start=_number(request, "start", 0),
                count=_number(request, "count", 60, most=1000),
            )
        )

    async def search(request: Request) -> Response:
        body = await _body(request)
        return await run_in_threadpool(searched, request, body)

    def searched(request: Request, body: bytes) -> Response:
        part, epoch = _part(request), _number(request, "epoch")
        count = max(1, _number(request, "count", 24, most=200))
        explorer.prepare(part, epoch=epoch)
        if body:
            with explorer.thumbnails.decoding:
                image = decode(body)
        else:
            of = request.query_params.get("of", "")
            image = explorer.image(of, _number(request, "index"))
        found = explorer.search(image, part=part, epoch=epoch, count=count)
        return _Answer({"found": found})

    def stop(_: Request) -> Response:
        explorer.searcher.work.stop()
        return _Answer({})

    routes = [
        Route("/", page),
        Route("/assets/{name}", asset),
        Route("/api/run", run),
        Route("/api/probe", probe),
        Route("/api/map", map_),
        Route("/api/colors", colors),
        Route("/api/point/{row:int}", point),
        Route("/thumb/{part}/{index:int}", thumbnail),
        Route("/api/ready", ready),
        Route("/api/clean", clean),
        Route("/api/search", search, methods=["POST"]),
        Route("/api/stop", stop, methods=["POST"]),
    ]
    handlers: Any = {
        Pending: _pending,
        Stopped: _refusal(409),
        MissingData: _refusal(404),
        UnreadableSample: _refusal(404),
        TooLarge: _refusal(413),
        ValueError: _refusal(400),
        OSError: _refusal(500),
    }
    return Starlette(routes=routes, exception_handlers=handlers)


def _asset(name: str) -> Response:
    if name not in _ASSETS:  # a fixed table: no name from outside reaches the disk
        raise MissingData(f"{name!r} is no part of the page")
    content = (resources.files("meanshift.viz") / "assets" / name).read_bytes()
    return Response(content, media_type=_ASSETS[name], headers={"Cache-Control": "no-cache"})


def _pending(_: Request, pending: Pending) -> Response:
    told = {"pending": pending.title, "done": pending.done, "total": pending.total}
    return _Answer(told, 202)


def _refusal(status: int) -> Any:
    def handle(_: Request, error: Exception) -> Response:
        why = f"{error.title}: {error.why}" if isinstance(error, UnreadableSample) else str(error)
        unread = {"Connection": "close"} if status == 413 else None  # the rest is not waited for
        return _Answer({"error": why}, status, unread)

    return handle


def _part(request: Request) -> str:
    return request.query_params.get("in", "probe")


def _number(request: Request, name: str, usual: int | None = None, most: int = 10**9 - 1) -> int:
    given = request.query_params.get(name, "" if usual is None else str(usual))
    if not given.isdecimal() or not given.isascii() or len(given) > 9 or int(given) > most:
        raise ValueError(f"{name}: got {given[:40]!r}, need a whole number from 0 to {most}")
    return int(given)


async def _body(request: Request) -> bytes:
    """What is sent, as long as it is not too much."""
    told, parts = request.headers.get("content-length", "0"), bytearray()
    refusal = TooLarge(f"the image is larger than {UPLOAD // 2**20} MB; make it smaller")
    if told.isdecimal() and int(told) > UPLOAD:
        raise refusal
    with contextlib.suppress(ClientDisconnect):
        async for part in request.stream():
            if len(parts) + len(part) > UPLOAD:
                raise refusal
            parts += part
    return bytes(parts)
