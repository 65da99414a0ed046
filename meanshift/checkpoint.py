"""Atomic save, exact resume, retention: everything the next step depends on, in one file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from meanshift.journal import whole_file

FORMAT = 1


def save(folder: Path, state: dict[str, Any], *, keep_steps: int = 0) -> Path:
    """Write the state of a step, then drop all but the last two and every `keep_steps`-th."""
    path = folder / f"step-{state['step']:09d}.pt"
    write(path, {"format": FORMAT, **state})
    # Only what led to this step counts: a damaged file from beyond must not push a whole one out.
    for old in [past for past in _newest_first(folder) if _step(past) <= state["step"]][2:]:
        if not keep_steps or _step(old) % keep_steps:
            old.unlink()
    return path


def write(path: Path, state: dict[str, Any]) -> None:
    """`torch.save`, but the file appears whole or not at all."""
    try:
        with whole_file(path) as file:
            torch.save(state, file)
    except (OSError, RuntimeError) as error:
        raise OSError(
            f"{path}: could not be written ({error}); what was saved before it is untouched: "
            f"make room and type the same command again"
        ) from error


def read(path: Path) -> dict[str, Any]:
    """A file's tensors and plain values; nothing in it is ever executed."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
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
            return read(path), wrong
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
    return sorted(folder.glob("step-*.pt"), key=_step, reverse=True)


def _step(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))
