"""Weights & Biases: an offline run in RUN/wandb, unless WANDB_MODE says otherwise."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meanshift.runtime.extras import require
from meanshift.runtime.files import write_text
from meanshift.runtime.run_directory import RunDirectory
from meanshift.training.trackers.base import Line, Tracker, scalars

_LAST_STEP = "last-step"
"""a file in the folder of an offline run: what `wandb sync` sends ends with this step"""


class WandB(Tracker):
    """One run of one id; a row has the lines of a step.

    A server cannot take rows back: rows wait for the checkpoint that contains them. An offline run
    is written anew by each start, so that one folder contains every line that was not uploaded.
    """

    def __init__(self, run_directory: RunDirectory) -> None:
        super().__init__(run_directory)
        self.mode: Any = os.environ.get("WANDB_MODE") or "offline"  # the library checks it
        if self.mode == "offline":  # read at import: the library would report its own errors
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        require("wandb", extra="wandb", what="Weights & Biases runs (train.trackers wandb)")
        self.folder = run_directory.folder / "wandb"
        self.pending: list[Line] = []

    def start(self, lines: Sequence[Line]) -> None:
        import wandb

        self.first_step = self._uploaded_step() + 1
        """rows of earlier steps are on the server"""
        self._delete_offline_runs()
        self.folder.mkdir(exist_ok=True)  # without it the library takes a temporary folder
        self.run = wandb.init(
            mode=self.mode,
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
        if self.mode != "offline":
            self.first_step = self.run.starting_step
        self.pending = list(lines)
        self.saved()

    def log(self, line: Line) -> None:
        self.pending.append(line)

    def saved(self) -> None:
        for line in self.pending:
            if line["step"] >= self.first_step:
                self.run.log(scalars(line), step=line["step"])
        if self.pending and self.mode == "offline":
            folder = Path(self.run.settings.sync_dir)
            write_text(folder / _LAST_STEP, f"{self.pending[-1]['step']}\n")
        self.pending.clear()

    def close(self, *, finished: bool) -> None:
        self.saved()
        self.run.finish(exit_code=0 if finished else 1)

    def _offline_runs(self, *, uploaded: bool) -> list[Path]:
        """The folders of earlier starts that `wandb sync` has or has not marked."""
        folders = self.folder.glob(f"offline-run-*-{self.id}")
        return [path for path in folders if any(path.glob("*.wandb.synced")) == uploaded]

    def _uploaded_step(self) -> int:
        """The last step that `wandb sync` has sent; -1 if there is none."""
        files = [path / _LAST_STEP for path in self._offline_runs(uploaded=True)]
        return max((int(path.read_text()) for path in files if path.exists()), default=-1)

    def _delete_offline_runs(self) -> None:
        """Delete the folders of earlier starts that were not uploaded.

        The service of a killed process may still write: it keeps a file, but not its folder.
        """
        for path in self._offline_runs(uploaded=False):
            deleted = path.rename(path.with_name(f".deleted-{path.name}"))
            shutil.rmtree(deleted, ignore_errors=True)
