"""The run directory: config, environment, metrics, warnings, checkpoints, snapshots and results.

A run is a directory. Training writes it; evaluation, figures, report and explorer read it.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from meanshift.config import Config, differences, resume_safe
from meanshift.runtime.device import processor_name
from meanshift.runtime.files import exclusive_lock, name_full_disk, parse_lines, write_text


class RunDirectory:
    """The directory of a run, new or existing.

    Of several processes only one `writes`; the methods that write do nothing in the others.
    """

    def __init__(self, folder: Path, *, writes: bool = True) -> None:
        self.folder = folder
        self.writes = writes
        self.checkpoints = folder / "checkpoints"
        self.snapshots = folder / "snapshots"
        self.results = folder / "results"
        self.start = folder / "start.safetensors"
        """the backbone before the first step, where the seed alone does not give it"""
        self.stop_request = folder / "stop-requested"
        """a file by which another program asks the training to save and stop"""

    @staticmethod
    def open(folder: Path) -> RunDirectory:
        """Open an existing run to read it."""
        if not (folder / "config.json").is_file():
            raise ValueError(
                f"{folder}: not a run directory (no config.json); "
                f"make one with: meanshift pretrain RECIPE --data SOURCE --out {folder}"
            )
        return RunDirectory(folder)

    @property
    def config(self) -> Config:
        """The settings of the run."""
        return _read_config(self.folder / "config.json")

    @property
    def environment(self) -> dict[str, Any]:
        """Versions, machine and command of the last session, and those of earlier ones."""
        path = self.folder / "environment.json"
        try:
            return dict(json.loads(path.read_bytes())) if path.exists() else {}
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}: damaged ({error}); move it away to go on") from None

    @property
    def has_checkpoints(self) -> bool:
        """Whether a run has saved a step from which it continues."""
        return any(self.checkpoints.glob("step-*.pt"))

    def check_compatible(self, config: Config) -> None:
        """Refuse a directory that contains another run or other files; write nothing."""
        config_file = self.folder / "config.json"
        if config_file.exists():
            self._check_settings(_read_config(config_file), config)
        elif self.folder.exists() and any(
            not path.name.startswith(".") for path in self.folder.iterdir()
        ):
            raise ValueError(
                f"{self.folder}: contains files but no config.json, so it is not a run directory; "
                f"choose another --out"
            )

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Refuse a second training process in the same directory until the context ends."""
        if not self.writes:
            yield
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        with exclusive_lock(self.folder / ".lock", "is training in it", "another --out"):
            yield

    def begin(self, config: Config, *, extra: Mapping[str, Any]) -> RunDirectory:
        """Create or reopen the directory and write config.json and environment.json.

        `extra` is added to the environment. The environments of earlier sessions are preserved.
        """
        if not self.writes:  # another process may be writing these files right now
            return self
        self.check_compatible(config)
        previous = self.environment
        self.folder.mkdir(parents=True, exist_ok=True)
        write_text(self.folder / "config.json", config.to_json())
        for subfolder in (self.checkpoints, self.snapshots, self.results):
            subfolder.mkdir(exist_ok=True)
        earlier = [*previous.pop("earlier", []), previous] if previous else []
        present = {**environment(), **extra, "earlier": earlier}
        write_text(self.folder / "environment.json", json.dumps(present, indent=2) + "\n")
        return self

    def append(self, name: str, record: Mapping[str, Any]) -> None:
        """Append a record to a JSON-lines file."""
        if not self.writes:
            return
        path = self.folder / name
        with name_full_disk(path), path.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def warn(self, step: int, kind: str, message: str, **details: str) -> None:
        """Append a record to warnings.jsonl."""
        self.append("warnings.jsonl", {"step": step, "kind": kind, "message": message, **details})

    def flush(self) -> None:
        """Force metrics and warnings to the disk, so that no checkpoint is newer than they are."""
        for path in (self.folder / "metrics.jsonl", self.folder / "warnings.jsonl"):
            if self.writes and path.exists():
                with name_full_disk(path), path.open("rb") as file:
                    os.fsync(file.fileno())

    def read(self, name: str) -> list[dict[str, Any]]:
        """Return the records of a JSON-lines file, without a last line that a kill cut off."""
        path = self.folder / name
        lines = path.read_bytes().split(b"\n") if path.exists() else []
        return parse_lines(path, lines[:-1])

    def rewind(self, step: int) -> None:
        """Delete the records after the step from which a killed run continues."""
        for name in ("metrics.jsonl", "warnings.jsonl"):
            records = [record for record in self.read(name) if record["step"] <= step]
            if self.writes and (self.folder / name).exists():
                lines = "".join(json.dumps(record) + "\n" for record in records)
                write_text(self.folder / name, lines)

    def save_result(self, name: str, result: Mapping[str, Any]) -> Path:
        """Write `results/<name>.json`."""
        self.results.mkdir(exist_ok=True)
        path = self.results / f"{name}.json"
        write_text(path, json.dumps(result, indent=2) + "\n")
        return path

    def _check_settings(self, existing: Config, config: Config) -> None:
        safe = resume_safe(config)
        if config.train.epochs > existing.train.epochs:  # which extends a run that is finished
            safe |= {"train.epochs"}
        changes = [
            f"  {name}: {before!r} there, {now!r} now"
            for name, (before, now) in differences(existing, config).items()
            if name not in safe
        ]
        if changes:
            lines = "\n".join(changes)
            raise ValueError(
                f"{self.folder}: contains a run with other settings:\n{lines}\n"
                f"continue it with its own settings, or choose another --out, with "
                f"--encoder.weights {self.folder} to start from its weights"
            )


def environment() -> dict[str, Any]:
    """Return versions, machine, command and commit, which a reader needs to trust a result."""
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
            "cpu": processor_name(),
            "cores": os.cpu_count(),
        },
        "commit": _commit(),
    }


def _read_config(path: Path) -> Config:
    try:
        return Config.from_json(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _commit() -> str | None:
    """Return the commit of the program itself, if it runs from a checkout of its own."""
    git = shutil.which("git")
    if git is None:
        return None
    # Another repository, in which the package is installed or copied, has no such file.
    own_file = "/".join(Path(__file__).parts[-3:])
    completed = subprocess.run(
        [git, "-C", str(Path(__file__).parent), "rev-parse", "HEAD", f"HEAD:{own_file}"],
        capture_output=True,
        text=True,
        check=False,
    )
    return completed.stdout.split()[0] if completed.returncode == 0 else None
