"""What a run saves and restores, with any number of processes before and after."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from meanshift.data.bad_files import BadFiles
from meanshift.methods import Method
from meanshift.runtime import checkpoint, distributed
from meanshift.runtime.run_directory import RunDirectory
from meanshift.training.metrics import MetricAverages


@dataclass
class TrainState:
    """Everything that the next step depends on."""

    method: Method
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    bad_files: BadFiles
    averages: MetricAverages = field(default_factory=MetricAverages)
    step: int = 0
    """steps taken so far"""

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors; all processes call it together."""
        left_out = self.method.not_saved()
        return {
            "step": self.step,
            "method": {
                name: value
                for name, value in self.method.state_dict().items()
                if not (left_out and name.startswith(left_out))
            },
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "metrics": self.averages.state_dict(),
            "bad_files": list(self.bad_files.reasons.items()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Values that the state does not contain (`Method.not_saved`) stay as they are."""
        self.step = state["step"]
        self.method.load_state_dict({**self.method.state_dict(), **state["method"]})
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        self.averages.load_state_dict(state["metrics"])
        self.bad_files.reasons = dict(state["bad_files"])


def save(
    run_directory: RunDirectory, state: TrainState, about: dict[str, Any], *, keep_steps: int = 0
) -> None:
    """Write a checkpoint; of a sharded memory bank each process writes its own part."""
    values = {**state.state_dict(), **about}
    sharded = {name: bank for name, bank in state.method.process_local().items() if bank.sharded}
    if sharded:
        world = distributed.world_size()
        parts = {name: bank.part() for name, bank in sharded.items()}
        with distributed.fail_together():  # all parts exist before the file that needs them
            checkpoint.save_part(
                run_directory.checkpoints, state.step, distributed.rank(), world, parts
            )
        in_parts = tuple(
            f"{name}.{buffer}" for name, bank in sharded.items() for buffer in bank.SPLIT
        )
        values["method"] = {n: v for n, v in values["method"].items() if n not in in_parts}
        values["parts"] = world
    if run_directory.writes:
        checkpoint.save(run_directory.checkpoints, values, keep_steps=keep_steps)


def load(run_directory: RunDirectory, state: TrainState, values: dict[str, Any]) -> None:
    """Restore a checkpoint, whatever number of processes wrote it."""
    state.load_state_dict(values)
    banks = state.method.process_local()
    for parts in checkpoint.parts(run_directory.checkpoints, values):
        for name, bank in banks.items():
            bank.put(parts[name])


def check_same_in_all(run_directory: RunDirectory, what: str, own: str | int) -> None:
    """Processes on several machines must see the same images and the same run."""
    seen = distributed.all_gather_list([own])
    if len(set(seen)) > 1:
        other = next(rank for rank, value in enumerate(seen) if value != seen[0])
        raise distributed.SharedError(
            f"{run_directory.folder}: process {other} sees other {what} than process 0; need the "
            f"images and the run on disks that all of them share"
        )


def check_same_images(run_directory: RunDirectory, before: str, now: str, size: int) -> None:
    """A run continues only on the images that it began with."""
    if before != now:
        raise ValueError(
            f"{run_directory.folder}: was trained on other images than the {size} that are there "
            f"now (fingerprint {before}, now {now}); restore them or choose another --out"
        )


def describe_change(before: dict[str, Any], now: dict[str, Any]) -> str:
    """The warning about a run that continues on another machine."""
    then, here = (
        ", ".join(f"{name} {value}" for name, value in machine.items()) for machine in (before, now)
    )
    return f"continues with {here} after {then}: not bit for bit the same"
