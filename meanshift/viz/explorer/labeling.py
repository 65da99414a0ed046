"""Labeling on the live page: the labels, the probe fitted to them, and what to label next."""

from __future__ import annotations

import functools
import shlex
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from meanshift.data import Source
from meanshift.evaluation.label_probe import (
    MIN_CURVE_LABELS,
    MIN_LABELS,
    Probe,
    accuracy_with_twice_the_labels,
    fit_probe,
    held_out_accuracy,
)
from meanshift.evaluation.linear_probe import Standardize
from meanshift.evaluation.predict import Classifier
from meanshift.models.weights import fingerprint, load_snapshot, writable_dir
from meanshift.ops.active_learning import propose
from meanshift.viz.explorer.background import BackgroundTasks, ProgressCallback
from meanshift.viz.explorer.labels import LabelLog, Labels
from meanshift.viz.explorer.live import to_json_number
from meanshift.viz.explorer.metadata import categories
from meanshift.viz.explorer.search import Searcher
from meanshift.viz.run_reader import MissingData, Run, Snapshot

NEIGHBORS = 24
PAGE = 200
"""images of a list at most"""


@dataclass(frozen=True, eq=False)
class Features:
    """The features of the images among which labels are given, and their statistics."""

    rows: Float[Tensor, "n features"]
    indices: Int[Tensor, " n"]
    """index of each image in the training source"""
    standardize: Standardize

    @functools.cached_property
    def row_of(self) -> dict[int, int]:
        return {index: row for row, index in enumerate(self.indices.tolist())}


@dataclass(frozen=True)
class FittedProbe:
    """A probe with its predictions for all images."""

    probe: Probe
    classes: list[str]
    labels: int
    """how many labels it was fitted to"""
    probabilities: Float[Tensor, "n classes"]


