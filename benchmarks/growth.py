"""How a step grows with the bank, the batch and the images, with the fitted exponents."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.apart import Apart
from benchmarks.table import Row
from benchmarks.training import HALF
from meanshift.config import Config
from meanshift.reproduce.laps import Laps
from meanshift.reproduce.step import Contender
from meanshift.runtime.malloc import keep_memory
from meanshift.viz import style

AXES: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    "bank, rows": ("method.bank_size", (4_096, 16_384, 65_536, 262_144, 1_048_576), {}),
    "batch, images": ("train.batch_size", (32, 64, 128, 256, 512), {}),
    "images, px": ("data.image_size", (16, 24, 32, 48, 64), {"train.batch_size": 64}),
}
Point = tuple[int, float, float]  # where on the axis, a step, its search and loss


def rows(rounds: int, *, out: Path | None = None) -> Iterator[Row]:
    measured = {}
    for name, (setting, values, others) in AXES.items():
        configs = [HALF.with_overrides({setting: value, **others}) for value in values]
        apart = Apart(points, configs, max(2, rounds - 1))
        measured[name] = [(value, *told) for value, told in zip(values, apart.ask(), strict=True)]
        apart.end()
        for part, which in (("a step", 1), ("search and loss", 2)):
            if part == "a step" or "px" not in name:
                slope = exponent([(p[0], p[which]) for p in measured[name][-4:]])
                yield Row(f"growth of {part} with the {name}: exponent", (slope,),
                          note="fitted to the four largest")  # fmt: skip
    if out is not None:
        draw(measured, out)


def points(configs: list[Config], rounds: int) -> Iterator[list[tuple[float, float]]]:
    """Medians of (a step, search and loss) for each config, measured by turns."""
    keep_memory()
    yield []
    contenders = [Contender(config) for config in configs]
    laps = [Laps() for _ in configs]
    for contender in contenders:
        contender.step(Laps())
    for _ in range(rounds):
        for contender, taken in zip(contenders, laps, strict=True):
            contender.step(taken)
    medians = [taken.medians() for taken in laps]
    yield [(sum(phases.values()), phases["search and loss"]) for phases in medians]


def exponent(measured: list[tuple[int, float]]) -> float:
    """The slope of the straight line through the logarithms."""
    x, y = ([math.log(pair[i]) for pair in measured] for i in (0, 1))
    return statistics.linear_regression(x, y).slope


def draw(measured: dict[str, list[Point]], out: Path) -> None:
    """Both parts by each axis, as multiples of the smallest step of the panel."""
    figure = style.figure(10.0, 3.2)
    told = []
    for axes, (name, held) in zip(figure.subplots(1, 3), measured.items(), strict=True):
        least = min(step for _, step, _ in held)
        for part, which, color in (("step", 1, 0), ("search and loss", 2, 1)):
            x, y = [p[0] for p in held], [p[which] / least for p in held]
            slope = exponent([(p[0], p[which]) for p in held[-4:]])
            label = f"{part}: exponent {slope:.2f}"
            axes.loglog(x, y, "o-", color=style.COLORS[color], markersize=4, label=label)
            told.append(f"{name}, {label}")
        axes.set(xlabel=name, title=f"by {name.split(',')[0]}")
        axes.set_xticks(x[::2], [f"{v // 1024:,}k" if v >= 4096 else f"{v}" for v in x[::2]])
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.minorticks_off()
        axes.legend(fontsize=7.5, loc="upper left")
        low, high = axes.get_ylim()
        axes.set_ylim(low, high * 6)  # room for the legend
    figure.axes[0].set_ylabel("time / that of the panel's smallest step")
    style.save(figure, out / "growth", title="How a training step grows",
              text="; ".join(told), suffixes=(".png",))  # fmt: skip
