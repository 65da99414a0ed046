"""A run while it trains: how far it is, what it warned of, its curves."""

from __future__ import annotations

import hashlib
import itertools
import math
import statistics
import time
from typing import Any

from meanshift.viz.run_reader import Run
from meanshift.viz.style import thinned

POINTS = 600  # of a curve at the most
_QUIET = 60  # seconds without a line after which a run may count as stopped
_NO_CURVES = {"kind", "step", "epoch", "seconds", "k", "momentum", "purity_with_self"}


class Live:
    """What a run directory says now, whoever asks; several threads may."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def version(self) -> str:
        """Changes when the run has written something, or has stopped writing."""
        told: list[Any] = [self.run.epochs, self._writing()]
        for name in ("metrics.jsonl", "warnings.jsonl"):
            path = self.run.folder / name
            held = path.stat() if path.exists() else None
            told.append(held and (held.st_size, held.st_mtime_ns, held.st_ino))
        return hashlib.sha256(repr(told).encode()).hexdigest()[:12]

    def state(self) -> dict[str, Any]:
        """Progress, warnings and curves; `version` first, so that nothing newer is missed."""
        version, run, total = self.version(), self.run, self.run.config.train.epochs
        lines, warnings, steps, done = (
            run.lines("metrics.jsonl"), run.warnings, run.steps, run.done
        )  # fmt: skip
        series = {k: held for k, held in run.every_series().items() if k not in _NO_CURVES}
        rates = [line["images_per_second"] for line in lines if line.get("images_per_second")]
        speed = statistics.harmonic_mean(rates[-20:]) if rates else 0
        left = (total - done) * steps * run.config.train.batch_size
        return {
            "version": version,
            "name": run.name,
            "settings": _settings(run),
            "done": number(done),
            "total": total,
            "training": self._writing() and done < total,
            "quiet": number(self._quiet()),
            "left": number(left / speed) if speed and done < total else None,
            "warnings": [
                {"kind": w["kind"], "message": w["message"], "epoch": number(w["step"] / steps)}
                for w in warnings
            ],
            "epochs": run.epochs,
            "curves": {
                name: dict(zip("xy", thinned(*held, most=POINTS), strict=True))
                for name, held in series.items()
            },
        }

    def _writing(self) -> bool:
        """Whether the last line is no older than a few of its kind usually take."""
        spent = [line["seconds"] for line in self.run.records("train")[-6:] if "seconds" in line]
        gaps = [b - a for a, b in itertools.pairwise(spent) if b > a]
        return self._quiet() < max(_QUIET, 5 * max(gaps, default=60.0))

    def _quiet(self) -> float:
        """Seconds since the last line."""
        path = self.run.folder / "metrics.jsonl"
        return time.time() - path.stat().st_mtime if path.exists() else math.inf


def number(value: float) -> float | None:
    """Six digits, or nothing for what is no number: JSON knows none."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _settings(run: Run) -> list[tuple[str, str]]:
    config = run.config
    encoder, method, train = config.encoder, config.method, config.train
    wide = "" if encoder.width == 1 else f", width {encoder.width:g}"
    bank = f", k {method.k}, bank {method.bank_size:,}" if method.name == "msf" else ""
    return [
        ("images", f"{config.data.source}, {config.data.image_size} px"),
        ("encoder", f"{encoder.name}, {encoder.stem} stem{wide}"),
        ("method", f"{method.name}{bank}, momentum {method.momentum:g}"),
        ("training", f"{train.epochs} epochs, batch {train.batch_size}, rate {optim.lr:g}"),
        ("seed", str(train.seed)),
    ]
