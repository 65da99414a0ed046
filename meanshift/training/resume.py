"""What a run saves and restores, with any number of processes before and after."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from meanshift.data.bad_files import BadFiles
from meanshift.methods import Method
from meanshift.methods.memory_bank import MemoryBank
from meanshift.runtime import checkpoint, distributed
from meanshift.runtime.errors import SharedError
from meanshift.runtime.run_directory import RunDirectory
from meanshift.training.embedding_window import EmbeddingWindow
from meanshift.training.metrics import MetricAverages


@dataclass
class TrainState:
    """Everything that the next step depends on."""

    method: Method
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    bad_files: BadFiles
    averages: MetricAverages = field(default_factory=MetricAverages)
    embeddings: EmbeddingWindow = field(default_factory=EmbeddingWindow)
    step: int = 0
    """steps taken so far"""
    kept: list[int] = field(default_factory=list)
    """steps whose checkpoints stay, whatever `train.keep_every` a later session has"""

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors; all processes call it together."""
        not_saved = self.method.not_saved()
        return {
            "step": self.step,
            "kept": self.kept,
            "method": {
                name: value
                for name, value in self.method.state_dict().items()
                if not name.startswith(not_saved)
            },
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "metrics": self.averages.state_dict(),
            "embeddings": self.embeddings.state_dict(),
            "bad_files": list(self.bad_files.reasons.items()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore everything but what is not saved, and memory banks that are saved in parts."""
        self.step = state["step"]
        self.kept = state.get("kept", [])  # none in checkpoints of an earlier version
        self._load_method(state["method"], in_parts="parts" in state)
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        self.averages.load_state_dict(state["metrics"])
        self.embeddings.load_state_dict(state["embeddings"])
        self.bad_files.reasons = dict(state["bad_files"])

    def _load_method(self, values: dict[str, Any], *, in_parts: bool) -> None:
        missing, unexpected = self.method.load_state_dict(values, strict=False)
        elsewhere = self.method.not_saved()
        if in_parts:
            elsewhere += _part_names(self.method.process_local())
        missing = [name for name in missing if not name.startswith(elsewhere)]
        if missing or unexpected:
            raise ValueError(
                f"the checkpoint was written by another version of the method "
                f"{type(self.method).__name__} (missing: {', '.join(missing) or 'nothing'}; "
                f"unexpected: {', '.join(unexpected) or 'nothing'}); choose another --out"
            )


def save(run_directory: RunDirectory, state: TrainState, about: dict[str, Any]) -> None:
    """Write a checkpoint; of a sharded memory bank each process writes its own part."""
    values = {**state.state_dict(), **about}
    sharded = {name: bank for name, bank in state.method.process_local().items() if bank.sharded}
    if sharded:
        world = distributed.world_size()
        parts = {name: bank.shard_state() for name, bank in sharded.items()}
        with distributed.fail_together():  # all parts exist before the file that needs them
            part_checksum = checkpoint.save_part(
                run_directory.checkpoints, state.step, distributed.rank(), world, parts
            )
        in_parts = _part_names(sharded)
        values["method"] = {n: v for n, v in values["method"].items() if n not in in_parts}
        values["parts"] = distributed.all_gather_list([part_checksum])
    if run_directory.writes:
        checkpoint.save(run_directory.checkpoints, values, kept=state.kept)


def load(run_directory: RunDirectory, state: TrainState, values: dict[str, Any]) -> None:
    """Restore a checkpoint, whatever number of processes wrote it."""
    state.load_state_dict(values)
    banks = state.method.process_local()
    for parts in checkpoint.parts(run_directory.checkpoints, values):
        for name in parts.keys() & banks.keys():
            banks[name].load_shard_state(parts[name])


def _part_names(banks: Iterable[str]) -> tuple[str, ...]:
    """The names of the buffers that sharded memory banks save in parts."""
    return tuple(f"{name}.{buffer}" for name in banks for buffer in MemoryBank.SHARDED_BUFFERS)


def check_same_in_all(run_directory: RunDirectory, what: str, own: str | int) -> None:
    """Refuse processes that see different images or runs, as on machines without a shared disk."""
    seen = distributed.all_gather_list([own])
    if len(set(seen)) > 1:
        other = next(rank for rank, value in enumerate(seen) if value != seen[0])
        raise SharedError(
            f"{run_directory.folder}: process {other} sees other {what} than process 0; need the "
            f"images and the run on disks that all of them share"
        )


def check_same_images(run_directory: RunDirectory, before: str, now: str, size: int) -> None:
    """Refuse to continue a run on other images than it started with."""
    if before != now:
        raise ValueError(
            f"{run_directory.folder}: was trained on other images than the {size} that are there "
            f"now (fingerprint {before}, now {now}); restore them or choose another --out"
        )


def extended_from(
    run_directory: RunDirectory, values: dict[str, Any], epochs: int, steps_per_epoch: int
) -> int | None:
    """The epochs after which a run was finished that is now extended; None if it is not.

    Refuses to extend a run that is not finished, unless it was extended before: its newest
    checkpoints may be damaged.
    """
    before: int = values["config"]["train"]["epochs"]
    if before == epochs:
        return None
    finished = values["step"] >= before * steps_per_epoch
    if not finished and run_directory.config.train.epochs != epochs:
        raise ValueError(
            f"{run_directory.folder}: has trained {values['step'] // steps_per_epoch} of {before} "
            f"epochs, so that its schedules depend on them; finish it with --train.epochs {before} "
            f"before you extend it"
        )
    return before


def describe_change(before: dict[str, Any], now: dict[str, Any]) -> str:
    """The warning about a run that continues on a machine with other arithmetic."""
    names = [name for name in before | now if before.get(name) != now.get(name)]
    old, new = (
        ", ".join(f"{name} {machine.get(name)}" for name in names) for machine in (before, now)
    )
    return f"continues with {new} after {old}: not bit for bit the same"
