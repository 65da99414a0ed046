"""Checkpoints: atomic writes, safe reads, retention, and state that is saved in parts.

A sharded memory bank is saved in parts, each by its own process, before the file that refers to
them appears. Any number of processes can read them. (PyTorch's distributed checkpoint could do
this, but describes the parts in a pickle, which can execute code.)
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from meanshift.runtime import checksum
from meanshift.runtime.checksum import DamagedFile
from meanshift.runtime.files import atomic_writer

FORMAT = 3
"""version of the layout of all files that `write` writes and `read` accepts"""

FORMAT_WITHOUT_CHECKSUM = 2
"""the version before, which is read too"""


class FormatError(ValueError):
    """A file of another format: a newer or an older version of the program wrote it."""


def check_format(path: Path, version: object, *, supported: int = FORMAT) -> None:
    """Raise a `FormatError` that says what to do, unless a file has the supported format.

    Raises `DamagedFile` if it has no checksum and needs one.
    """
    if version == FORMAT_WITHOUT_CHECKSUM:
        if path.suffix != ".safetensors":
            checksum.verify_zip(path)
        return
    if version == supported:
        if checksum.recorded(path) is None:
            raise DamagedFile(path, "its checksum is missing")
        return
    if isinstance(version, int) and version > supported:
        action = "install a newer meanshift"
    else:
        action = "install the version that wrote it, or move it away and compute it again"
    raise FormatError(f"{path}: has format {version}, this version reads {supported}; {action}")


def save(folder: Path, state: dict[str, Any], *, kept: Collection[int] = ()) -> Path:
    """Write the state of a step, then delete all but the last two and the `kept` steps."""
    path = folder / f"step-{state['step']:09d}.pt"
    write(path, {"format": FORMAT, **state})
    # Count only checkpoints up to this step: a damaged later file must not displace a good one.
    past = [other for other in _newest_first(folder) if _step(other) <= state["step"]]
    for old in past[2:]:
        if _step(old) not in kept:
            old.unlink()
    complete = {_step(other) for other in _newest_first(folder)}
    for part in folder.glob("step-*.part-*.pt"):  # also those of a failed save
        if _step(part) <= state["step"] and _step(part) not in complete:
            part.unlink(missing_ok=True)
    return path


def save_part(folder: Path, step: int, index: int, count: int, part: dict[str, Any]) -> str:
    """Write one of `count` parts of a step and return its checksum.

    After all of them, `save` a state whose `parts` are their checksums.
    """
    return write(_part_path(folder, step, index, count), {"format": FORMAT, **part})


def parts(folder: Path, state: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the parts of a state, memory-mapped: only the tensors that are used are read."""
    expected = state.get("parts", [])
    if isinstance(expected, int):  # of an earlier version, without checksums
        expected = [None] * expected
    for index, digits in enumerate(expected):
        path = _part_path(folder, state["step"], index, len(expected))
        part = read(path, mmap=True)
        if digits is not None and checksum.recorded(path) != digits:
            raise DamagedFile(path, "it belongs to another checkpoint")
        yield part


def write(path: Path, state: dict[str, Any]) -> str:
    """Call `torch.save` so that the file appears complete or not at all; return its checksum."""
    try:
        with atomic_writer(path) as file:
            torch.save(state, file)
            return checksum.append(file)
    except (OSError, RuntimeError) as error:
        reason = error.__context__ or error  # the system's error says more than torch's
        raise OSError(
            f"{path}: could not be written ({reason}); what was saved before is unchanged: "
            f"make room and type the same command again"
        ) from error


def read(path: Path, *, mmap: bool = False) -> dict[str, Any]:
    """Return the tensors and plain values of a file; no code in it is executed.

    All bytes are compared with the checksum, also of a file that is then memory-mapped.
    """
    try:
        checksum.verify(path)
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except DamagedFile:
        raise
    except Exception as error:  # a truncated or third-party file fails in many ways
        reason = (str(error) or type(error).__name__).splitlines()[0].partition(". ")[0]
        raise ValueError(f"{path}: not a complete meanshift file ({reason})") from None
    if not isinstance(state, dict) or not isinstance(state.get("format"), int):
        raise ValueError(f"{path}: not a meanshift file (it has no format number)")
    check_format(path, state["format"])
    check_name(path, state)
    return state


def check_name(path: Path, state: Mapping[str, Any]) -> None:
    """Raise `DamagedFile` unless a file contains the step or epoch that its name says."""
    name = re.fullmatch(r"(step|epoch)-(\d+)", path.stem)
    if name and state.get(name[1]) != int(name[2]):
        raise DamagedFile(path, f"it contains {name[1]} {state.get(name[1])}")


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
                pass  # opening a part compares it with its checksum
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
