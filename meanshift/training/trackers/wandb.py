"""Weights & Biases: an offline run in RUN/wandb, unless WANDB_MODE says otherwise."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence

from meanshift.runtime.extras import require
from meanshift.runtime.run_directory import RunDirectory
from meanshift.training.trackers.base import Line, Tracker, scalars


class WandB(Tracker):
    """One run of one id; a row has the lines of a step.

    An offline run is written anew by each start, so that one folder contains every line. A server
    cannot take rows back: rows wait for the checkpoint that contains them.
    """

    def __init__(self, run_directory: RunDirectory) -> None:
        super().__init__(run_directory)
        self.mode = os.environ.get("WANDB_MODE") or "offline"
        if self.mode == "offline":  # read at import: the library would report its own errors
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        require("wandb", extra="wandb", what="Weights & Biases runs (train.trackers wandb)")
        self.folder = run_directory.folder / "wandb"
        self.pending: list[Line] = []

    def start(self, lines: Sequence[Line]) -> None:
        import wandb

        self._delete_offline_runs()
        self.folder.mkdir(exist_ok=True)  # without it the library takes a temporary folder
        self.run = wandb.init(
            mode=self.mode,  # type: ignore[arg-type]  # the library checks it
            dir=self.run_directory.folder,
            id=self.id,
            resume=None if self.mode == "offline" else "allow",
            reinit="create_new",  # a run of the caller stays as it is
            project=os.environ.get("WANDB_PROJECT") or "meanshift",
            name=os.environ.get("WANDB_NAME") or self.folder_name,
            config={**self.run_directory.config.to_dict(), "environment": self.environment},
            allow_val_change=True,
            # Only the lines: no capture of the console, no sampling of the machine.
            settings=wandb.Settings(
                console="off",
                silent=True,
                disable_code=True,
                disable_git=True,
                x_disable_stats=True,
                x_disable_meta=True,
                x_save_requirements=False,
            ),
        )
        self.first_step = self.run.starting_step
        """rows of earlier steps are on the server"""
        self.pending = list(lines)
        self.saved()

    def log(self, line: Line) -> None:
        self.pending.append(line)

    def saved(self) -> None:
        for line in self.pending:
            if line["step"] >= self.first_step:
                self.run.log(scalars(line), step=line["step"])
        self.pending.clear()

    def close(self, *, finished: bool) -> None:
        self.saved()
        self.run.finish(exit_code=0 if finished else 1)

    def _delete_offline_runs(self) -> None:
        """Delete the folders of earlier starts, whose lines are all sent again.

        The service of a killed process may still write: it keeps a file, but not its folder.
        """
        for path in self.folder.glob(f"offline-run-*-{self.id}"):
            deleted = path.rename(path.with_name(f".deleted-{path.name}"))
            shutil.rmtree(deleted, ignore_errors=True)
