"""Sources that several tests open, compare and serve."""

import struct
import threading
import zlib
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

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


@contextmanager
def serve_folder(root, *, ranges=True):
    """Serve the files of a folder over HTTP.

    The server has `address`, and `requests` as (path, Range). The next `fail` requests fail in the
    way `how`, and the next `half` answers end in the middle.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            span = self.headers.get("Range")
            self.server.requests.append((self.path, span))
            if self.server.fail > 0:
                self.server.fail -= 1
                if self.server.how != "hang up":
                    self.send_error(self.server.how)
                return
            file = root / self.path.partition("?")[0].lstrip("/")
            if not file.is_file():
                self.send_error(404)
                return
            content = file.read_bytes()
            size = len(content)
            self.send_response(206 if span and ranges else 200)
            if span and ranges:
                first, last = map(int, span.removeprefix("bytes=").split("-"))
                content = content[first : last + 1]
                self.send_header(
                    "Content-Range", f"bytes {first}-{first + len(content) - 1}/{size}"
                )
            self.send_header("ETag", f'"{file.stat().st_mtime_ns}"')
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: len(content) // 2] if self.server.half else content)
            self.server.half = max(0, self.server.half - 1)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.requests = []
    server.fail = 0
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
