"""Tar shards in webdataset's layout, on a disk or at an address, with random access.

The webdataset package reads shards from front to back, so an image has no address there; here an
index of the members is made once, and an image is one read at its offset.
"""

from __future__ import annotations

import hashlib
import http.client
import io
import json
import os
import re
import shlex
import tarfile
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import torch
from jaxtyping import UInt8
from torch import Tensor

from meanshift.data.decode import SUFFIXES, read_image
from meanshift.data.source import Source
from meanshift.runtime.progress import progress
from meanshift.runtime.run_directory import write_text

WAITS = (0.5, 1.0, 2.0, 4.0)
"""Seconds before each further try of a request that failed."""

_TIMEOUT = 30.0
_FORMAT = "meanshift shard 1"
ZIPPED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")


class Local:
    """Bytes of a file; it is opened for each read, so no handle is shared with a worker."""

    def __init__(self, path: str) -> None:
        self.address, told = path, Path(path).stat()
        self.size, self.version = told.st_size, f"{told.st_size} {told.st_mtime_ns}"

    def read_at(self, offset: int, size: int) -> bytes:
        with Path(self.address).open("rb", buffering=0) as file:
            file.seek(offset)
            content = file.read(size)
        if len(content) != size:
            raise OSError(
                f"{self.address}: ends before byte {offset + size}, which was there when it was "
                f"opened; restore it, or start anew"
            )
        return content


class Remote:
    """Bytes at an http address, by Range requests that are tried again when the network fails."""

    def __init__(self, address: str) -> None:
        self.address, self.size = address, -1
        _, told = self._ask(0, 1)
        self.size = int(told["Content-Range"].rpartition("/")[2])
        self.version = f"{self.size} {told.get('ETag') or told.get('Last-Modified')}"

    def read_at(self, offset: int, size: int) -> bytes:
        return self._ask(offset, size)[0] if size else b""

    def _ask(self, offset: int, size: int) -> tuple[bytes, Any]:
        wanted = {"Range": f"bytes={offset}-{offset + size - 1}", "Accept-Encoding": "identity"}
        request, reason = urllib.request.Request(self.address, headers=wanted), ""
        for wait in (*WAITS, None):
            try:
                with urllib.request.urlopen(request, timeout=_TIMEOUT) as answer:
                    status, told = answer.status, answer.headers
                    content = answer.read(size) if status == 206 else b""
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
                self._refuse_other(status, told.get("Content-Range", ""), offset)
                return content, told
            if wait is not None:
                time.sleep(wait)
        raise OSError(
            f"{self.address}: could not be read ({reason}); need a server that answers: look at "
            f"the address and the network, then type the command again"
        )

    def _refuse_other(self, status: int, span: str, offset: int) -> None:
        """Refuse bytes that are not those that were asked for."""
        told = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", span)
        if status != 206 or told is None or int(told[1]) != offset:
            raise OSError(
                f"{self.address}: its server ignores Range requests (it answered {status}), so "
                f"single images cannot be read; use another server, or download the file"
            )
        if self.size not in (-1, int(told[2])):
            raise OSError(
                f"{self.address}: has {told[2]} bytes now and had {self.size} when it was opened; "
                f"restore it, or start anew"
            )


class Reading(io.RawIOBase):
    """A local or remote file as Python's own kind, for tarfile and pyarrow."""

    def __init__(self, file: Local | Remote) -> None:
        super().__init__()
        self.file, self.at = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self.at = offset + (0, self.at, self.file.size)[whence]
        return self.at

    def readinto(self, buffer: Any) -> int:
        size = max(0, min(len(buffer), self.file.size - self.at))
        if size:
            buffer[:size] = self.file.read_at(self.at, size)
        self.at += size
        return size


def reach(address: str) -> Local | Remote:
    """The file at a path or an http address."""
    return Remote(address) if is_remote(address) else Local(address)


def is_remote(address: str) -> bool:
    return address.startswith(("http://", "https://"))


