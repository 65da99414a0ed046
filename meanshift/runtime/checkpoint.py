"""Atomic save, exact resume, retention: everything the next step depends on, in one file.

A bank that lies in parts in several processes is saved so, each part by its process, before the
file that speaks of them appears. Any number of processes can read them. (PyTorch's distributed
checkpoint would do this too, but describes the parts in a pickle, which runs what it holds.)
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from meanshift.runtime.run_directory import atomic_writer

FORMAT = 1


def save(folder: Path, state: dict[str, Any], *, keep_steps: int = 0) -> Path:
    """Write the state of a step, then drop all but the last two and every `keep_steps`-th."""
    path = folder / f"step-{state['step']:09d}.pt"
    write(path, {"format": FORMAT, **state})
    # Only what led to this step counts: a damaged file from beyond must not push a whole one out.
    for old in [past for past in _newest_first(folder) if _step(past) <= state["step"]][2:]:
        if not keep_steps or _step(old) % keep_steps:
            old.unlink()
    whole = {_step(past) for past in _newest_first(folder)}
    for part in folder.glob("step-*.part-*.pt"):  # also what a failed save left behind
        if _step(part) <= state["step"] and _step(part) not in whole:
            part.unlink(missing_ok=True)
    return path


def save_part(folder: Path, step: int, index: int, count: int, part: dict[str, Any]) -> None:
    """Write one of `count` parts of a step; `save` a state with `parts=count` after all of them."""
    write(_part(folder, step, index, count), {"format": FORMAT, **part})


def parts(folder: Path, state: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The parts of a state, mapped: only what is used of them is read."""
    for index in range(state.get("parts", 0)):
        yield read(_part(folder, state["step"], index, state["parts"]), mapped=True)


def write(path: Path, state: dict[str, Any]) -> None:
    """`torch.save`, but the file appears whole or not at all."""
    try:
        with atomic_writer(path) as file:
            torch.save(state, file)
    except (OSError, RuntimeError) as error:
        why = error.__context__ or error  # torch says less than the disk did
        raise OSError(
            f"{path}: could not be written ({why}); what was saved before it is untouched: "
            f"make room and type the same command again"
        ) from error


def read(path: Path, *, mapped: bool = False) -> dict[str, Any]:
    """A file's tensors and plain values; nothing in it is ever executed."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # a cut or foreign file fails in many ways
        reason = (str(error) or type(error).__name__).splitlines()[0].partition(". ")[0]
        raise ValueError(f"{path}: not a whole meanshift file ({reason})") from None
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise ValueError(f"{path}: not a meanshift file of format {FORMAT}")
    return state


def latest(folder: Path) -> tuple[dict[str, Any] | None, list[str]]:
    """The newest state that can be read, and what was wrong with newer ones."""
    files, wrong = _newest_first(folder), list[str]()
    for path in files:
        try:
            state = read(path)
            for _ in parts(folder, state):
                pass  # it can be opened, so it is whole
            return state, wrong
        except ValueError as error:
            wrong.append(str(error))
    if files:
        listed = "\n  ".join(wrong)
        raise ValueError(
            f"{folder}: none of its checkpoints can be read:\n  {listed}\n"
            f"move them away to begin the run again from its first step"
        )
    return None, wrong


def _newest_first(folder: Path) -> list[Path]:
    files = [path for path in folder.glob("step-*.pt") if re.fullmatch(r"step-\d+", path.stem)]
    return sorted(files, key=_step, reverse=True)


def _step(path: Path) -> int:
    return int(path.stem.partition(".")[0].removeprefix("step-"))


def _part(folder: Path, step: int, index: int, count: int) -> Path:
    return folder / f"step-{step:09d}.part-{index:04d}-of-{count:04d}.pt"
