"""Reading a run directory: its settings, metrics, results, images and snapshots."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import os
import re
import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped, UInt8
from torch import Tensor
from torch.nn import functional as F

from meanshift.config import ViewSpec, differences, resume_safe
from meanshift.data import Source, UnreadableSample, train_and_validation
from meanshift.methods import method_class, view_specs
from meanshift.runtime import checkpoint
from meanshift.runtime.files import JSONLTail
from meanshift.runtime.run_directory import RunDirectory
from meanshift.transforms.replay import center_square, check_bands, denormalize, to_rgb


class MissingData(ValueError):
    """A figure or a part of a page needs data that the run does not have."""


@dataclass(frozen=True, eq=False)
class Snapshot:
    """Features of the snapshot images after an epoch, of unit length.

    It can be the key of a cache: a snapshot that is taken again is another object.
    """

    epoch: int
    indices: Int[Tensor, " n"]
    """index of each image in the training source"""
    features: Float[Tensor, "n features"]


class Run:
    """One run directory, read only; it may still be training.

    >>> run = Run("runs/demo")
    >>> epochs, purity = run.series("purity")
    >>> features = run.snapshot(run.snapshot_epochs[-1]).features
    """

    def __init__(
        self, folder: Path | str, *, data: str | None = None, bands: Sequence[int] = ()
    ) -> None:
        self.folder = Path(folder)
        self.bands = bands
        """channels that are shown as red, green and blue"""
        self.name = self.folder.resolve().name
        self.directory = RunDirectory.open(self.folder)
        self.data = data
        self.config = self.directory.config
        check_bands(bands, self.config.data.sample_spec.channels)
        source = self.config.data.source
        relative = Path(self.environment.get("directory", "."), source)
        if data is None and not Path(source).exists() and relative.exists():
            data = str(relative)  # the path is relative to where the run was started
        if data is not None:
            self.config = self.config.with_overrides({"data.source": data})
        self.identity = self._identity()
        """changes if another run is started in the same folder, not if this one is continued"""
        self._tails: dict[str, JSONLTail] = {}
        self._reading = threading.Lock()

    def _identity(self) -> str:
        environment = self.environment
        first_session = (environment.get("earlier") or [environment])[0]
        safe = resume_safe(self.config)
        lasting = {
            f"{group}.{name}": value
            for group, values in self.config.to_dict().items()
            for name, value in values.items()
            if f"{group}.{name}" not in safe
        }
        return f"{first_session.get('date', '')} {self.folder.resolve()} {lasting}"

    # Settings

    def setting(self, name: str) -> Any:
        """The value of a setting by its dotted name, also if the method fixes it; None if the
        method has no such setting."""
        group, _, field = name.partition(".")
        return getattr(getattr(self.config, group), field, None)

    @property
    def method(self) -> str:
        """The name of the method."""
        return self.config.method.name or method_class(self.config.method).__name__

    @functools.cached_property
    def views(self) -> tuple[ViewSpec, ...]:
        """The views that the method declares."""
        return view_specs(self.config)

    @property
    def environment(self) -> dict[str, Any]:
        """Versions, machine and command of the last session, and those of earlier ones."""
        return self.directory.environment

    # Metrics and results

    def lines(self, name: str) -> list[dict[str, Any]]:
        """The complete lines of a .jsonl file so far; each call reads only what is new."""
        with self._reading:  # a tail remembers its position, so one thread at a time
            tail = self._tails.setdefault(name, JSONLTail(self.folder / name))
            return list(tail.read())

    def records(self, kind: str) -> list[dict[str, Any]]:
        """The records of metrics.jsonl of one kind: train, monitor or snapshot."""
        return [record for record in self.lines("metrics.jsonl") if record["kind"] == kind]

    @property
    def warnings(self) -> list[dict[str, Any]]:
        """The lines of warnings.jsonl."""
        return self.lines("warnings.jsonl")

    @property
    def steps_per_epoch(self) -> float:
        """Steps per epoch, from the environment or else from the records."""
        steps = self.environment.get("steps")
        if steps:
            return float(steps) / self.config.train.epochs
        ratios = [r["step"] / r["epoch"] for r in self.lines("metrics.jsonl") if r["epoch"]]
        return max(ratios, default=1.0)

    @property
    def last_step(self) -> int:
        """The step of the newest record."""
        return max((record["step"] for record in self.lines("metrics.jsonl")), default=0)

    @property
    def epochs_done(self) -> float:
        """Epochs trained so far."""
        return self.last_step / self.steps_per_epoch

    @property
    def finished(self) -> bool:
        """Whether all epochs are trained."""
        return self.epochs_done >= self.config.train.epochs - 1e-9

    def series(self, name: str) -> tuple[list[float], list[float]]:
        """A metric as (epochs, values); epochs are fractional."""
        return self.all_series().get(name, ([], []))

    def all_series(self) -> dict[str, tuple[list[float], list[float]]]:
        """Each metric of metrics.jsonl as (epochs, values)."""
        steps_per_epoch = self.steps_per_epoch
        series: dict[str, tuple[list[float], list[float]]] = {}
        for record in self.lines("metrics.jsonl"):
            for name, value in record.items():
                if is_number(value):
                    epochs, values = series.setdefault(name, ([], []))
                    epochs.append(record["step"] / steps_per_epoch)
                    values.append(float(value))
        return series

    def epoch_means(self, name: str) -> dict[int, float]:
        """A metric of the training steps as its mean over each epoch, or over its steps so far.

        A log line is the mean of the steps since the one before it, and counts by their number.
        """
        sums: dict[int, float] = {}
        steps: dict[int, int] = {}
        previous = 0
        for record in self.records("train"):
            if is_number(record.get(name)):
                epoch, count = record["epoch"], record["step"] - previous
                sums[epoch] = sums.get(epoch, 0.0) + count * record[name]
                steps[epoch] = steps.get(epoch, 0) + count
            previous = record["step"]
        return {epoch: total / steps[epoch] for epoch, total in sums.items() if steps[epoch]}

    @property
    def results(self) -> dict[str, dict[str, Any]]:
        """Every readable result of an evaluation by name: its metrics and its card."""
        results = {}
        for path in sorted(self.directory.results.glob("*.json")):
            try:
                result = json.loads(path.read_text())
            except (OSError, ValueError):
                continue
            if isinstance(result, dict) and {"metrics", "card"} <= set(result):
                results[path.stem] = result
        return results

    def outdated(self, result: Mapping[str, Any]) -> str:
        """A note on a result of weights that are not the run's newest; empty if it is current."""
        step = re.search(r", step (\d+)$", str(result["card"].get("encoder")))
        if step is None or int(step[1]) >= self.last_step:
            return ""
        return f"evaluated after step {step[1]} of {self.last_step}"

    # Images

    @property
    def source(self) -> Source:
        """The training images; an error if they are not those that the run was trained on."""
        return self._sources[0]

    @property
    def validation(self) -> Source | None:
        """The validation images."""
        return self._sources[1]

    @functools.cached_property
    def _sources(self) -> tuple[Source, Source | None]:
        data = self.config.data
        original = self.directory.config.data.source
        hint = f"name their place with --data SOURCE (in training it was {original})"
        try:
            train, validation = train_and_validation(
                data.source, data.validation, seed=self.config.train.seed, group=data.group
            )
        except (ValueError, OSError) as error:
            reason = str(error).partition("; need")[0]
            raise MissingData(
                f"{self.folder}: its images cannot be found ({reason}); {hint}"
            ) from None
        largest = -1
        if self.snapshot_epochs:
            with contextlib.suppress(MissingData):  # a damaged snapshot is reported elsewhere
                largest = int(self.snapshot(self.snapshot_epochs[-1]).indices.max())
        fingerprint = self.environment.get("source")
        if largest >= len(train) or (fingerprint and fingerprint != train.fingerprint()):
            raise MissingData(
                f"{self.folder}: was trained on other images than the {len(train)} in "
                f"{data.source} now; {hint}"
            )
        samples = data.sample_spec
        return train.with_spec(samples), validation and validation.with_spec(samples)

    def to_rgb(self, sample: Shaped[Tensor, "channels *size"]) -> UInt8[Tensor, "3 _ _"]:
        """A sample of this run, to be looked at."""
        return to_rgb(sample, self.bands)

    def view_to_rgb(self, view: Float[Tensor, "..."]) -> UInt8[Tensor, "3 _ _"]:
        """A normalized view of this run, to be looked at."""
        return self.to_rgb(denormalize(view, self.config.data.sample_spec))

    def thumbnail(self, index: int, side: int) -> UInt8[Tensor, "side side 3"]:
        """The central square of a training image; gray if the image cannot be read."""
        try:
            image = self.to_rgb(self.source.sample(index))
        except UnreadableSample:
            return torch.full((side, side, 3), 128, dtype=torch.uint8)
        return center_square(image, side)

    # Snapshots

    @property
    def snapshot_epochs(self) -> list[int]:
        """Epochs after which a snapshot was taken, in rising order."""
        names = (path.stem for path in self.directory.snapshots.glob("epoch-*.pt"))
        return sorted(int(name[6:]) for name in names if re.fullmatch(r"epoch-\d{4,}", name))

    def snapshot_path(self, epoch: int) -> Path:
        """The file of the snapshot after an epoch."""
        return self.directory.snapshots / f"epoch-{epoch:04d}.pt"

    def snapshot_stamp(self, epoch: int) -> tuple[int, ...]:
        """What changes when the snapshot after an epoch is taken again."""
        status = self.snapshot_path(epoch).stat()
        return status.st_mtime_ns, status.st_size, status.st_ino

    def snapshot(self, epoch: int) -> Snapshot:
        """The snapshot after an epoch, with the images of the newest snapshot."""
        epochs = self.snapshot_epochs
        if epoch not in epochs:
            available = ", ".join(map(str, epochs)) or "none"
            raise MissingData(
                f"{self.folder}: no snapshot after epoch {epoch}; there are {available}"
            )
        snapshot = self._read_snapshot(epoch, self.snapshot_stamp(epoch))
        newest = self._read_snapshot(epochs[-1], self.snapshot_stamp(epochs[-1]))
        return self._select_images(snapshot, newest)

    @functools.lru_cache(maxsize=64)  # noqa: B019 (a run lives as long as the page that shows it)
    def _read_snapshot(self, epoch: int, _stamp: tuple[int, ...]) -> Snapshot:
        path = self.snapshot_path(epoch)
        try:
            state = checkpoint.read(path)
        except ValueError as error:
            raise MissingData(f"{error}; move it away to see the others") from None
        features = F.normalize(state["features"].float(), dim=1)
        if not features.isfinite().all():
            raise MissingData(
                f"{path}: not all features are numbers, so the run diverged; start another with a "
                f"lower --optim.lr, or move this file away to see the others"
            )
        return Snapshot(epoch, state["indices"], features)

    @functools.lru_cache(maxsize=64)  # noqa: B019
    def _select_images(self, snapshot: Snapshot, newest: Snapshot) -> Snapshot:
        """The images of the newest snapshot: some may have become readable or unreadable."""
        if torch.equal(snapshot.indices, newest.indices):
            return snapshot
        row_of = {index: row for row, index in enumerate(snapshot.indices.tolist())}
        indices = newest.indices.tolist()
        if not set(indices) <= set(row_of):
            path = self.snapshot_path(snapshot.epoch)
            raise MissingData(f"{path}: of other images than later snapshots")
        features = snapshot.features[[row_of[index] for index in indices]]
        return Snapshot(snapshot.epoch, newest.indices, features)

    @property
    def labels(self) -> Int[Tensor, " n"] | None:
        """Labels of the snapshot images (-1 is unknown); None if none of them has one."""
        if self.source.labels is None or not self.snapshot_epochs:
            return None
        labels = self.source.labels[self.snapshot(self.snapshot_epochs[-1]).indices]
        return labels if bool((labels >= 0).any()) else None


