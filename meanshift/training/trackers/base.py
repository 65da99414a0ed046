"""What a tracker is: it receives the lines of metrics.jsonl, each once, whatever kills the run."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from meanshift.runtime.files import write_text
from meanshift.runtime.run_directory import RunDirectory

Line = Mapping[str, Any]
"""a record of metrics.jsonl: kind, step, epoch and metrics"""


class Tracker(ABC):
    """A sink of lines. To make one checks that its library is installed, and writes nothing."""

    def __init__(self, run_directory: RunDirectory) -> None:
        self.run_directory = run_directory

    @abstractmethod
    def start(self, lines: Sequence[Line]) -> None:
        """Open the log; afterwards it contains exactly `lines`, as far as it can take lines back.

        They are the lines up to the checkpoint from which the run continues, none if it begins.
        """

    @abstractmethod
    def log(self, line: Line) -> None:
        """Receive a line of the present step."""

    @abstractmethod
    def saved(self) -> None:
        """A checkpoint contains the lines so far: a run that is killed does not repeat them."""

    @abstractmethod
    def close(self, *, finished: bool) -> None:
        """Write what is left; `finished` says whether the run has taken its last step."""

    @property
    def folder_name(self) -> str:
        return self.run_directory.folder.resolve().name

    @property
    def environment(self) -> dict[str, Any]:
        """Versions, machine and command of the present session."""
        environment = self.run_directory.environment
        return {name: value for name, value in environment.items() if name != "earlier"}

    @property
    def id(self) -> str:
        """The id of the run in all trackers, chosen at random when it is first needed."""
        path = self.run_directory.folder / "tracker-id"
        if not path.exists():
            write_text(path, f"{secrets.token_hex(4)}\n")
        return path.read_text().strip()


def scalars(line: Line) -> dict[str, float | int]:
    """The values of a line by the names that trackers show, as `train/loss`."""
    return {
        f"{line['kind']}/{name}": value
        for name, value in line.items()
        if name not in ("kind", "step")
    }
