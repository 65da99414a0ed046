"""The routes of the live page: each asks the explorer one thing and returns JSON or an image."""

from __future__ import annotations

import contextlib
import json
import re
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
from meanshift.viz.explorer.labels import Conflict
from meanshift.viz.explorer.model import Explorer
from meanshift.viz.explorer.search import decode_upload
from meanshift.viz.explorer.thumbnails import SIDES
from meanshift.viz.run_reader import MissingData

MAX_UPLOAD = 20 * 2**20  # bytes of an image to search with
MAX_SHEET = 64  # thumbnails in one answer
_ASSETS = {
    "explorer.html": "text/html",
    "explorer.js": "text/javascript",
    "explorer-map.js": "text/javascript",
    "explorer-search.js": "text/javascript",
    "explorer-clean.js": "text/javascript",
    "explorer-label.js": "text/javascript",
    "explorer-label.css": "text/css",
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
        headers = {"ETag": tag, **self._caching(request)}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        content, media_type = self.explorer.thumbnail(source, index, side)
        return Response(content, media_type=media_type, headers=headers)

    def sheet(self, request: Request) -> Response:
        texts = request.query_params.get("rows", "").split(",")
        if len(texts) > MAX_SHEET or not all(_is_number(text) for text in texts):
            raise ValueError(f"rows: need up to {MAX_SHEET} whole numbers, with commas between")
        content = self.explorer.sheet([int(text) for text in texts])
        return Response(content, media_type="image/jpeg", headers=self._caching(request))

    def _caching(self, request: Request) -> dict[str, str]:
        # The image at an address with the present key never changes.
        immutable = request.query_params.get("v") == self.explorer.cache_key
        caching = "max-age=31536000, immutable" if immutable else "no-cache"
        return {"Cache-Control": f"private, {caching}"}

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

    def labels(self, request: Request) -> Response:
        state = self.explorer.labeling.state()
        unchanged = request.query_params.get("since") == str(state["version"])
        return Response(status_code=204) if unchanged else _JSON(state)

    async def give_labels(self, request: Request) -> Response:
        body = await _read_body(request)
        return await run_in_threadpool(self._give_labels, body)

    def _give_labels(self, body: bytes) -> Response:
        labeling = self.explorer.labeling
        change = _label_change(body)
        try:
            if "undo" in change:
                labels = labeling.log.undo(change["undo"])
            else:
                labels = labeling.log.give(change["indices"], change["label"], seen=change["seen"])
        except Conflict as conflict:
            return _JSON({"error": str(conflict), "state": labeling.state()}, 409)
        return _JSON(labeling.state(labels))

    def labels_csv(self, _: Request) -> Response:
        content = self.explorer.labeling.log.as_csv().encode(errors="backslashreplace")
        name = re.sub(r"[^A-Za-z0-9_.-]+", "-", self.explorer.run.name)
        headers = {"Content-Disposition": f'attachment; filename="{name}-labels.csv"'}
        return Response(content, media_type="text/csv", headers=headers)

    def probe(self, request: Request) -> Response:
        return _JSON(self.explorer.labeling.probe(_source(request)))

    def probe_accuracy(self, request: Request) -> Response:
        return _JSON(self.explorer.labeling.accuracy(_source(request)))

    def images_to_label(self, request: Request) -> Response:
        texts = request.query_params.get("indices", "")
        if not re.fullmatch(r"[\d,]*", texts, re.ASCII):
            raise ValueError("indices: need whole numbers, with commas between")
        images = self.explorer.labeled_images(
            request.query_params.get("kind", "proposed"),
            name=_source(request),
            index=_number(request, "index", default=0),
            label=request.query_params.get("label", ""),
            indices=[int(text) for text in texts.split(",") if text],
        )
        return _JSON({"images": images})

    def stop_training(self, _: Request) -> Response:
        self.explorer.live.request_stop()
        return _JSON({})

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
        Route("/sheet", handlers.sheet),
        Route("/api/prepare", handlers.prepare),
        Route("/api/rank", handlers.rank),
        Route("/api/search", handlers.search, methods=["POST"]),
        Route("/api/stop", handlers.stop, methods=["POST"]),
        Route("/api/stop-training", handlers.stop_training, methods=["POST"]),
        Route("/api/labels", handlers.labels),
        Route("/api/labels", handlers.give_labels, methods=["POST"]),
        Route("/labels.csv", handlers.labels_csv),
        Route("/api/label/probe", handlers.probe),
        Route("/api/label/accuracy", handlers.probe_accuracy),
        Route("/api/label/images", handlers.images_to_label),
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


def _label_change(body: bytes) -> dict[str, Any]:
    """What a page wants to change: {"undo": record}, or images and their label."""
    try:
        change = json.loads(body)
    except (ValueError, RecursionError):
        change = None
    if isinstance(change, dict):
        label = change.get("label", 0)
        indices = change.get("indices")
        if isinstance(change.get("undo"), int) or (
            isinstance(change.get("seen"), int)
            and (label is None or isinstance(label, str))
            and isinstance(indices, list)
            and all(isinstance(index, int) for index in indices)
        ):
            return change
    raise ValueError("labels: need undo, or seen, indices and label, as JSON")


def _source(request: Request) -> str:
    return request.query_params.get("in", "snapshot")


def _number(
    request: Request, name: str, *, default: int | None = None, largest: int = 10**9 - 1
) -> int:
    """A whole number of the query; anything else is refused before it reaches the explorer."""
    text = request.query_params.get(name, "" if default is None else str(default))
    if not _is_number(text) or int(text) > largest:
        raise ValueError(f"{name}: got {text[:40]!r}, need a whole number from 0 to {largest}")
    return int(text)


def _is_number(text: str) -> bool:
    return text.isdecimal() and text.isascii() and len(text) <= 9


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
