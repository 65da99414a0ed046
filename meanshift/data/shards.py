"""Tar shards in webdataset's layout, on a disk or at an address, with random access.

The webdataset package reads shards from front to back, so an image has no address there, and wids
downloads whole shards. Here an index of the members is built once, and an image is one read at its
offset; docs/data.md has the measurements.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shlex
import tarfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor

from meanshift.data.decode import SUFFIXES, read_image
from meanshift.data.file_access import (
    FileStream,
    LocalFile,
    RandomAccessFile,
    base_name,
    is_remote,
)
from meanshift.data.folder import by_extension
from meanshift.data.remote import RemoteFile, open_remote, read_ranges, take
from meanshift.data.remote_folder import RemotePath
from meanshift.data.source import Source
from meanshift.runtime import checksum
from meanshift.runtime.progress import progress

_FORMAT = "meanshift shard 3"
COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")


class ShardSource(Source):
    """The images of some shards, in the order of the shards' names and of their members.

    Members whose names agree up to the first dot belong together. The first image among them
    counts, `.cls` or a `.json` with `label`, `cls` or `class` labels it, all else is ignored.
    """

    def __init__(self, addresses: Sequence[str], *, name: str) -> None:
        self.name = name
        self.files = _open_files(sorted(set(addresses)))
        self._contents = dict[int, bytes | OSError]()
        addresses = [file.address for file in self.files]
        base_names = list(map(base_name, addresses))
        unique = len(set(base_names)) == len(base_names)
        self.names = base_names if unique else addresses
        self.rows: list[tuple[int, int, int, str]] = []  # shard, offset, size, key.ext
        labels = list[str | None]()
        damaged = list[str]()
        duplicates = list[str]()
        others = list[str]()
        with progress("index shards", len(self.files)) as bar:
            for number, file in enumerate(self.files):
                index = _cached_index(file)
                self.rows += [(number, *row[:3]) for row in index["rows"]]
                labels += [row[3] for row in index["rows"]]
                damaged += [self.names[number]] if index["damaged"] else []
                duplicates += [f"{self.names[number]}/{key}" for key in index["duplicates"]]
                others += index["left_out"]
                bar.update()
        for cases, what in (
            (damaged, "shards are cut short or damaged, only what is whole before that is used"),
            (duplicates, "images share their key with an earlier one and are ignored"),
        ):
            if cases:
                warnings.warn(f"{name}: {len(cases)} {what}; the first is {cases[0]}", stacklevel=2)
        left_out = by_extension(others)
        if not self.rows:
            raise ValueError(
                f"{name}: no image in {len(self.files)} shards"
                f"{left_out and f', but {left_out}'}; need members ending in "
                f"{' '.join(sorted(SUFFIXES))}"
            )
        if left_out:
            warnings.warn(f"{name}: left out {left_out}: not known as images", stacklevel=2)
        self.classes, numbers = _number_labels(labels)
        self.labels = torch.tensor(numbers) if self.classes else None

    def __len__(self) -> int:
        return len(self.rows)

    def title(self, index: int) -> str:
        shard, _, _, member = self.rows[index]
        return f"{self.names[shard]}/{member}"

    def read(self, index: int) -> Shaped[Tensor, "channels height width"]:
        content = take(self._contents, index)
        if content is None:
            shard, offset, size, _ = self.rows[index]
            content = self.files[shard].read_at(offset, size)
        return read_image(io.BytesIO(content), title=self.title(index))

    def prefetch(self, indices: Sequence[int]) -> None:
        ranges = list[tuple[RemoteFile, int, int]]()
        for index in indices:
            shard, offset, size, _ = self.rows[index]
            file = self.files[shard]
            if not isinstance(file, RemoteFile):
                return
            ranges.append((file, offset, size))
        self._contents = dict(zip(indices, read_ranges(ranges), strict=True))

    def content_fingerprint(self) -> str:
        versions = [self.fingerprint(), *(file.version for file in self.files)]
        return hashlib.sha256("\n".join(versions).encode()).hexdigest()[:16]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_contents": {}}


def _open_files(addresses: Sequence[str]) -> Sequence[LocalFile | RemoteFile]:
    if any(map(is_remote, addresses)):
        return open_remote(addresses)
    return [LocalFile(address) for address in addresses]


def shards_in_folder(root: Path | RemotePath) -> list[str]:
    """The shards at the top and in the folders of the splits; none if there are image files."""
    if isinstance(root, RemotePath):
        return _remote_shards(root)
    tops = [root, *(root / split for split in ("train", "val", "test"))]
    files = [file for top in tops if top.is_dir() for file in top.iterdir()]
    shards = [file for file in files if file.name.endswith((".tar", *COMPRESSED))]
    found = [str(file) for file in shards if file.is_file()]
    names = (name.lower() for _, _, names in os.walk(root) for name in names) if found else ()
    return [] if any(Path(name).suffix in SUFFIXES for name in names) else sorted(found)


def _remote_shards(root: RemotePath) -> list[str]:
    found = list[str]()
    for folder, names in root.walk():
        if any(Path(name).suffix.lower() in SUFFIXES for name in names):
            return []
        if folder.relative_to(root).as_posix() in (".", "train", "val", "test"):
            shards = (name for name in names if name.endswith((".tar", *COMPRESSED)))
            found += [str(folder / name) for name in shards]
    return sorted(found)


def _number_labels(labels: Sequence[str | None]) -> tuple[list[str], list[int]]:
    """The classes, and the class of each label: -1 where there is none, or it is below 0."""
    known = [label for label in labels if label is not None]
    if all(re.fullmatch(r"-?[0-9]{1,18}", label) for label in known):
        values = [-1 if label is None else int(label) for label in labels]
        number = {value: i for i, value in enumerate(sorted(v for v in {*values} if v >= 0))}
        return [str(value) for value in number], [number.get(value, -1) for value in values]
    classes = sorted(set(known))
    index = {label: i for i, label in enumerate(classes)}
    return classes, [-1 if label is None else index[label] for label in labels]


def _cached_index(file: RandomAccessFile) -> dict[str, Any]:
    """The index of a shard, from the user's cache, or built and written there."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "meanshift/shards"
    remote = isinstance(file, RemoteFile)
    address = file.address if remote else str(Path(file.address).resolve())
    path = cache / f"{hashlib.sha256(os.fsencode(address)).hexdigest()[:32]}.json"
    key = {"format": _FORMAT, "version": file.version}
    try:
        index = checksum.read_json(path)
        if {name: index.get(name) for name in key} == key:
            return index
    except (OSError, ValueError, AttributeError):  # none yet, or not readable: built again
        pass
    index = key | _build_index(file)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        checksum.write_json(path, index)
    except OSError:  # a cache that cannot be written: the next start builds it again
        pass
    return index


