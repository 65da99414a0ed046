"""Checkpoints: atomic writes, safe reads, retention, and state that is saved in parts.

A sharded memory bank is saved in parts, each by its own process, before the file that refers to
them appears. Any number of processes can read them. (PyTorch's distributed checkpoint could do
this, but describes the parts in a pickle, which can execute code.)
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from meanshift.runtime.files import atomic_writer

FORMAT = 2
"""version of the layout of all files that `write` writes and `read` accepts"""


class FormatError(ValueError):
    """A file of another format: a newer or an older version of the program wrote it."""


def check_format(path: Path, version: object, *, supported: int = FORMAT) -> None:
    """Raise a `FormatError` that says what to do, unless a file has the supported format."""
    if version == supported:
        return
    if isinstance(version, int) and version > supported:
        action = "install a newer meanshift"
    else:
        action = "install the version that wrote it, or move it away and compute it again"
    raise FormatError(f"{path}: has format {version}, this version reads {supported}; {action}")


def save(folder: Path, state: dict[str, Any], *, keep_steps: int = 0) -> Path:
    """Write the state of a step, then delete all but the last two and every `keep_steps`-th."""
    path = folder / f"step-{state['step']:09d}.pt"
    write(path, {"format": FORMAT, **state})
    # Count only checkpoints up to this step: a damaged later file must not displace a good one.
    past = [other for other in _newest_first(folder) if _step(other) <= state["step"]]
    for old in past[2:]:
        if not keep_steps or _step(old) % keep_steps:
            old.unlink()
    complete = {_step(other) for other in _newest_first(folder)}
    for part in folder.glob("step-*.part-*.pt"):  # also those of a failed save
        if _step(part) <= state["step"] and _step(part) not in complete:
            part.unlink(missing_ok=True)
    return path


def save_part(folder: Path, step: int, index: int, count: int, part: dict[str, Any]) -> None:
    """Write one of `count` parts of a step; `save` a state with `parts=count` after all of them."""
    write(_part_path(folder, step, index, count), {"format": FORMAT, **part})


def parts(folder: Path, state: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the parts of a state, memory-mapped: only the tensors that are used are read."""
    count = state.get("parts", 0)
    for index in range(count):
        yield read(_part_path(folder, state["step"], index, count), mmap=True)


def write(path: Path, state: dict[str, Any]) -> None:
    """Call `torch.save` so that the file appears complete or not at all."""
    try:
        with atomic_writer(path) as file:
            torch.save(state, file)
    except (OSError, RuntimeError) as error:
        reason = error.__context__ or error  # the system's error says more than torch's
        raise OSError(
            f"{path}: could not be written ({reason}); what was saved before is unchanged: "
            f"make room and type the same command again"
        ) from error


def read(path: Path, *, mmap: bool = False) -> dict[str, Any]:
    """Return the tensors and plain values of a file; no code in it is executed."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:  # a truncated or third-party file fails in many ways
        reason = (str(error) or type(error).__name__).splitlines()[0].partition(". ")[0]
        raise ValueError(f"{path}: not a complete meanshift file ({reason})") from None
    if not isinstance(state, dict) or not isinstance(state.get("format"), int):
        raise ValueError(f"{path}: not a meanshift file (it has no format number)")
    check_format(path, state["format"])
    return state


def latest(folder: Path) -> tuple[dict[str, Any] | None, list[str]]:
    """Return the newest readable state (None without any) and the errors of newer files.

    A file of another format raises an error: continuing from an older checkpoint would discard
    what another version of the program computed.
    """
    paths = _newest_first(folder)
    errors: list[str] = []
    for path in paths:
        try:
            state = read(path)
            for _ in parts(folder, state):
                pass  # opening a part shows that it is complete
            return state, errors
        except FormatError:
            raise
        except ValueError as error:
            errors.append(str(error))
    if paths:
        lines = "\n  ".join(errors)
        raise ValueError(
            f"{folder}: none of its checkpoints can be read:\n  {lines}\n"
            f"move them away to start again from the first step"
        )
    return None, errors


def _newest_first(folder: Path) -> list[Path]:
    paths = [path for path in folder.glob("step-*.pt") if re.fullmatch(r"step-\d+", path.stem)]
    return sorted(paths, key=_step, reverse=True)


def _step(path: Path) -> int:
    return int(path.stem.partition(".")[0].removeprefix("step-"))


def _part_path(folder: Path, step: int, index: int, count: int) -> Path:
    return folder / f"step-{step:09d}.part-{index:04d}-of-{count:04d}.pt"