def open_runs(
    folders: Sequence[Path | str], *, data: str | None = None, bands: Sequence[int] = ()
) -> list[Run]:
    """Open several runs; those whose folders have the same name get the names of parents too."""
    unique = {Path(folder).resolve(): Path(folder) for folder in folders}
    others = [p for p in unique.values() if p.is_dir() and not (p / "config.json").exists()]
    if len(others) < len(unique):  # as in runs/*, where a folder of figures may lie too
        for other in others:
            warnings.warn(f"{other}: not a run directory, left out", stacklevel=2)
            del unique[other.resolve()]
    runs = [Run(folder, data=data, bands=bands) for folder in unique.values()]
    paths = [run.folder.resolve().parts for run in runs]
    for run, parts in zip(runs, paths, strict=True):
        depth = 1
        while sum(other[-depth:] == parts[-depth:] for other in paths) > 1:
            depth += 1
        run.name = "/".join(parts[-depth:])
    return runs


def group_name(runs: Sequence[Run]) -> str:
    """A name for the files of several runs: their paths below the folder that contains all.

    A short hash is added where the paths are not plain words, so that no other group has the name.
    """
    folders = [run.folder.resolve() for run in runs]
    parent = common_parent(folders)
    names = [str(folder.relative_to(parent)) for folder in folders]
    joined = re.sub(r"[^\w.]+", "-", "-".join(names))[:80]
    if joined.split("-") == names:
        return joined
    content = "\n".join(map(str, folders)).encode("utf-8", "surrogateescape")
    return f"{joined}-{hashlib.sha256(content).hexdigest()[:6]}"


def common_parent(folders: Sequence[Path]) -> Path:
    """The deepest folder that contains all of them."""
    return Path(os.path.commonpath([folder.resolve().parent for folder in folders]))


def differing_settings(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """The settings in which runs differ, with the value of each run (None: it has no such one)."""
    first = runs[0].config
    names = dict.fromkeys(name for run in runs for name in differences(first, run.config))
    groups = [run.config.to_dict() for run in runs]
    safe = {name for run in runs for name in resume_safe(run.config)}
    differing = {}
    for name in names:
        group, _, field = name.partition(".")
        if name == "data.source" or name not in safe:
            differing[name] = [settings[group].get(field) for settings in groups]
    return differing


def is_number(value: Any) -> bool:
    """Whether a value of a JSON file is a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)
