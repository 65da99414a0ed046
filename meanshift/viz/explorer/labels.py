"""Labels that a person gives: a log beside the run, each line on the disk before it counts."""

from __future__ import annotations

import csv
import functools
import io
import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meanshift.data import Source, Subset
from meanshift.runtime.files import atomic_writer, exclusive_lock, name_full_disk

MAX_NAME = 100  # characters
_PATIENCE = 5.0  # seconds that another process may have the log locked


class Conflict(Exception):
    """Another page has labeled the same images since this one asked last."""


@dataclass
class Labels:
    """The labels after a number of records."""

    version: int = 0
    """the id of the last record"""
    given: dict[int, str] = field(default_factory=dict)
    """the label of each labeled image, by its index in the training source"""
    classes: list[str] = field(default_factory=list)
    """the names of the labels, in the order of their first use"""
    changed: dict[int, int] = field(default_factory=dict)
    """the last record that changed each image"""
    undoable: dict[str, Any] | None = None
    """the last record that is not undone"""
    left_out: int = 0
    """labels of images that are not in the source"""
    notes: list[str] = field(default_factory=list)


class LabelLog:
    """`labels.jsonl`: one record for each label that is given to images, or undone.

    Records are only appended, so a kill at any time loses nothing that was answered as saved.
    Several servers may write to one log.
    """

    def __init__(self, path: Path, source: Source) -> None:
        self.path = path
        self.source = source
        self._index_of: dict[str, int] | None = None
        self._lock = threading.Lock()

    @functools.cached_property
    def _fingerprint(self) -> str:
        return self.source.fingerprint()

    def read(self) -> Labels:
        """The labels as they are now."""
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return Labels()
        complete, newline, torn = content.rpartition(b"\n")
        labels = Labels()
        if torn:
            labels.notes.append(
                f"{self.path}: the last line is not complete; it was never shown as saved and is "
                f"left out"
            )
        records = []
        for number, line in enumerate((complete + newline).splitlines(), 1):
            record = _parse(line)
            if record is None:
                labels.notes.append(f"{self.path}: line {number} is damaged and left out")
            else:
                records.append(record)
        self._replay(records, labels)
        return labels

    def give(self, indices: Sequence[int], label: str | None, *, seen: int) -> Labels:
        """Label images (None removes their labels) and return the labels once they are on the disk.

        `seen` is the version that the person saw. Raises `Conflict` if one of the images has got
        another label since.
        """
        if label is not None:
            label = check_name(label)
        for index in indices:
            if not 0 <= index < len(self.source):
                raise ValueError(f"got image {index}, need 0 to {len(self.source) - 1}")
        if not indices:
            raise ValueError("no image is selected; need at least one")
        with self._locked():
            labels = self.read()
            for index in indices:
                if labels.changed.get(index, 0) > seen and labels.given.get(index) != label:
                    now = labels.given.get(index)
                    raise Conflict(
                        f"{self.source.title(index)} was "
                        f"{'cleared' if now is None else f'labeled {now}'} on another page "
                        f"meanwhile, so nothing was saved; label it again to replace that"
                    )
            images = [[index, self.source.title(index)] for index in indices]
            self._append(
                {
                    "id": labels.version + 1,
                    "time": _now(),
                    "source": self._fingerprint,
                    "label": label,
                    "images": images,
                }
            )
            return self.read()

    def undo(self, record: int) -> Labels:
        """Undo a record, which must be the last one that is not undone."""
        with self._locked():
            labels = self.read()
            if labels.undoable is None or labels.undoable["id"] != record:
                raise Conflict("another page has labeled or undone meanwhile; nothing was undone")
            self._append(
                {"id": labels.version + 1, "time": _now(), "undo": record},
            )
            return self.read()

    def as_csv(self) -> str:
        """The labels as `--labels` takes them: file,label."""
        whole = self.source.source if isinstance(self.source, Subset) else self.source
        prefix = next(iter(getattr(whole, "prefixes", ())), "")  # the folder of the split
        text = io.StringIO()
        writer = csv.writer(text)
        writer.writerow(["file", "label"])
        for index, label in sorted(self.read().given.items()):
            writer.writerow([prefix + self.source.title(index), label])
        return text.getvalue()

    def _replay(self, records: Sequence[dict[str, Any]], labels: Labels) -> None:
        undone = {record["undo"] for record in records if "undo" in record}
        by_id = {record["id"]: record for record in records}
        for record in records:
            labels.version = max(labels.version, record["id"])
            if "undo" in record:
                record = by_id.get(record["undo"], {"images": []}) | {"id": record["id"]}
                labels.changed |= dict.fromkeys(self._indices(record), record["id"])
                continue
            indices = self._indices(record)
            labels.changed |= dict.fromkeys(indices, record["id"])
            if record["id"] in undone:
                continue
            labels.left_out += len(record["images"]) - len(indices)
            labels.undoable = {
                "id": record["id"],
                "label": record["label"],
                "count": len(record["images"]),
            }
            for index in indices:
                if record["label"] is None:
                    labels.given.pop(index, None)
                else:
                    labels.given[index] = record["label"]
            if record["label"] not in (None, *labels.classes):
                labels.classes.append(record["label"])
        if labels.left_out:
            labels.notes.append(
                f"{self.path}: {labels.left_out} labels are of images that are not in "
                f"{self.source.name} now; they are left out"
            )

    def _indices(self, record: dict[str, Any]) -> list[int]:
        """The images of a record in the present source, by index or else by their names.

        Names that are mere numbers say nothing about another source.
        """
        if record.get("source") == self._fingerprint:
            return [index for index, _ in record["images"]]
        if self._index_of is None:
            titles = [self.source.title(index) for index in range(len(self.source))]
            self._index_of = {
                title: index for index, title in enumerate(titles) if title != f"#{index}"
            }
        found = [self._index_of.get(title) for _, title in record["images"]]
        return [index for index in found if index is not None]

    def _append(self, record: dict[str, Any]) -> None:
        """Add a line, after the last complete one, and wait until it is on the disk."""
        line = json.dumps(record).encode() + b"\n"
        if not self.path.exists():
            with atomic_writer(self.path):  # its folder is synchronized, too
                pass
        with name_full_disk(self.path), self.path.open("r+b") as file:
            end = file.read().rfind(b"\n") + 1
            try:
                file.truncate(end)
                file.seek(end)
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
            except OSError:
                os.truncate(self.path, end)
                raise

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other threads and processes from writing."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + _PATIENCE
        with self._lock, ExitStack() as stack:
            while True:
                try:
                    stack.enter_context(
                        exclusive_lock(self.path.with_suffix(".lock"), "labels", "another time")
                    )
                    break
                except ValueError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.02)
            yield


def check_name(name: str) -> str:
    """The name of a class without spaces around it; refuse what a CSV of labels cannot hold."""
    name = name.strip()
    if not name or len(name) > MAX_NAME:
        raise ValueError(f"label: got {len(name)} characters, need 1 to {MAX_NAME}")
    if any(mark in name for mark in ";|") or not name.isprintable():
        raise ValueError(f"label: got {name!r}, need a name without ; and | and line breaks")
    return name


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def _parse(line: bytes) -> dict[str, Any] | None:
    """A record, or None if it is damaged."""
    try:
        record: dict[str, Any] = json.loads(line)
        valid = isinstance(record["id"], int)
        if "undo" not in record:
            valid &= record["label"] is None or isinstance(record["label"], str)
            valid &= all(isinstance(i, int) and isinstance(t, str) for i, t in record["images"])
    except (ValueError, KeyError, TypeError):
        return None
    return record if valid else None