def base_name(address: str) -> str:
    """The last part of a path, or of an address without its query."""
    path = unquote(urlsplit(address).path) if is_remote(address) else address
    return path.rpartition("/")[2]


def split_of(name: str) -> str | None:
    """The split whose name begins a file's or a folder's: train, val or test."""
    begins = r"(?P<train>train)(?:ing)?|(?P<val>val)(?:id(?:ation)?)?|(?P<test>test)(?:ing)?"
    found = re.match(rf"(?:{begins})(?![a-z])", name, re.IGNORECASE)
    return found.lastgroup if found else None


class ShardSource(Source):
    """The images of some shards, in the order of the shards' names and of their members.

    Members whose names agree up to the first dot belong together. The first image among them
    counts, `.cls` or a `.json` with `label`, `cls` or `class` labels it, all else is passed over.
    """

    def __init__(self, addresses: Sequence[str], *, name: str) -> None:
        self.name, self.files = name, [reach(address) for address in sorted(set(addresses))]
        addresses = [file.address for file in self.files]
        plain = list(map(base_name, addresses))
        self.names = plain if len(set(plain)) == len(plain) else addresses
        self.rows: list[tuple[int, int, int, str]] = []  # shard, offset, size, key.ext
        labels, damaged, doubles = list[str | None](), list[str](), list[str]()
        with progress("index shards", len(self.files)) as bar:
            for number, file in enumerate(self.files):
                index = _indexed(file)
                self.rows += [(number, *row[:3]) for row in index["rows"]]
                labels += [row[3] for row in index["rows"]]
                damaged += [self.names[number]] if index["damaged"] else []
                doubles += [f"{self.names[number]}/{key}" for key in index["doubles"]]
                bar.update()
        for many, what in (
            (damaged, "shards are cut short or damaged, only what is whole before that is used"),
            (doubles, "images share their key with an earlier one and are passed over"),
        ):
            if many:
                warnings.warn(f"{name}: {len(many)} {what}; the first is {many[0]}", stacklevel=2)
        if not self.rows:
            raise ValueError(
                f"{name}: no image in {len(self.files)} shards; need members ending in "
                f"{' '.join(sorted(SUFFIXES))}"
            )
        self.classes, numbers = _numbered(labels)
        self.labels = torch.tensor(numbers) if self.classes else None

    def __len__(self) -> int:
        return len(self.rows)

    def title(self, index: int) -> str:
        shard, _, _, member = self.rows[index]
        return f"{self.names[shard]}/{member}"

    def read(self, index: int) -> UInt8[Tensor, "3 height width"]:
        shard, offset, size, _ = self.rows[index]
        content = self.files[shard].read_at(offset, size)
        return read_image(io.BytesIO(content), title=self.title(index))

    def contents(self) -> str:
        told = [self.fingerprint(), *(file.version for file in self.files)]
        return hashlib.sha256("\n".join(told).encode()).hexdigest()[:16]


def in_folder(root: Path) -> list[str]:
    """The shards at the top and in the folders of the splits, where no image lies beside them."""
    tops = [root, *(root / split for split in ("train", "val", "test"))]
    files = [file for top in tops if top.is_dir() for file in top.iterdir() if file.is_file()]
    found = [str(file) for file in files if file.name.endswith((".tar", *ZIPPED))]
    seen = (name.lower() for _, _, names in os.walk(root) for name in names) if found else ()
    return [] if any(Path(name).suffix in SUFFIXES for name in seen) else sorted(found)


def _numbered(labels: Sequence[str | None]) -> tuple[list[str], list[int]]:
    """The classes, and the number of each label's own: -1 where there is none, or it is below 0."""
    told = [label for label in labels if label is not None]
    if all(re.fullmatch(r"-?[0-9]{1,18}", label) for label in told):
        values = [-1 if label is None else int(label) for label in labels]
        kept = {value: i for i, value in enumerate(sorted(v for v in {*values} if v >= 0))}
        return [str(value) for value in kept], [kept.get(value, -1) for value in values]
    classes = sorted(set(told))
    index = {label: i for i, label in enumerate(classes)}
    return classes, [-1 if label is None else index[label] for label in labels]


