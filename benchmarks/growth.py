"""How the time of a step grows with the bank, the batch and the images: fitted exponents."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.step import HALF_WIDTH
from benchmarks.table import Row
from benchmarks.worker import Worker
from meanshift.config import Config
from meanshift.reproduce.cost import PhaseTimer, TimedStep
from meanshift.runtime.malloc import keep_memory
from meanshift.viz import style


@dataclass(frozen=True)
class Axis:
    """A setting and the values that it takes; other settings may change with it."""

    setting: str
    values: tuple[int, ...]
    others: dict[str, Any] = field(default_factory=dict)


AXES = {
    "bank, rows": Axis("method.bank_size", (4_096, 16_384, 65_536, 262_144, 1_048_576)),
    "batch, images": Axis("train.batch_size", (32, 64, 128, 256, 512)),
    "images, px": Axis("data.image_size", (16, 24, 32, 48, 64), {"train.batch_size": 64}),
}


@dataclass(frozen=True)
class Point:
    """Seconds of a step, and of its search and loss, at a value of an axis."""

    value: int
    step: float
    search: float


def rows(rounds: int, *, out: Path | None = None) -> Iterator[Row]:
    points: dict[str, list[Point]] = {}
    for name, axis in AXES.items():
        configs = [
            HALF_WIDTH.with_overrides({axis.setting: value, **axis.others}) for value in axis.values
        ]
        worker = Worker(measure_steps, configs, max(2, rounds - 1))
        measured = worker.next()
        worker.close()
        points[name] = [
            Point(value, *seconds) for value, seconds in zip(axis.values, measured, strict=True)
        ]
        for part, seconds in _parts(points[name]).items():
            if part == "a step" or "px" not in name:
                yield Row(
                    f"growth of {part} with the {name}: exponent",
                    (exponent(axis.values[-4:], seconds[-4:]),),
                    note="fitted to the four largest",
                )
    if out is not None:
        draw(points, out)


def measure_steps(configs: list[Config], rounds: int) -> Iterator[list[tuple[float, float]]]:
    """Medians of (a step, search and loss) for each config, measured alternately."""
    keep_memory()
    yield []
    steps = [TimedStep(config) for config in configs]
    timers = [PhaseTimer() for _ in configs]
    for step in steps:
        step.step(PhaseTimer())
    for _ in range(rounds):
        for step, timer in zip(steps, timers, strict=True):
            step.step(timer)
    medians = [timer.medians() for timer in timers]
    yield [(sum(phases.values()), phases["search and loss"]) for phases in medians]


def exponent(values: Sequence[float], seconds: Sequence[float]) -> float:
    """The slope of the straight line through the logarithms."""
    x = [math.log(value) for value in values]
    y = [math.log(each) for each in seconds]
    return statistics.linear_regression(x, y).slope


def draw(points: dict[str, list[Point]], out: Path) -> None:
    """Both parts by each axis, as multiples of the fastest step of the panel."""
    figure = style.figure(10.0, 3.2)
    texts = []
    for axes, (name, measured) in zip(figure.subplots(1, 3), points.items(), strict=True):
        values = [point.value for point in measured]
        fastest = min(point.step for point in measured)
        for (part, seconds), color in zip(_parts(measured).items(), style.COLORS, strict=False):
            label = f"{part}: exponent {exponent(values[-4:], seconds[-4:]):.2f}"
            relative = [each / fastest for each in seconds]
            axes.loglog(values, relative, "o-", color=color, markersize=4, label=label)
            texts.append(f"{name}, {label}")
        axes.set(xlabel=name, title=f"by {name.split(',')[0]}")
        ticks = values[::2]
        axes.set_xticks(ticks, [f"{v // 1024:,}k" if v >= 4096 else f"{v}" for v in ticks])
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.minorticks_off()
        axes.legend(fontsize=7.5, loc="upper left")
        low, high = axes.get_ylim()
        axes.set_ylim(low, high * 6)  # space for the legend
    figure.axes[0].set_ylabel("time / that of the panel's fastest step")
    style.save(
        figure,
        out / "growth",
        title="How a training step grows",
        text="; ".join(texts),
        suffixes=(".png",),
    )


def _parts(points: list[Point]) -> dict[str, list[float]]:
    return {
        "a step": [point.step for point in points],
        "search and loss": [point.search for point in points],
    }
