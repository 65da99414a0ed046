"""Experiment trackers: optional sinks of the lines of metrics.jsonl, which remains the record."""

from __future__ import annotations

from collections.abc import Callable

from meanshift.config import Config
from meanshift.runtime.run_directory import RunDirectory
from meanshift.training.trackers.base import Line, Tracker
from meanshift.training.trackers.mlflow import MLflow
from meanshift.training.trackers.tensorboard import TensorBoard
from meanshift.training.trackers.wandb import WandB

_TRACKERS: dict[str, type[Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "mlflow": MLflow,
}


class Trackers:
    """The trackers of `train.trackers`, only in the process that writes.

    One that fails is switched off with a warning; the training goes on.
    """

    def __init__(self, config: Config, run_directory: RunDirectory) -> None:
        names = config.train.trackers if run_directory.writes else ()
        self.run_directory = run_directory
        self.active = {name: _TRACKERS[name](run_directory) for name in names}
        """by name; those that have failed are not in it"""

    def start(self, warn: Callable[[str, str], None]) -> None:
        """Open the trackers with the lines that the run has so far; `warn` takes kind, message."""
        self.warn = warn
        if self.active:
            lines = self.run_directory.read("metrics.jsonl")
            self._each(lambda tracker: tracker.start(lines))

    def log(self, line: Line) -> None:
        self._each(lambda tracker: tracker.log(line))

    def saved(self) -> None:
        """Tell the trackers that a checkpoint contains all lines so far."""
        self._each(lambda tracker: tracker.saved())

    def close(self, *, finished: bool) -> None:
        self._each(lambda tracker: tracker.close(finished=finished))

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self.active.items()):
            try:
                call(tracker)
            except Exception as error:  # whatever a library or its server does
                del self.active[name]
                reason = " ".join(f"{type(error).__name__}: {error}".split())
                self.warn(
                    "tracker",
                    f"{name} failed ({reason[:300]}) and is off; metrics.jsonl has every line, and "
                    f"the next start of this run sends those that {name} lacks",
                )