def _build_index(file: RandomAccessFile) -> dict[str, Any]:
    """Read a shard's headers and labels from front to back."""
    magic = file.read_at(0, min(2, file.size))
    if file.address.endswith(COMPRESSED) or magic in (b"\x1f\x8b", b"BZ"):
        raise ValueError(
            f"{file.address}: is compressed, so its images have no addresses; need a plain tar: "
            f"type gunzip (bunzip2, unxz, unzstd) {shlex.quote(base_name(file.address))}"
        )
    images = dict[str, tuple[int, int, str]]()  # by key: offset, size, name
    labels = dict[str, str]()
    duplicates = list[str]()
    others = dict[str, str]()  # by key
    remote = isinstance(file, RemoteFile)
    # Of a local file not by `read_at`: a timeout for each header would take most of the time.
    raw: io.RawIOBase = FileStream(file) if remote else io.FileIO(file.address)
    stream = io.BufferedReader(raw, 1 << (22 if remote else 14))
    try:
        with stream, tarfile.open(fileobj=stream, mode="r:") as tar:
            for member in _complete_members(tar, file.size):
                folder, slash, base = member.name.removeprefix("./").rpartition("/")
                stem, _, ending = base.partition(".")
                ending = ending.lower()
                key = folder + slash + stem
                if stem and f".{ending.rpartition('.')[2]}" in SUFFIXES:
                    row = (member.offset_data, member.size, folder + slash + base)
                    if images.setdefault(key, row) is not row:
                        duplicates.append(row[2])
                elif stem and ending in ("cls", "json") and (opened := tar.extractfile(member)):
                    label = _read_label(opened.read(), ending)
                    if label is not None and (ending == "cls" or key not in labels):
                        labels[key] = label
                elif stem:
                    others[key] = base
            end = tar.offset
    except tarfile.TarError as error:
        raise ValueError(
            f"{file.address}: not a tar file ({error}); need plain tar shards: create them with "
            f"tar --sort=name -cf photos-000.tar FILES"
        ) from None
    damaged = file.size < end + 512 or file.read_at(end, 512) != bytes(512)
    rows = [[*row, labels.get(key)] for key, row in images.items()]
    left_out = [name for key, name in others.items() if key not in images]
    return {"rows": rows, "damaged": damaged, "duplicates": duplicates, "left_out": left_out}


def _complete_members(tar: tarfile.TarFile, size: int) -> Iterator[tarfile.TarInfo]:
    """The regular files before the place where a shard is cut short or damaged."""
    while True:
        try:
            member = tar.next()
        except tarfile.ReadError:  # not of the first header, which was read at opening
            return
        if member is None or member.offset_data + member.size > size:
            return
        if member.isreg() and not member.issparse():
            yield member


def _read_label(content: bytes, ending: str) -> str | None:
    """A label's text: all of a `.cls`, or the number or string in a `.json`."""
    text = content.decode("utf-8", "replace").strip()
    if ending == "cls":
        return text or None
    try:
        fields = json.loads(text)
    except ValueError:
        return None
    if not isinstance(fields, dict):
        return None
    for name in ("label", "cls", "class"):
        value = fields.get(name)
        if isinstance(value, (int, str)) and not isinstance(value, bool) and value != "":
            return str(value)
    return None
