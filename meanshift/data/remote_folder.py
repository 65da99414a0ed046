"""A folder at an address: its files, listed once, in the place of a folder on a disk."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Sequence
from pathlib import PurePath, PurePosixPath
from typing import Any
from urllib.parse import unquote

from meanshift.data.file_access import AT_ONCE, FileStream, Stream, is_http
from meanshift.data.remote import (
    RemoteError,
    RemoteFile,
    Request,
    describe,
    file_system,
    full_address,
    read_files,
    request_all,
    take,
    unless_error,
    version_of,
)


def list_remote(address: str) -> RemotePath:
    """A folder at an address, with all files below it but those whose names begin with a dot.

    Each folder is one request; those of one depth are made together.
    """
    system = file_system(address)
    system.invalidate_cache()
    top = str(system._strip_protocol(address)).rstrip("/")
    files = dict[str, RemoteFile]()
    folders = [address.rstrip("/")]
    known = {""}
    while folders:
        answers = request_all("ls", [Request(folder, {"detail": True}) for folder in folders])
        folders = []
        for entry in (entry for answer in answers for entry in unless_error(answer)):
            name = str(entry["name"]).rstrip("/")
            inside = _inside(name, top, http=is_http(address))
            if inside in known:
                continue
            known.add(inside)
            if entry["type"] == "directory":
                folders.append(full_address(name, address, system))
            else:
                size = -1 if entry.get("size") is None else int(entry["size"])
                version = version_of(entry) if size >= 0 else ""
                files[inside] = RemoteFile(full_address(name, address, system), size, version)
    return RemotePath(_Listing(address.rstrip("/"), files))


def _inside(name: str, top: str, *, http: bool) -> str:
    """The path of an entry inside the listed folder; empty for what is none of its files."""
    rest = name.removeprefix(f"{top}/")
    if rest == name or (http and any(mark in rest for mark in "?#")):  # links of an index page
        return ""
    inside = unquote(rest) if http else rest
    hidden = any(part.startswith(".") for part in inside.split("/"))
    return "" if hidden else inside


_TOP = PurePosixPath()


class _Listing:
    """The files below an address by their paths, and the contents of those that are read next."""

    def __init__(self, address: str, files: dict[str, RemoteFile]) -> None:
        self.address = address
        self.files = files
        self.contents = dict[str, bytes | OSError]()
        self.names = dict[str, list[str]]()  # of the files of each folder
        self.subfolders = dict[str, list[str]]()
        for path in sorted(files):
            folder, _, name = path.rpartition("/")
            self._add_folder(folder)
            self.names[folder].append(name)
        self._add_folder("")

    def _add_folder(self, path: str) -> None:
        if path in self.names:
            return
        self.names[path] = []
        self.subfolders[path] = []
        if path:
            parent, _, name = path.rpartition("/")
            self._add_folder(parent)
            self.subfolders[parent].append(name)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "contents": {}}


class RemotePath:
    """A file or a folder below a listed address, with what sources use of `pathlib.Path`."""

    def __init__(self, listing: _Listing, inside: PurePosixPath = _TOP) -> None:
        self._listing = listing
        self._inside = inside
        self._key = "" if inside == _TOP else inside.as_posix()

    def __truediv__(self, path: str | PurePath) -> RemotePath:
        return RemotePath(self._listing, self._inside / path)

    def __str__(self) -> str:
        file = self._listing.files.get(self._key)
        return file.address if file else "/".join(filter(None, (self._listing.address, self._key)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    @property
    def top(self) -> RemotePath:
        """The listed folder."""
        return RemotePath(self._listing)

    @property
    def name(self) -> str:
        return self._inside.name or self._listing.address.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        return self._inside.suffix

    @property
    def parent(self) -> RemotePath:
        return RemotePath(self._listing, self._inside.parent)

    def relative_to(self, other: RemotePath) -> PurePosixPath:
        return self._inside.relative_to(other._inside)

    def is_file(self) -> bool:
        return self._key in self._listing.files

    def is_dir(self) -> bool:
        return self._key in self._listing.names

    def entries(self) -> tuple[list[str], list[str]]:
        """The names of the folders and of the files in this folder."""
        return self._listing.subfolders[self._key], self._listing.names[self._key]

    def walk(self) -> Iterator[tuple[RemotePath, list[str]]]:
        """This folder and every one below it, with the names of its files."""
        folders, files = self.entries()
        yield self, files
        for name in folders:
            yield from (self / name).walk()

    def open(self, *, encoding: str, errors: str = "strict", newline: str | None = None) -> Any:
        """The text of a file."""
        return io.TextIOWrapper(self.stream(), encoding, errors, newline)

    def stream(self, *, at_once: int = AT_ONCE) -> Stream:
        """The file, to be read: what was prefetched, or up to `at_once` bytes in one piece."""
        file = self._listing.files.get(self._key)
        if file is None:
            raise FileNotFoundError(f"{self}: no such file when the folder was listed")
        content = take(self._listing.contents, self._key)
        if content is None and file.size > at_once:
            return io.BufferedReader(FileStream(file), 1 << 20)
        return io.BytesIO(file.read() if content is None else content)

    def prefetch(self, paths: Sequence[PurePath]) -> None:
        """Read files together, which are opened next; those of the call before are dropped."""
        keys = dict.fromkeys((self._inside / path).as_posix() for path in paths)
        files = {key: self._listing.files[key] for key in keys}
        small = {key: file for key, file in files.items() if file.size <= AT_ONCE}
        self._listing.contents = dict(zip(small, read_files(list(small.values())), strict=True))

    def signature(self, paths: Sequence[PurePath]) -> str:
        """Changes when one of these files is rewritten; servers that list no versions are asked."""
        files = [self._listing.files[(self._inside / path).as_posix()] for path in paths]
        unknown = [file for file in files if not file.version]
        infos = describe([file.address for file in unknown])
        for file, info in zip(unknown, infos, strict=True):
            if isinstance(info, RemoteError):
                raise info
            file.version = "missing" if isinstance(info, OSError) else version_of(info)
        versions = "\n".join(file.version for file in files)
        return hashlib.sha256(versions.encode()).hexdigest()
