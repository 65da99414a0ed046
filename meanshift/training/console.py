"""What a person sees during training: a progress bar on a terminal, otherwise a line per epoch."""

from __future__ import annotations

import sys
import time
from typing import Any

from tqdm.auto import tqdm

from meanshift.config.samples import Kind
from meanshift.runtime.progress import is_watched
from meanshift.training.optim import Schedule

SHOWN = ("loss", "purity")
"""metrics of training that are shown, as means over an epoch; all of them are in metrics.jsonl"""


class Console:
    """Progress, a few metrics, and messages that do not break the bar."""

    def __init__(
        self, schedule: Schedule, batch_size: int, *, kind: Kind = "image", shown: bool = True
    ) -> None:
        self.total_steps = schedule.total
        self.steps_per_epoch = schedule.steps_per_epoch
        self.epochs = schedule.config.train.epochs
        self.batch_size = batch_size
        self.kind = kind
        self.silent = not shown  # of several processes one prints
        self.loss: float | None = None
        self.sums: dict[str, float] = {}
        """each shown metric, summed over the steps of the epoch that were logged"""
        self.counts: dict[str, int] = {}
        """how many steps these are"""
        self.bar: tqdm[Any]

    def start(self, step: int) -> None:
        """Begin at a step; speed and remaining time are measured from here."""
        self.step = step
        self.first_step = step
        self.start_time = time.perf_counter()
        self.logged_step = step
        self._restart_clock()
        self.bar = tqdm(
            total=self.total_steps * self.batch_size,
            initial=step * self.batch_size,
            unit=self.kind if self.kind != "image" else "img",
            unit_scale=True,
            disable=self.silent or not is_watched(),
            dynamic_ncols=True,
            desc=self._describe_step(),
            bar_format="{desc} |{bar}| {rate_fmt}, {remaining} left",
        )
        if 0 < step < self.total_steps:
            self.print(f"continues after step {step} of {self.total_steps}")

    def __enter__(self) -> Console:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def print(self, text: str) -> None:
        """Print a line above the bar; an empty text prints nothing."""
        if text and not self.silent:
            self.bar.write(text, file=sys.stderr)

    def advance(self) -> None:
        """Count one step."""
        self.step += 1
        self.bar.set_description_str(self._describe_step(), refresh=False)
        self.bar.update(self.batch_size)

    def show(self, metrics: dict[str, Any]) -> None:
        """Update the loss beside the bar, and add the means since the last call to the epoch's."""
        self.loss = metrics["loss"]
        steps = self.step - self.logged_step
        self.logged_step = self.step
        for name in SHOWN:
            if name in metrics:
                self.sums[name] = self.sums.get(name, 0.0) + steps * metrics[name]
                self.counts[name] = self.counts.get(name, 0) + steps

    def _describe_step(self) -> str:
        epoch = max(0, self.step - 1) // self.steps_per_epoch + 1
        loss = "" if self.loss is None else f" loss {self.loss:.3f}"
        return f"epoch {epoch}/{self.epochs} step {self.step}/{self.total_steps}{loss}"

    def speed(self) -> dict[str, float]:
        """The speed of the steps since the last call; only these metrics vary from run to run.

        `seconds` is the time since the start of this session. `cpu_seconds` is the CPU time of this
        process, with all of its threads, since the last line; loader workers are not counted.
        """
        now = time.perf_counter()
        images = (self.step - self.last_step) * self.batch_size
        speed = {
            "images_per_second": round(images / (now - self.last_time), 1),
            "seconds": round(now - self.start_time, 2),
            "cpu_seconds": round(time.process_time() - self.last_cpu_time, 3),
        }
        self._restart_clock()
        return speed

    def _restart_clock(self) -> None:
        """Measure the speed from here on."""
        self.last_step = self.step
        self.last_time = time.perf_counter()
        self.last_cpu_time = time.process_time()

    def end_epoch(self, epoch: int, evaluated: dict[str, Any]) -> None:
        """Print the line of an epoch; beside a bar only if its weights were evaluated.

        Loss and purity are means over all steps of the epoch in this session. The time of an
        evaluation does not count as time of the next steps.
        """
        self._restart_clock()
        parts = [f"epoch {epoch}/{self.epochs}"]
        if self.bar.disable:
            parts += [
                f"mean {name} {self.sums[name] / self.counts[name]:.3f}" for name in self.sums
            ]
        self.sums, self.counts = {}, {}
        parts += [f"{name} {value:.1f}" for name, value in evaluated.items()]
        steps = self.step - self.first_step
        if self.bar.disable and steps:
            seconds = time.perf_counter() - self.start_time
            remaining = tqdm.format_interval(seconds / steps * (self.total_steps - self.step))
            parts += [
                f"{steps * self.batch_size / seconds:.0f} {self.kind}s/s",
                f"{remaining} left",
            ]
        if len(parts) > 1:
            self.print("  ".join(parts))
