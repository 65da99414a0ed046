"""Tar shards: read at an address against urllib, on a disk against wids and webdataset."""

from __future__ import annotations

import io
import os
import tarfile
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from benchmarks.decoding import photographs
from benchmarks.memory import resident
from benchmarks.table import Row, alternate, installed, ratios
from benchmarks.worker import Worker
from meanshift.data import open_source
from meanshift.data.decode import read_image
from meanshift.data.shards import ShardSource
from meanshift.runtime import rng

SHARDS, IMAGES, BATCH_SIZE, LATENCY = 4, 1_024, 64, 0.01


def rows(rounds: int) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "shards"
        write_shards(folder)
        yield from _remote_rows(folder, 2 * rounds)
        if installed("wids") and installed("webdataset"):
            yield from _library_rows(folder, 2 * rounds)


def _remote_rows(folder: Path, rounds: int) -> Iterator[Row]:
    server = Worker(serve, folder)
    address = f"http://127.0.0.1:{server.next()}"
    seconds = _alternate(
        rounds,
        urllib=(remote_batches, address, "urllib"),
        single=(remote_batches, address, "single"),
        batch=(remote_batches, address, "batch"),
    )
    server.close()
    title = f"bytes of {BATCH_SIZE} images at an address, {1000 * LATENCY:g} ms a request"
    yield Row(f"{title}: urllib / together", ratios(seconds["urllib"], seconds["batch"]), 3.0)
    yield Row(f"{title}: one by one / together", ratios(seconds["single"], seconds["batch"]))


def _library_rows(folder: Path, rounds: int) -> Iterator[Row]:
    seconds = _alternate(
        rounds, ours=(index_and_read, folder, "ours"), wids=(index_and_read, folder, "wids")
    )
    for key, what in (
        ("index", f"index of {SHARDS} shards, no cache: wids / ours"),
        ("batch", f"{BATCH_SIZE} images at random, decoded: wids / ours"),
        ("memory", f"memory of {IMAGES:,} indexed and read images: wids / ours"),
    ):
        theirs, ours = ([each[key] for each in seconds[name]] for name in ("wids", "ours"))
        yield Row(what, ratios(theirs, ours))
    in_order = _alternate(
        rounds, ours=(read_in_order, folder, "ours"), webdataset=(read_in_order, folder, "theirs")
    )
    yield Row(
        f"{IMAGES:,} images in order, not decoded: webdataset / ours",
        ratios(in_order["webdataset"], in_order["ours"]),
        note="webdataset cannot read in another order, nor begin in the middle",
    )


def _alternate(rounds: int, **contenders: tuple[Any, ...]) -> dict[str, list[Any]]:
    workers = {name: Worker(*contender) for name, contender in contenders.items()}
    measured: dict[str, list[Any]] = alternate(
        {name: worker.next for name, worker in workers.items()}, rounds
    )
    for worker in workers.values():
        worker.close()
    return measured


def remote_batches(address: str, how: str) -> Iterator[float]:
    """Seconds from the ids of a batch to the bytes of its images."""
    source = _open(f"{address}/x-{{0..{SHARDS - 1}}}.tar")

    def read(index: int) -> bytes:
        shard, offset, size, _ = source.rows[index]
        file = source.files[shard]
        if how != "urllib":
            return file.read_at(offset, size)
        span = {"Range": f"bytes={offset}-{offset + size - 1}"}
        request = urllib.request.Request(file.address, headers=span)
        with urllib.request.urlopen(request, timeout=30) as response:
            content: bytes = response.read(size)
        return content

    yield 0.0
    for step in range(1_000_000):
        ids = _batch(step)
        start = time.perf_counter()
        if how == "batch":
            source.prefetch(ids)
        else:
            for index in ids:
                read(index)
        yield time.perf_counter() - start


