"""The state of a run while it trains: progress, warnings, curves."""

from __future__ import annotations

import hashlib
import itertools
import math
import statistics
import time
from typing import Any

from meanshift.viz.analysis import metric_series, thin_curve
from meanshift.viz.report.verdicts import KNN, baseline_lines, rank_bands
from meanshift.viz.run_reader import Run

MAX_POINTS = 600  # per curve
_MIN_PAUSE = 60  # seconds without a line after which a run may count as stopped
_METHOD_FACTS = {"k": "k {}", "bank_size": "bank {:,}", "momentum": "momentum {:g}"}
"""settings that are shown for the methods that have them"""


class LiveRun:
    """What a run directory contains now; several threads may ask."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._stop_requested = 0  # when, in nanoseconds of the disk's clock; 0: never by this page

    def version(self) -> str:
        """A digest that changes when the run has written something, or has stopped writing."""
        epochs = self.run.snapshot_epochs
        stamps = {epoch: self.run.snapshot_stamp(epoch) for epoch in epochs}
        parts: list[Any] = [stamps, self._is_writing(), self._stop()]
        for name in ("metrics.jsonl", "warnings.jsonl"):
            path = self.run.folder / name
            if path.exists():
                status = path.stat()
                parts.append((status.st_size, status.st_mtime_ns, status.st_ino))
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]

    def state(self) -> dict[str, Any]:
        """Progress, warnings and curves."""
        version = self.version()  # first, so that nothing newer is missed
        run = self.run
        epochs = run.config.train.epochs
        done = run.epochs_done
        speeds = [
            line["images_per_second"]
            for line in run.lines("metrics.jsonl")
            if line.get("images_per_second")
        ]
        seconds_left = None
        if speeds and done < epochs:
            images_left = (epochs - done) * run.steps_per_epoch * run.config.train.batch_size
            seconds_left = to_json_number(images_left / statistics.harmonic_mean(speeds[-20:]))
        return {
            "version": version,
            "name": run.name,
            "settings": _facts(run),
            "epochs_done": to_json_number(done),
            "epochs": epochs,
            "training": self._is_training(),
            "stop": self._stop(),
            "seconds_silent": to_json_number(self._seconds_silent()),
            "seconds_left": seconds_left,
            "warnings": [
                {
                    "kind": warning["kind"],
                    "message": warning["message"],
                    "epoch": to_json_number(warning["step"] / run.steps_per_epoch),
                }
                for warning in run.warnings
            ],
            "snapshot_epochs": run.snapshot_epochs,
            "curves": {
                name: dict(zip("xy", thin_curve(*curve, points=MAX_POINTS), strict=True))
                for name, curve in metric_series(run).items()
            },
            "baselines": {metric: baseline_lines([run], metric) for metric in KNN},
            "rank_bands": rank_bands([run]),
        }

    def request_stop(self) -> None:
        """Ask the training to save and stop, as Ctrl-C does; it looks once a second."""
        if not self._is_training():
            raise ValueError("nothing trains in this folder now, so there is nothing to stop")
        path = self.run.directory.stop_request
        path.touch()
        self._stop_requested = path.stat().st_mtime_ns

    def _stop(self) -> str | int | None:
        """Whether a stop is "requested", or the step at which the run has saved and stopped."""
        if self.run.directory.stop_request.exists():
            return "requested" if self._is_writing() else None
        if not self._stop_requested or self.run.finished:
            return None
        begun = (self.run.folder / "environment.json").stat().st_mtime_ns
        if begun > self._stop_requested:  # the run was continued
            return None
        saved = {
            int(path.stem.removeprefix("step-")): path.stat().st_mtime_ns
            for path in self.run.directory.checkpoints.glob("step-*.pt")
        }
        return max((s for s, when in saved.items() if when >= self._stop_requested), default=None)

    def _is_training(self) -> bool:
        return self._is_writing() and not self.run.finished and not isinstance(self._stop(), int)

    def _is_writing(self) -> bool:
        """Whether the last line is not much older than the usual pause between lines."""
        seconds = [line["seconds"] for line in self.run.records("train")[-6:] if "seconds" in line]
        pauses = [after - before for before, after in itertools.pairwise(seconds) if after > before]
        return self._seconds_silent() < max(_MIN_PAUSE, 5 * max(pauses, default=60.0))

    def _seconds_silent(self) -> float:
        """Seconds since the last line."""
        path = self.run.folder / "metrics.jsonl"
        return time.time() - path.stat().st_mtime if path.exists() else math.inf


def to_json_number(value: float) -> float | None:
    """A number with six digits; None if it is not finite, which JSON cannot express."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _facts(run: Run) -> list[tuple[str, str]]:
    """The settings that the page shows, in words."""
    config = run.config
    encoder = f"{config.encoder.name}, {config.encoder.stem} stem"
    if config.encoder.width != 1:
        encoder += f", width {config.encoder.width:g}"
    method = [run.method]
    for name, text in _METHOD_FACTS.items():
        value = run.setting(f"method.{name}")
        if value:
            method.append(text.format(value))
    train = config.train
    return [
        ("images", f"{config.data.source}, {config.data.image_size} px"),
        ("encoder", encoder),
        ("method", ", ".join(method)),
        (
            "training",
            f"epochs {train.epochs}, batch {train.batch_size}, learning rate {config.optim.lr:g}",
        ),
        ("seed", str(train.seed)),
    ]