def _indexed(file: Local | Remote) -> dict[str, Any]:
    """The index of a shard, from the user's cache or made and kept there."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "meanshift/shards"
    whole = file.address if isinstance(file, Remote) else str(Path(file.address).resolve())
    kept = cache / f"{hashlib.sha256(os.fsencode(whole)).hexdigest()[:32]}.json"
    wanted = {"format": _FORMAT, "version": file.version}
    try:
        index: dict[str, Any] = json.loads(kept.read_text())
        if {key: index.get(key) for key in wanted} == wanted:
            return index
    except (OSError, ValueError, AttributeError):  # none yet, or not readable: made anew
        pass
    index = wanted | _walk(file)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        write_text(kept, json.dumps(index, separators=(",", ":")))
    except OSError:  # a cache that cannot be written: the next start walks again
        pass
    return index


def _walk(file: Local | Remote) -> dict[str, Any]:
    """Read a shard's headers and labels from front to back."""
    if file.address.endswith(ZIPPED) or file.read_at(0, min(2, file.size)) in (b"\x1f\x8b", b"BZ"):
        raise ValueError(
            f"{file.address}: is compressed, so its images have no addresses; need a plain tar: "
            f"type gunzip (bunzip2, unxz, unzstd) {shlex.quote(base_name(file.address))}"
        )
    images, labels, doubles = dict[str, tuple[int, int, str]](), dict[str, str](), list[str]()
    whole = io.BufferedReader(Reading(file), 1 << (22 if isinstance(file, Remote) else 14))
    try:
        with tarfile.open(fileobj=whole, mode="r:") as tar:
            for member in _whole_members(tar, file.size):
                folder, slash, base = member.name.removeprefix("./").rpartition("/")
                stem, _, ending = base.partition(".")
                key, ending = folder + slash + stem, ending.lower()
                if stem and f".{ending.rpartition('.')[2]}" in SUFFIXES:
                    row = (member.offset_data, member.size, folder + slash + base)
                    if images.setdefault(key, row) is not row:
                        doubles.append(row[2])
                elif stem and ending in ("cls", "json") and (held := tar.extractfile(member)):
                    label = _label(held.read(), ending)
                    if label is not None and (ending == "cls" or key not in labels):
                        labels[key] = label
            end = tar.offset
    except tarfile.TarError as error:
        raise ValueError(
            f"{file.address}: not a tar file ({error}); need plain tar shards: make them with "
            f"tar --sort=name -cf photos-000.tar FILES"
        ) from None
    damaged = file.size < end + 512 or file.read_at(end, 512) != bytes(512)
    rows = [[*row, labels.get(key)] for key, row in images.items()]
    return {"rows": rows, "damaged": damaged, "doubles": doubles}


def _whole_members(tar: tarfile.TarFile, size: int) -> Iterator[tarfile.TarInfo]:
    """The regular files before the place where a shard is cut or damaged."""
    while True:
        try:
            member = tar.next()
        except tarfile.ReadError:  # not of the first header, which was read at opening
            return
        if member is None or member.offset_data + member.size > size:
            return
        if member.isreg() and not member.issparse():
            yield member


def _label(content: bytes, ending: str) -> str | None:
    """A label's text: all of a `.cls`, or the simple value that a `.json` holds."""
    text = content.decode("utf-8", "replace").strip()
    if ending == "cls":
        return text or None
    try:
        told = json.loads(text)
    except ValueError:
        return None
    held = [told.get(key) for key in ("label", "cls", "class")] if isinstance(told, dict) else []
    simple = (each for each in held if isinstance(each, (int, str)) and not isinstance(each, bool))
    return next((str(each) for each in simple if each != ""), None)
