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
"""metrics of training that are shown; all of them are in metrics.jsonl"""


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
        self.metrics: dict[str, float] = {}
        self.bar: tqdm[Any]

    def start(self, step: int) -> None:
        """Begin at a step; speed and remaining time are measured from here."""
        now = time.perf_counter()
        self.step = step
        self.first_step = step
        self.start_time = now
        self.last_step = step  # of the last measurement of the speed
        self.last_time = now
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
        """Update the loss beside the bar, or the metrics of the next line."""
        self.metrics |= {name: metrics[name] for name in SHOWN if name in metrics}

    def _describe_step(self) -> str:
        epoch = max(0, self.step - 1) // self.steps_per_epoch + 1
        loss = f" loss {self.metrics['loss']:.3f}" if self.metrics else ""
        return f"epoch {epoch}/{self.epochs} step {self.step}/{self.total_steps}{loss}"

    def speed(self) -> dict[str, float]:
        """Images per second since the last call; these are the only metrics that vary by run."""
        now = time.perf_counter()
        images = (self.step - self.last_step) * self.batch_size
        images_per_second = images / (now - self.last_time)
        self.last_step = self.step
        self.last_time = now
        return {
            "images_per_second": round(images_per_second, 1),
            "seconds": round(now - self.start_time, 2),
        }

    def end_epoch(self, epoch: int, evaluated: dict[str, Any]) -> None:
        """Print the line of an epoch; beside a bar only if its weights were evaluated."""
        parts = [f"epoch {epoch}/{self.epochs}"]
        if self.bar.disable:
            parts += [f"{name} {value:.3f}" for name, value in self.metrics.items()]
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
