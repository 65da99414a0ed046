"""TensorBoard: event files in RUN/tensorboard."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence

from meanshift.runtime.extras import require
from meanshift.runtime.run_directory import RunDirectory
from meanshift.training.trackers.base import Line, Tracker, scalars


class TensorBoard(Tracker):
    """Event files, written anew by each start: a killed process loses what was not flushed."""

    def __init__(self, run_directory: RunDirectory) -> None:
        super().__init__(run_directory)
        require("tensorboard", extra="tensorboard", what="events (train.trackers tensorboard)")
        self.folder = run_directory.folder / "tensorboard"

    def start(self, lines: Sequence[Line]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        for path in self.folder.glob("events.out.tfevents.*"):
            path.unlink()
        # A page that is open drops what it has read from the files before.
        self.writer = SummaryWriter(self.folder, purge_step=0)
        about = {"config": self.run_directory.config.to_dict(), "environment": self.environment}
        for title, values in about.items():
            text = textwrap.indent(json.dumps(values, indent=2), "    ")  # code, in Markdown
            self.writer.add_text(title, text)
        for line in lines:
            self.log(line)
        self.saved()

    def log(self, line: Line) -> None:
        for name, value in scalars(line).items():
            self.writer.add_scalar(name, value, line["step"])

    def saved(self) -> None:
        self.writer.flush()

    def close(self, *, finished: bool) -> None:  # noqa: ARG002
        self.writer.close()
