"""What a run counts: the figures of its steps between two log lines, and unreadable pictures."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meanshift.console import Console
from meanshift.journal import Journal


class Tally:
    """Sums of what the steps told since the last log line, kept on the device until then."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.count = 0

    def add(self, step: Any) -> None:
        for name in ("loss", "agreement", "purity", "same_image"):
            value = getattr(step, name)
            if value is not None:
                if name == "purity":  # steps without a labelled picture do not count
                    self._sum("steps with labels", ~value.isnan())
                    value = value.nan_to_num()
                self._sum(name, value)
        self.count += 1

    def _sum(self, name: str, value: Tensor) -> None:
        held = self.sums.get(name, torch.zeros((), dtype=torch.float64, device=value.device))
        self.sums[name] = held.to(value.device) + value.detach()

    def means(self) -> dict[str, float]:
        known = float(self.sums.pop("steps with labels", self.count))
        counts = {"purity": known}
        means = {
            name: float(total) / counts.get(name, self.count)
            for name, total in self.sums.items()
            if counts.get(name, self.count)
        }
        self.sums, self.count = {}, 0
        return means


class BadPictures:
    """Unreadable pictures: each is named once, and too many end the run."""

    def __init__(self, share: float, size: int) -> None:
        self.share, self.size, self.known = share, size, dict[str, str]()

    def count(
        self, found: list[tuple[str, str]], step: int, journal: Journal, console: Console
    ) -> None:
        for title, why in found:
            if title not in self.known:
                self.known[title] = why
                console.say(f"warning: {title} cannot be read ({why}); another picture stands in")
                journal.warn(step, "bad picture", why, file=title)
        if len(self.known) > self.share * self.size:
            listed = "\n".join(f"  {title}: {why}" for title, why in self.known.items())
            raise ValueError(
                f"{len(self.known)} of {self.size} pictures cannot be read so far, more than the "
                f"{self.share:.1%} that are allowed:\n{listed}\n"
                f"repair or remove them, or raise --data.bad_share"
            )

    def report(self, console: Console) -> None:
        if self.known:
            console.say(
                f"{len(self.known)} of {self.size} pictures could not be read; others stood in for "
                f"them, and warnings.jsonl lists them"
            )
