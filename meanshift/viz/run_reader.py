"""A run directory as those see it who look at it: figures, report and explorer read it here."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import re
import threading
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor
from torch.nn import functional as F

from meanshift.config import RESUME_SAFE, differences, settings
from meanshift.data import Source, UnreadableSample, train_and_validation
from meanshift.ops.topk import nearest_neighbors
from meanshift.runtime import checkpoint
from meanshift.runtime.run_directory import JSONLTail, RunDirectory
from meanshift.transforms.replay import center_square


class MissingData(ValueError):
    """What an image needs and the runs do not hold, and what to type to have it."""


@dataclass(frozen=True)
class Snapshot:
    """A snapshot: unit features of the probe, and which images of the source they are."""

    epoch: int
    indices: Int[Tensor, " n"]
    features: Float[Tensor, "n features"]


class Run:
    """One run directory, read only; it may still be training.

    >>> run = Run("runs/demo")
    >>> epochs, purity = run.series("purity")
    >>> near, similarity = run.neighbors(run.epochs[-1], 10)
    """

    def __init__(self, folder: Path | str, *, data: str | None = None) -> None:
        self.folder = Path(folder)
        self.name = self.folder.resolve().name
        self.journal = RunDirectory.open(self.folder)
        self.config, self.data = self.journal.config, data
        beside = Path(self.environment.get("directory", "."), self.config.data.source)
        if data is None and not Path(self.config.data.source).exists() and beside.exists():
            data = str(beside)  # given relative to where the run was started
        if data is not None:
            self.config = self.config.with_overrides({"data.source": data})
        here = self.environment
        first = (here.get("earlier") or [here])[0].get("date", "")
        lasting = [(n, _setting(self, n)) for n, *_ in settings() if n not in RESUME_SAFE]
        self.identity = f"{first} {self.folder.resolve()} {lasting}"
        """Tells a run that was begun anew in the same folder from one that was continued."""
        self._lines: dict[str, JSONLTail] = {}
        self._reading = threading.Lock()

    # What was written while training

    def lines(self, name: str) -> list[dict[str, Any]]:
        """The whole lines of a .jsonl file so far; only what is new is read."""
        with self._reading:  # the ends of the files are remembered, so one thread at a time
            tail = self._lines.setdefault(name, JSONLTail(self.folder / name))
            return list(tail.read())

    def records(self, kind: str) -> list[dict[str, Any]]:
        """The records of metrics.jsonl of one kind: train, monitor or snapshot."""
        return [record for record in self.lines("metrics.jsonl") if record["kind"] == kind]

    @property
    def warnings(self) -> list[dict[str, Any]]:
        return self.lines("warnings.jsonl")

    @property
    def environment(self) -> dict[str, Any]:
        path = self.folder / "environment.json"
        held: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return held

    @property
    def pair(self) -> str:
        """The views as the paper writes them, target first: `w/s`."""
        views = self.config.views
        same = " (same view)" if method.same_view else ""
        return f"{views.target[0]}/{views.online[0]}{same}"

    @property
    def steps(self) -> float:
        """Steps an epoch, from the last lines of whole epochs."""
        told = self.environment.get("steps")
        if told:
            return float(told) / self.config.train.epochs
        ends = [r["step"] / r["epoch"] for r in self.lines("metrics.jsonl") if r["epoch"]]
        return max(ends, default=1.0)

    def series(self, name: str) -> tuple[list[float], list[float]]:
        """A figure by epoch (in parts of epochs), from whichever records hold it."""
        return self.every_series().get(name, ([], []))

    def every_series(self) -> dict[str, tuple[list[float], list[float]]]:
        """Each figure of metrics.jsonl by epoch."""
        steps, found = self.steps, dict[str, tuple[list[float], list[float]]]()
        for record in self.lines("metrics.jsonl"):
            for name, value in record.items():
                if is_number(value):
                    x, y = found.setdefault(name, ([], []))
                    x.append(record["step"] / steps)
                    y.append(float(value))
        return found

    @property
    def done(self) -> float:
        """Epochs trained so far."""
        lines = self.lines("metrics.jsonl")
        return max((r["step"] for r in lines), default=0) / self.steps

    @property
    def results(self) -> dict[str, dict[str, Any]]:
        """Every result that judging left, by name: its figures and its card."""
        found = {}
        for path in sorted(self.journal.results.glob("*.json")):
            try:
                held = json.loads(path.read_text())
            except (OSError, ValueError):
                continue
            if isinstance(held, dict) and {"figures", "card"} <= set(held):
                found[path.stem] = held
        return found

    def older(self, result: Mapping[str, Any]) -> str:
        """Of weights before the run's newest: after how many steps; nothing where it is current."""
        found = re.search(r", step (\d+)$", str(result["card"].get("judged")))
        newest = max((r["step"] for r in self.lines("metrics.jsonl")), default=0)
        old = found is not None and int(found[1]) < newest
        return f"judged after step {found[1]} of {newest}" if old and found is not None else ""

    # The images

    @functools.cached_property
    def source(self) -> Source:
        """The training images, as the run cut them; refused where they are others by now."""
        return self._parts[0]

    @property
    def held_out(self) -> Source | None:
        return self._parts[1]

    @functools.cached_property
    def _parts(self) -> tuple[Source, Source | None]:
        data, seed = self.config.data, self.config.train.seed
        was = self.journal.config.data.source
        say = f"say where they lie now: --data SOURCE (in training it was {was})"
        try:
            train, held = train_and_validation(data.source, data.validation, seed=seed)
        except (ValueError, OSError) as error:
            why = str(error).partition("; need")[0]
            raise MissingData(f"{self.folder}: its images cannot be found ({why}); {say}") from None
        known = self.environment.get("source")
        largest = -1
        if self.epochs:
            with contextlib.suppress(
                MissingData
            ):  # a damaged one is spoken of by those who need it
                largest = int(self.moment(self.epochs[-1]).indices.max())
        if largest >= len(train) or (known and known != train.fingerprint()):
            raise MissingData(
                f"{self.folder}: was trained on other images than the {len(train)} in "
                f"{data.source} now; {say}"
            )
        return train, held

    def thumbnail(self, index: int, side: int) -> UInt8[Tensor, "side side 3"]:
        """A training image cut square from its center; an unreadable one is gray."""
        try:
            image = self.source.read(index)
        except UnreadableSample:
            return torch.full((side, side, 3), 128, dtype=torch.uint8)
        return center_square(image, side)

    # The snapshots

    @property
    def epochs(self) -> list[int]:
        """Epochs after which a snapshot was taken, rising."""
        names = (path.stem for path in self.journal.snapshots.glob("epoch-*.pt"))
        return sorted(int(n[6:]) for n in names if n[6:].isdecimal() and len(n) >= 10)

    def snapshot(self, epoch: int) -> Path:
        return self.journal.snapshots / f"epoch-{epoch:04d}.pt"

    @functools.lru_cache(maxsize=64)  # noqa: B019 (a run lives as long as the page that shows it)
    def moment(self, epoch: int) -> Snapshot:
        """The snapshot after an epoch."""
        if epoch not in self.epochs:
            known = ", ".join(map(str, self.epochs)) or "none"
            raise MissingData(f"{self.folder}: no snapshot after epoch {epoch}; there are {known}")
        try:
            state = checkpoint.read(self.snapshot(epoch))
        except ValueError as error:
            raise MissingData(f"{error}; move it away to see the others") from None
        features = F.normalize(state["features"].float(), dim=1)
        if not features.isfinite().all():
            raise MissingData(
                f"{self.snapshot(epoch)}: not all features are numbers, so the run diverged; begin "
                f"another with a lower --optim.lr, or move this file away to see the others"
            )
        indices, last = state["indices"], self.epochs[-1]
        if epoch != last and not torch.equal(indices, self.moment(last).indices):
            rows = {index: row for row, index in enumerate(indices.tolist())}
            indices = self.moment(last).indices  # images became readable or unreadable meanwhile
            if not set(indices.tolist()) <= set(rows):
                raise MissingData(f"{self.snapshot(epoch)}: of other images than later ones")
            features = features[[rows[index] for index in indices.tolist()]]
        return Snapshot(epoch, indices, features)

    def some_epochs(self, count: int = 0) -> list[int]:
        """All epochs with snapshots, or `count` of them from the first to the last."""
        epochs = self.epochs
        if not epochs:
            raise MissingData(
                f"{self.folder}: no snapshots; they are taken while training, with "
                f"--train.snapshots 6"
            )
        if not count or count >= len(epochs):
            return epochs
        at = {round(i * (len(epochs) - 1) / max(1, count - 1)) for i in range(count)}
        return [epochs[i] for i in sorted(at)]

    def chosen_epochs(self, wish: Sequence[int], count: int) -> list[int]:
        """The epochs that a person asked for, or else `count` of those with snapshots."""
        if not wish:
            return self.some_epochs(count)
        return [self.moment(epoch).epoch for epoch in wish]

    def neighbors(
        self, epoch: int, count: int
    ) -> tuple[Int[Tensor, "n count"], Float[Tensor, "n count"]]:
        """The nearest others of each image inside the probe: (rows of the probe, similarity)."""
        unit = self.moment(epoch).features
        count = min(count, len(unit) - 1)
        return nearest_neighbors(unit, unit, count, leave_out=torch.arange(len(unit)))

    @property
    def labels(self) -> Int[Tensor, " n"] | None:
        """Labels of the probe, where any of it has one (-1 is unknown)."""
        if self.source.labels is None or not self.epochs:
            return None
        labels = self.source.labels[self.moment(self.epochs[-1]).indices]
        return labels if bool((labels >= 0).any()) else None

    def pure(self, epoch: int, count: int = 10) -> Float[Tensor, " n"]:
        """Share of each probe image's nearest others that have its label."""
        labels = self.labels
        if labels is None:
            raise MissingData(f"{self.folder}: no labels, so no purity")
        near, _ = self.neighbors(epoch, count)
        return ((labels[near] == labels[:, None]) & (labels[:, None] >= 0)).float().mean(1)

    def clusters(self) -> tuple[Int[Tensor, " n"], Int[Tensor, " n"]]:
        """The assignment that `evaluate cluster` stored: (cluster, image of the source)."""
        path = self.journal.results / "cluster.npz"
        count = "" if self.source.labeled else " --clusters 10"
        type_this = f"type: meanshift evaluate cluster {self.folder}{count}"
        try:
            with path.open("rb") as file, np.load(file) as held:
                assigned, titles = torch.from_numpy(held["assigned"]), held["image"]
        except FileNotFoundError:
            raise MissingData(f"{self.folder}: not clustered yet; {type_this}") from None
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise MissingData(f"{path}: cannot be read ({error}); {type_this}") from None
        place = {self.source.title(i): i for i in range(len(self.source))}
        if not all(str(title) in place for title in titles):
            raise MissingData(f"{path}: of other images than the run's; {type_this}")
        return assigned, torch.tensor([place[str(title)] for title in titles])


def open_runs(folders: Sequence[Path | str], *, data: str | None = None) -> list[Run]:
    """Several runs, each with a name of its own: folders of one name get their parent's as well."""
    each = {Path(folder).resolve(): Path(folder) for folder in folders}
    others = [p for p in each.values() if p.is_dir() and not (p / "config.json").exists()]
    if len(others) < len(each):  # as in runs/*, where figures of several runs may lie too
        for other in others:
            warnings.warn(f"{other}: not a run directory, left out", stacklevel=2)
            del each[other.resolve()]
    runs = [Run(folder, data=data) for folder in each.values()]
    for run in runs:
        if sum(other.folder.resolve().name == run.folder.resolve().name for other in runs) > 1:
            run.name = "/".join(run.folder.resolve().parts[-2:])
    return runs


def differing(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """The settings in which runs differ, with the value of each run."""
    first = runs[0].config
    names = {name: None for run in runs for name in differences(first, run.config)}
    told = {name: [_setting(run, name) for run in runs] for name in names}
    return {n: values for n, values in told.items() if n == "data.source" or n not in RESUME_SAFE}


def _setting(run: Run, name: str) -> Any:
    group, _, field = name.partition(".")
    return getattr(getattr(run.config, group), field)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
