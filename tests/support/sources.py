"""Sources that several tests open, compare and serve."""

import socket
import struct
import threading
import time
import zlib
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import quote, unquote

import pytest
import torch

from meanshift.data import UnreadableSample, open_source
from meanshift.data.folder import FolderSource
from meanshift.data.loader import batches
from tests.support.views import two_views


def titles(source):
    return [source.title(index) for index in range(len(source))]


def open_one(spec):
    """The only split of a source."""
    splits = open_source(str(spec))
    assert list(splits) == ["train"]
    return splits["train"]


def assert_same_images(ours, theirs):
    assert len(ours) == len(theirs)
    for index in range(len(theirs)):
        assert torch.equal(ours.read(index), theirs.read(index)), theirs.title(index)


def assert_is_folder(source, root):
    """The source has the images, the labels and the classes of a folder."""
    folder = FolderSource(root)
    assert_same_images(source, folder)
    assert torch.equal(source.labels, folder.labels)
    assert source.classes == folder.classes


def image_cells(root):
    """The images of a folder as cells of a table, as the `datasets` library stores them."""
    return [{"bytes": file.read_bytes(), "path": None} for file in sorted(root.rglob("*.jpg"))]


def table_columns(root, classes):
    """The columns of a table of a folder's images: their classes, and a number of no interest."""
    files = sorted(root.rglob("*.jpg"))
    return {
        "id": list(range(len(files))),
        "image": image_cells(root),
        "label": [classes.index(file.parent.name) for file in files],
    }


def truncate_file(path):
    """Cut a file short, as a failed copy does."""
    path.write_bytes(path.read_bytes()[:200])
    return path


def load_batches(source, start, stop, *, batch_size=4, seed=3, size=16, partial=False, workers=0):
    """The batches of some steps, with the crops of two views."""
    crop = two_views(seed, size).crop
    return list(
        batches(
            source,
            crop,
            batch_size=batch_size,
            seed=seed,
            start=start,
            stop=stop,
            partial=partial,
            workers=workers,
        )
    )


class FolderHandler(BaseHTTPRequestHandler):
    """Answers for `serve_folder`, on connections that stay open."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else headers and body wait for each other, for 40 ms

    def setup(self):
        super().setup()
        self.server.connections.append(self.connection)

    def do_GET(self):
        self.server.requests.append((self.path, self.headers.get("Range")))
        with self.server.counting:
            self.server.running += 1
            self.server.most_at_once = max(self.server.most_at_once, self.server.running)
        try:
            time.sleep(self.server.latency)
            self.answer()
        finally:
            with self.server.counting:
                self.server.running -= 1

    def answer(self):
        if self.server.fail > 0 and self.server.fail_at in self.path:
            self.server.fail -= 1
            self.close_connection = True
            if self.server.how != "hang up":
                self.send_error(self.server.how)
            return
        file = self.server.root / unquote(self.path.partition("?")[0].lstrip("/"))
        if file.is_dir():
            self.list_folder(file)
        elif file.is_file():
            self.send_file(file)
        else:
            self.send_error(404)

    def list_folder(self, folder):
        """A page as Apache writes it, with links that are no files."""
        names = sorted(quote(file.name) + "/" * file.is_dir() for file in folder.iterdir())
        links = "".join(f'<a href="{name}">x</a>' for name in ["../", "?C=N;O=D", *names])
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(links)))
        self.end_headers()
        self.wfile.write(links.encode())

    def send_file(self, file):
        span = self.headers.get("Range") if self.server.ranges else None
        content = file.read_bytes()
        size = len(content)
        self.send_response(206 if span else 200)
        if span:
            first, last = map(int, span.removeprefix("bytes=").split("-"))
            content = content[first : last + 1]
            self.send_header("Content-Range", f"bytes {first}-{first + len(content) - 1}/{size}")
        self.send_header("ETag", f'"{file.stat().st_mtime_ns}"')
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.server.half:
            self.server.half -= 1
            self.close_connection = True
            content = content[: len(content) // 2]
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@contextmanager
def serve_folder(root, *, ranges=True):
    """Serve the files of a folder, and pages that list them, over HTTP.

    The server has `address`, `requests` as (path, Range), and `most_at_once`, the largest number of
    requests at a time, each of which takes `latency` seconds. The next `fail` requests of paths
    with `fail_at` fail in the way `how`, and the next `half` answers end in the middle.
    """
    server = ThreadingHTTPServer(("127.0.0.1", 0), FolderHandler)
    server.root = root
    server.ranges = ranges
    server.requests = []
    server.connections = []
    server.counting = threading.Lock()
    server.running = 0
    server.most_at_once = 0
    server.latency = 0.0
    server.fail = 0
    server.fail_at = ""
    server.how = "hang up"
    server.half = 0
    server.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
        for connection in server.connections:
            with suppress(OSError):  # closed already
                connection.shutdown(socket.SHUT_RDWR)


def damaged_columns(photos):
    """Columns of 13 photos with two unreadable images and two unknown labels."""
    images = image_cells(photos)
    images[1] = {"bytes": b"no image", "path": None}
    images[2] = None
    return {"image": images, "label": [0, None, -1, *[1] * 10]}


def assert_damage_is_reported(source, photos):
    """The images and labels of `damaged_columns` are named as unreadable and unknown."""
    assert source.labels.tolist() == [0, -1, -1, *[1] * 10]
    for index in (1, 2):
        with pytest.raises(UnreadableSample) as caught:
            source.read(index)
        assert caught.value.title == source.title(index)
    assert torch.equal(source.read(3), FolderSource(photos).read(3))


def write_deep_png(path, pixels):
    """A PNG with colors of 16 bits, which Pillow cannot write."""
    height, width, channels = pixels.shape
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    header = struct.pack(">IIBBBBB", width, height, 16, {3: 2, 4: 6}[channels], 0, 0, 0)
    content = b"\x89PNG\r\n\x1a\n"
    for name, part in ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")):
        content += struct.pack(">I", len(part)) + name + part
        content += struct.pack(">I", zlib.crc32(name + part))
    path.write_bytes(content)