class Labeling:
    """The labels of a run; `name` is `snapshot` for the map's images or `train` for all."""

    def __init__(self, run: Run, source: Source, searcher: Searcher) -> None:
        self.run = run
        self.searcher = searcher
        self.folder = writable_dir(run.folder) / "labels"
        self.log = LabelLog(self.folder / "labels.jsonl", source)
        self._choosing = BackgroundTasks(keep=2)
        self._measuring = BackgroundTasks(keep=2)
        self._measured = 0
        """the version of the labels whose accuracy is computed"""
        self._fitting = threading.Lock()
        self._colored = "snapshot"
        """the images to which the probe of the map's colors is fitted"""
        self._fitted: dict[str, tuple[Any, FittedProbe | None]] = {}

    def state(self, labels: Labels | None = None) -> dict[str, Any]:
        """The labels, as the page shows them."""
        labels = labels or self.log.read()
        counts = Counter(labels.given.values())
        return {
            "version": labels.version,
            "given": list(labels.given.items()),
            "classes": [{"name": name, "given": counts[name]} for name in labels.classes],
            "undoable": labels.undoable,
            "notes": labels.notes,
            "command": f"meanshift predict {shlex.quote(str(self.folder))} FOLDER",
        }

    def probe(self, name: str) -> dict[str, Any]:
        """How many images the probe predicts of each class.

        The classifier is written, unless it would miss labels of images outside of `name`.
        """
        labels = self.log.read()
        features = self._features(name)
        fitted = self._fit(name, labels)
        usable = sum(index in features.row_of for index in labels.given)
        answer: dict[str, Any] = {
            "version": labels.version,
            "outside": len(labels.given) - usable,
            "images": len(features.rows),
            "predicted": {},
        }
        self._colored = name
        if fitted is not None:
            if usable == len(labels.given):
                self._save(fitted, labels)
            counts = fitted.probabilities.argmax(1).bincount(minlength=len(fitted.classes))
            answer["predicted"] = dict(zip(fitted.classes, counts.tolist(), strict=True))
        return answer

    def accuracy(self, name: str) -> dict[str, Any]:
        """The held-out accuracy, and that to be expected of twice the labels; may be `Pending`."""
        labels = self.log.read()
        features = self._features(name)
        rows, numbers, classes = self._training_set(features, labels)

        def compute(progress: ProgressCallback) -> dict[str, Any]:
            progress(0, 2)
            data = features.rows[rows], numbers, features.standardize
            accuracy = held_out_accuracy(*data, classes=len(classes))
            progress(1, 2)
            if accuracy is None or accuracy.interval is None:
                return {"needed": MIN_LABELS, "accuracy": None}
            expected = accuracy_with_twice_the_labels(*data, classes=len(classes))
            return {
                "given": len(rows),
                "labels": accuracy.images,
                "needed": MIN_CURVE_LABELS,
                "accuracy": accuracy.value,
                "interval": accuracy.interval,
                "expected": expected,
            }

        if self._measured != labels.version:  # nobody waits for that of older labels
            self._measuring.stop()
            self._measured = labels.version
        key = name, labels.version, self._snapshot()
        answer: dict[str, Any] = self._measuring.get(
            key, f"Accuracy with {len(rows)} labels", compute
        )
        return answer

    def find(self, kind: str, *, name: str, index: int = 0, label: str = "") -> list[int]:
        """Indices of images: proposed, nearest to one, or predicted to be of a class."""
        labels = self.log.read()
        features = self._features(name)
        if kind == "proposed":
            key = name, labels.version, self._snapshot()
            proposed: list[int] = self._choosing.get(
                key, "Choosing what to label next", lambda _: self._propose(name, labels)
            )
            return proposed
        if kind == "neighbors":
            if index not in features.row_of:
                raise MissingData(f"image {index} is not among these; choose all training images")
            unit = F.normalize(features.rows[features.row_of[index]][None], dim=1)
            similarity = torch.cat(
                [(F.normalize(rows, dim=1) @ unit.T)[:, 0] for rows in features.rows.split(16_384)]
            )
            nearest = similarity.topk(min(NEIGHBORS, len(similarity))).indices
            return _indices(features, nearest)
        fitted = self._fit(name, labels)
        if kind != "predicted" or fitted is None or label not in fitted.classes:
            raise MissingData(f"got {kind!r} {label!r}, need proposed, neighbors or a known class")
        confidence, predicted = fitted.probabilities.max(1)
        rows = (predicted == fitted.classes.index(label)).nonzero()[:, 0]
        return _indices(features, rows[confidence[rows].argsort(stable=True)][:PAGE])

    def predictions(self, name: str, indices: Sequence[int]) -> list[dict[str, Any]]:
        """The predicted class of images and its probability, where there is a probe."""
        features = self._features(name)
        fitted = self._fit(name, self.log.read())
        predictions = []
        for index in indices:
            row = features.row_of.get(index)
            prediction: dict[str, Any] = {"predicted": None, "confidence": None}
            if fitted is not None and row is not None:
                confidence, number = fitted.probabilities[row].max(0)
                prediction["predicted"] = fitted.classes[int(number)]
                prediction["confidence"] = to_json_number(float(confidence))
            predictions.append(prediction)
        return predictions

    def colors(self, by: str) -> dict[str, Any]:
        """The given or the predicted label of each snapshot image."""
        labels = self.log.read()
        if by == "given":
            indices = self._snapshot().indices.tolist()
            return categories([labels.given.get(i) for i in indices], order=labels.classes)
        fitted = self._fit(self._colored, labels)
        if fitted is None:
            raise MissingData("no predictions yet; label images of two classes in the tab Label")
        numbers = fitted.probe.probabilities(self._snapshot().features).argmax(1).tolist()
        return categories([fitted.classes[number] for number in numbers], order=fitted.classes)

    def _snapshot(self) -> Snapshot:
        epochs = self.run.snapshot_epochs
        if not epochs:
            raise MissingData("there is no snapshot yet; labels need one")
        return self.run.snapshot(epochs[-1])

    def _features(self, name: str) -> Features:
        if name not in ("snapshot", "train"):
            raise ValueError(f"in: got {name!r}, need snapshot or train")
        rows, indices = self.searcher.features(name, self._snapshot().epoch)
        return self._with_statistics(name, rows, indices)

    @functools.lru_cache(maxsize=2)  # noqa: B019 (lives as long as the server)
    def _with_statistics(self, _name: str, rows: Tensor, indices: Tensor) -> Features:
        return Features(rows, indices, Standardize(rows))

    def _training_set(
        self, features: Features, labels: Labels
    ) -> tuple[Int[Tensor, " labels"], Int[Tensor, " labels"], list[str]]:
        """Rows of the labeled images, numbers of their classes, and the names of the classes."""
        usable = {i: name for i, name in labels.given.items() if i in features.row_of}
        classes = [name for name in labels.classes if name in set(usable.values())]
        rows = torch.tensor([features.row_of[index] for index in usable], dtype=torch.int64)
        numbers = [classes.index(name) for name in usable.values()]
        return rows, torch.tensor(numbers, dtype=torch.int64), classes

    def _fit(self, name: str, labels: Labels) -> FittedProbe | None:
        """The probe of these labels; None with fewer than two classes."""
        features = self._features(name)
        with self._fitting:  # several requests ask for the same one
            known, fitted = self._fitted.get(name, (None, None))
            key = labels.version, features
            if known != key:
                fitted = self._fit_to(features, labels)
                self._fitted[name] = key, fitted
            return fitted

    def _fit_to(self, features: Features, labels: Labels) -> FittedProbe | None:
        rows, numbers, classes = self._training_set(features, labels)
        if len(classes) < 2:
            return None
        data = features.rows[rows], numbers, features.standardize
        probe = fit_probe(*data, classes=len(classes))
        return FittedProbe(probe, classes, len(rows), probe.probabilities(features.rows))

    def _propose(self, name: str, labels: Labels) -> list[int]:
        features = self._features(name)
        fitted = self._fit(name, labels)
        labeled: Bool[Tensor, " n"] = torch.zeros(len(features.rows), dtype=torch.bool)
        labeled[self._training_set(features, labels)[0]] = True
        probabilities = None if fitted is None else fitted.probabilities
        return _indices(features, propose(features.rows, labeled, probabilities))

    def _save(self, fitted: FittedProbe, labels: Labels) -> None:
        snapshot = self._snapshot()
        Classifier(
            probe=fitted.probe,
            classes=fitted.classes,
            run=self.run.folder,
            epoch=snapshot.epoch,
            weights=self._weights(snapshot),
            labels=fitted.labels,
            version=labels.version,
        ).save(self.folder)

    @functools.lru_cache(maxsize=2)  # noqa: B019
    def _weights(self, snapshot: Snapshot) -> str:
        try:
            return fingerprint(load_snapshot(self.run.folder, snapshot.epoch).backbone)
        except ValueError:  # a method with an encoder of its own
            return ""


def _indices(features: Features, rows: Int[Tensor, " m"]) -> list[int]:
    indices: list[int] = features.indices[rows].tolist()
    return indices
