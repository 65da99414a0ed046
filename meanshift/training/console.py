"""What a person watches while a run trains: a bar on a terminal, else a line an epoch."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

from tqdm import tqdm

from meanshift.training.optim import Schedule


def table(columns: Mapping[str, Mapping[str, float]], *, by: str = "") -> str:
    """Figures by name, a column for each of those compared; one alone is a plain list.

    `by="row"` gives each of those compared a row. A deviation stands behind its figure.
    """
    shown = {title: _cells(figures) for title, figures in columns.items()}
    names = list(dict.fromkeys(name for cells in shown.values() for name in cells))
    if by == "row" or (len(shown) > 1 and len(names) <= 4):  # few figures: a row each
        shown = {n: {t: cells[n] for t, cells in shown.items() if n in cells} for n in names}
        names = list(dict.fromkeys(title for cells in shown.values() for title in cells))
    left = max(map(len, names), default=0)
    widths = {t: max(8, len(t), *map(len, cells.values())) for t, cells in shown.items()}
    lines = [" " * (left + 2) + "".join(f"  {title:>{w}}" for title, w in widths.items())]
    for name in names:
        row = "".join(f"  {cells.get(name, ''):>{widths[t]}}" for t, cells in shown.items())
        lines.append(f"  {name:{left}}{row}".rstrip())
    return "\n".join(lines[len(shown) == 1 and by != "row" :])


def _cells(figures: Mapping[str, float]) -> dict[str, str]:
    deviations = {f"{name} deviation" for name in figures}
    return {
        name: f"{value:.2f}"
        + (f" ± {figures[f'{name} deviation']:.2f}" if f"{name} deviation" in figures else "")
        for name, value in figures.items()
        if name not in deviations
    }


class Console:
    """Progress, the figures people ask for, and warnings that do not break the bar."""

    def __init__(self, schedule: Schedule, batch_size: int, *, shown: bool = True) -> None:
        self.total = schedule.total
        self.epochs = schedule.config.train.epochs
        self.batch_size = batch_size
        self.silent = not shown  # of several processes one prints
        self.shown: dict[str, float] = {}
        self.bar: tqdm[Any]

    def start(self, step: int) -> None:
        """Begin at a step: speed and remaining time count from here."""
        self.first = self.done = self.lap = step
        self.began = self.lapped = time.perf_counter()
        self.bar = tqdm(
            total=self.total * self.batch_size,
            initial=step * self.batch_size,
            unit="img",
            unit_scale=True,
            disable=self.silent or not sys.stderr.isatty(),
            dynamic_ncols=True,
            desc="pretrain",
        )
        if 0 < step < self.total:
            self.print(f"continues after step {step} of {self.total}")

    def __enter__(self) -> Console:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def print(self, text: str) -> None:
        """A line above the bar; nothing for an empty text."""
        if text and not self.silent:
            self.bar.write(text, file=sys.stderr)

    def step(self) -> None:
        self.done += 1
        self.bar.update(self.batch_size)

    def show(self, figures: dict[str, Any]) -> None:
        self.shown |= {
            name: figures[name] for name in ("loss", "purity", "1-NN", "20-NN") if name in figures
        }
        self.bar.set_postfix(
            {name: f"{value:.3f}" for name, value in self.shown.items()}, refresh=False
        )

    def speed(self) -> dict[str, float]:
        """Images a second since it was last asked; not part of what is reproducible."""
        now, steps = time.perf_counter(), self.done - self.lap
        rate = steps * self.batch_size / (now - self.lapped)
        self.lapped, self.lap = now, self.done
        return {"images_per_second": round(rate, 1), "seconds": round(now - self.began, 2)}

    def end_epoch(self, epoch: int) -> None:
        if self.bar.disable:
            spent, steps = time.perf_counter() - self.began, self.done - self.first
            left = tqdm.format_interval(spent / steps * (self.total - self.done))
            figures = "  ".join(f"{name} {value:.3f}" for name, value in self.shown.items())
            rate = steps * self.batch_size / spent
            self.print(f"epoch {epoch}/{self.epochs}  {figures}  {rate:.0f} images/s  {left} left")
