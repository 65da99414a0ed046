"""The run directory: config, environment, metrics, warnings, snapshots and results.

A run is a directory. Training writes it through this room; all that judges or draws reads it.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO

from meanshift.config import RESUME_SAFE, Config, differences

if sys.platform != "win32":
    import fcntl


class RunDirectory:
    """A run directory, opened for a config: begun anew, or continued if the settings allow it.

    Of several processes one `writes`; the others may call the same, and nothing happens.
    """

    def __init__(self, folder: Path, *, writes: bool = True) -> None:
        self.folder, self.writes = folder, writes
        self.checkpoints = folder / "checkpoints"
        self.snapshots = folder / "snapshots"
        self.results = folder / "results"

    def begin(self, config: Config, *, extra: Mapping[str, Any]) -> RunDirectory:
        """Make or reopen the directory and say what the run is; refuse another run's directory."""
        if not self.writes:  # nor looks at what another is writing
            return self
        self.check_compatible(config)
        self.folder.mkdir(parents=True, exist_ok=True)
        write_text(self.folder / "config.json", config.to_json())
        for part in (self.checkpoints, self.snapshots, self.results):
            part.mkdir(exist_ok=True)
        here = self.folder / "environment.json"
        earlier = json.loads(here.read_text()) if here.exists() else None
        sessions = [] if earlier is None else [*earlier.pop("earlier"), earlier]
        now = {**environment(), **extra, "earlier": sessions}
        write_text(here, json.dumps(now, indent=2) + "\n")
        return self

    def check_compatible(self, config: Config) -> None:
        """Refuse a directory that holds another run, or something else; nothing is written."""
        known, folder = self.folder / "config.json", self.folder
        if known.exists():
            _refuse_other_settings(folder, _read_config(known), config)
        elif folder.exists() and any(not held.name.startswith(".") for held in folder.iterdir()):
            raise ValueError(
                f"{folder}: holds files but no config.json, so it is no run; choose another --out"
            )

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Refuse a second run in the same directory, as long as this one goes on."""
        if not self.writes:
            yield
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        with exclusive_lock(self.folder / ".lock", "is training in it", "another --out"):
            yield

    @staticmethod
    def open(folder: Path) -> RunDirectory:
        """An existing run, to read."""
        if not (folder / "config.json").is_file():
            raise ValueError(
                f"{folder}: not a run directory (no config.json); "
                f"make one with: meanshift pretrain RECIPE --data SOURCE --out {folder}"
            )
        return RunDirectory(folder)

    @property
    def config(self) -> Config:
        return _read_config(self.folder / "config.json")

    def append(self, name: str, record: Mapping[str, Any]) -> None:
        """Add one JSON object as a line."""
        if not self.writes:
            return
        with (self.folder / name).open("a") as file:
            file.write(json.dumps(record) + "\n")

    def flush(self) -> None:
        """Force the lines to the disk, so that a checkpoint never outlives what led to it."""
        for name in ("metrics.jsonl", "warnings.jsonl"):
            if self.writes and (self.folder / name).exists():
                with (self.folder / name).open("rb") as file:
                    os.fsync(file.fileno())

    def warn(self, step: int, kind: str, message: str, **more: str) -> None:
        """Add a line to warnings.jsonl."""
        self.append("warnings.jsonl", {"step": step, "kind": kind, "message": message, **more})

    def read(self, name: str) -> list[dict[str, Any]]:
        """The lines of a .jsonl file; a last line cut off by a kill is left out."""
        path = self.folder / name
        lines = path.read_text().split("\n") if path.exists() else []
        return [json.loads(line) for line in lines[:-1]]

    def rewind(self, step: int) -> None:
        """Forget what was written after the step from which a killed run continues."""
        for name in ("metrics.jsonl", "warnings.jsonl"):
            kept = [record for record in self.read(name) if record["step"] <= step]
            if self.writes and (self.folder / name).exists():
                write_text(
                    self.folder / name, "".join(json.dumps(record) + "\n" for record in kept)
                )

    def save_result(self, name: str, result: Mapping[str, Any]) -> Path:
        """Write `results/<name>.json`."""
        self.results.mkdir(exist_ok=True)
        path = self.results / f"{name}.json"
        write_text(path, json.dumps(result, indent=2) + "\n")
        return path


class JSONLTail:
    """The lines of a file that grows; one that was written anew is read from its beginning."""

    def __init__(self, path: Path) -> None:
        self.path, self.at, self.end = path, 0, b""
        self.known: list[dict[str, Any]] = []

    def read(self) -> list[dict[str, Any]]:
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return []
        with file:
            file.seek(self.at - len(self.end))
            if file.read(len(self.end)) != self.end:  # not the file whose lines are known
                self.at, self.end, self.known = 0, b"", []
                file.seek(0)
            whole, newline, _ = file.read().rpartition(b"\n")  # a last line may still be written
        self.known += [json.loads(line) for line in whole.splitlines()]
        self.at += len(whole + newline)
        self.end = (self.end + whole + newline)[-256:]
        return self.known


def environment() -> dict[str, Any]:
    """Versions, machine, command and commit: what a figure needs to be trusted later."""
    versions = {}
    for package in ("meanshift", "torch", "torchvision", "numpy", "pillow"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "directory": str(Path.cwd()),
        "python": platform.python_version(),
        "versions": versions,
        "machine": {
            "system": platform.platform(),
            "cpu": platform.processor(),
            "cores": os.cpu_count(),
        },
        "commit": _commit(),
    }


def write_text(path: Path, content: str) -> None:
    """Write a text file whole or not at all."""
    with atomic_writer(path, shared=True) as file:
        file.write(content.encode())


@contextmanager
def exclusive_lock(file: Path, doing: str, other: str) -> Iterator[None]:
    """Refuse a second process that writes a file's folder; the lock dies with its process.

    A file called .lock says who holds it.
    """
    with file.open("a+b") as held:
        if sys.platform != "win32":
            try:
                fcntl.lockf(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                held.seek(0)
                told = held.read().decode(errors="replace") if file.name == ".lock" else ""
                who = told.strip() or "another process"
                raise ValueError(
                    f"{file.parent}: {who} {doing}; wait until it ends, or choose {other}"
                ) from None
        if file.name == ".lock":
            held.truncate(0)
            held.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
            held.flush()
        try:
            yield
        finally:
            if file.name == ".lock":
                held.truncate(0)


@contextmanager
def atomic_writer(path: Path, *, shared: bool = False) -> Iterator[BinaryIO]:
    """A file to write beside `path`; only when all of it is on the disk does it take its place.

    Where several processes may write a `shared` one at once, each has its own beside it.
    """
    own = f".{os.getpid()}" if shared else ""
    beside = path.with_name(f".{path.name}{own}.part")
    try:
        with beside.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
        if hasattr(os, "O_DIRECTORY"):  # make the rename durable, where folders can be opened
            handle = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
    finally:
        beside.unlink(missing_ok=True)


def _read_config(path: Path) -> Config:
    try:
        return Config.from_json(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _refuse_other_settings(folder: Path, old: Config, new: Config) -> None:
    changed = {
        name: pair for name, pair in differences(old, new).items() if name not in RESUME_SAFE
    }
    if changed:
        lines = "\n".join(
            f"  {name}: {was!r} there, {now!r} now" for name, (was, now) in changed.items()
        )
        raise ValueError(
            f"{folder}: holds a run with other settings:\n{lines}\n"
            f"continue it with the settings it has, or choose another --out"
        )


def _commit() -> str | None:
    """The commit of the program itself, when it runs from a checkout."""
    git = shutil.which("git")
    if git is None:
        return None
    asked = subprocess.run(
        [git, "-C", str(Path(__file__).parent), "rev-parse", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
    )
    return asked.stdout.strip() or None
