"""Trackers that receive the same metrics as metrics.jsonl."""

from __future__ import annotations

from typing import Any

from meanshift.config import Config
from meanshift.runtime.extras import require
from meanshift.runtime.run_directory import RunDirectory


class Trackers:
    """TensorBoard, if the settings ask for it; otherwise every call does nothing."""

    def __init__(self, config: Config, run_directory: RunDirectory) -> None:
        self.folder = run_directory.folder / "tensorboard"
        self.enabled = config.train.tensorboard and run_directory.writes
        self.writer: Any = None
        if self.enabled:
            require("tensorboard", extra="tensorboard", what="events (train.tensorboard)")

    def start(self, step: int) -> None:
        """Open the log; events after `step`, of a session that was killed, are hidden."""
        if self.enabled:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(self.folder, purge_step=step + 1)

    def log(self, kind: str, step: int, metrics: dict[str, Any]) -> None:
        if self.writer is not None:
            for name, value in metrics.items():
                self.writer.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