def index_and_read(folder: Path, how: str) -> Iterator[dict[str, float]]:
    """Seconds of the index and of a batch; bytes that the index and a pass over the images take."""
    read_image(_image_of(_shards(folder)[0]))  # decoders are loaded
    open_all = _open_wids if how == "wids" else _open_ours
    memory = 0
    yield {}
    for step in range(1_000_000):
        before = resident("VmRSS")
        start = time.perf_counter()
        read = open_all(folder)
        indexed = time.perf_counter()
        for index in _batch(step):
            read_image(read(index))
        end = time.perf_counter()
        if not memory:  # later it is reused
            for index in range(IMAGES):
                read(index)
            memory = resident("VmRSS") - before
        yield {"index": indexed - start, "batch": end - indexed, "memory": memory}


def _open_ours(folder: Path) -> Callable[[int], io.BytesIO]:
    with tempfile.TemporaryDirectory() as empty:
        os.environ["XDG_CACHE_HOME"] = empty
        source = _open(str(folder))

    def read(index: int) -> io.BytesIO:
        shard, offset, size, _ = source.rows[index]
        return io.BytesIO(source.files[shard].read_at(offset, size))

    return read


def _open_wids(folder: Path) -> Callable[[int], io.BytesIO]:
    from wids import wids

    shards = [wids.IndexedTarSamples(path=path) for path in _shards(folder)]

    def read(index: int) -> io.BytesIO:
        content: io.BytesIO = shards[index // len(shards[0])][index % len(shards[0])][".jpg"]
        return content

    return read


def read_in_order(folder: Path, how: str) -> Iterator[float]:
    """Seconds of a pass over the bytes of all images."""
    source = _open(str(folder))
    yield 0.0
    while True:
        start = time.perf_counter()
        if how == "ours":
            count = sum(1 for row in source.rows if source.files[row[0]].read_at(*row[1:3]))
        else:
            from webdataset import WebDataset

            dataset = WebDataset(_shards(folder), shardshuffle=False)
            count = sum(1 for sample in dataset if sample["jpg"])
        assert count == IMAGES
        yield time.perf_counter() - start


def _open(spec: str) -> ShardSource:
    source = open_source(spec)["train"]
    assert isinstance(source, ShardSource)
    return source


def _batch(step: int) -> list[int]:
    ids: list[int] = rng.permutation(0, step, IMAGES)[:BATCH_SIZE].tolist()
    return ids


def _shards(folder: Path) -> list[str]:
    return [str(path) for path in sorted(folder.iterdir())]


def _image_of(shard: str) -> io.BytesIO:
    with tarfile.open(shard) as tar:
        member = tar.next()
        assert member is not None
        opened = tar.extractfile(member)
        assert opened is not None
        return io.BytesIO(opened.read())


def write_shards(folder: Path) -> None:
    """JPEGs of 224 pixels with labels, the same few again and again, in some shards."""
    folder.mkdir()
    contents = list[bytes]()
    for image in photographs(64):
        file = io.BytesIO()
        image.save(file, "JPEG", quality=90)
        contents.append(file.getvalue())
    each = IMAGES // SHARDS
    for number in range(SHARDS):
        with tarfile.open(folder / f"x-{number}.tar", "w") as tar:
            for index in range(number * each, (number + 1) * each):
                _add(tar, f"{index:06d}.jpg", contents[index % 64])
                _add(tar, f"{index:06d}.cls", str(index % 4).encode())


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


class SlowHandler(BaseHTTPRequestHandler):
    """Serves parts of files, each after the latency of a network."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else headers and body wait for each other, for 40 ms
    files: dict[str, bytes]

    def do_GET(self) -> None:
        time.sleep(LATENCY)
        content = self.files[self.path.strip("/")]
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        part = content[first : last + 1]
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{first + len(part) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)

    def log_message(self, *_: Any) -> None:
        pass


def serve(folder: Path) -> Iterator[int]:
    """A server in a process of its own; gives its port."""
    SlowHandler.files = {path.name: path.read_bytes() for path in folder.iterdir()}
    server = ThreadingHTTPServer(("127.0.0.1", 0), SlowHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield 0
    while True:
        yield server.server_port
