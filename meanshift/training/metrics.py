"""What a run counts: the figures of its steps between two log lines, and unreadable images."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meanshift.runtime import distributed
from meanshift.runtime.run_directory import RunDirectory
from meanshift.training.console import Console


class MetricAverages:
    """Sums of what the steps told since the last log line, kept on the device until then."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}

    def add(self, step: Any, labels: Tensor | None = None) -> None:
        """A step that told means over its images, or, for purity, over those with a label."""
        images = torch.tensor(len(step.embeddings), device=step.embeddings.device)
        for name in ("loss", "agreement", "purity", "same_image"):
            value, weight = getattr(step, name), images
            if name == "purity" and labels is not None:
                weight = (labels >= 0).sum()
            if value is not None:
                self._sum(name, value.detach().nan_to_num() if name == "purity" else value, weight)

    def _sum(self, name: str, value: Tensor, weight: Tensor) -> None:
        for key, more in ((name, value.detach().double() * weight), (f"of {name}", weight)):
            held = self.sums.get(key, torch.zeros((), dtype=torch.float64, device=more.device))
            self.sums[key] = held.to(more.device) + more

    def of_all(self) -> list[dict[str, Tensor]]:
        """The sums of each process, to be saved."""
        return distributed.all_gather_list([{name: held.cpu() for name, held in self.sums.items()}])

    def load(self, saved: list[dict[str, Tensor]]) -> None:
        """Take over one's own; where there were other processes, the first takes all."""
        if len(saved) == distributed.world_size():
            self.sums = saved[distributed.rank()]
        elif distributed.rank() == 0:
            for one in saved:
                for name, held in one.items():
                    self.sums[name] = self.sums.get(name, torch.zeros_like(held)) + held

    def means(self) -> dict[str, float]:
        """Over the images of all processes, and begin anew."""
        names = sorted(name for name in self.sums if not name.startswith("of "))
        if not names:
            return {}
        pairs = [torch.stack([self.sums[name], self.sums[f"of {name}"]]) for name in names]
        held = distributed.all_sum(torch.stack(pairs)).tolist()
        self.sums = {}
        return {n: total / count for n, (total, count) in zip(names, held, strict=True) if count}


class BadFiles:
    """Unreadable images: each is named once, and too many end the run."""

    def __init__(self, share: float, size: int) -> None:
        self.share, self.size, self.known = share, size, dict[str, str]()

    def count(
        self, found: list[tuple[str, str]], step: int, journal: RunDirectory, console: Console
    ) -> None:
        for title, why in found:
            if title not in self.known:
                self.known[title] = why
                console.say(f"warning: {title} cannot be read ({why}); another image stands in")
                journal.warn(step, "bad image", why, file=title)
        if len(self.known) > self.share * self.size:
            listed = "\n".join(f"  {title}: {why}" for title, why in self.known.items())
            raise distributed.SharedError(
                f"{len(self.known)} of {self.size} images cannot be read so far, more than the "
                f"{self.share:.1%} that are allowed:\n{listed}\n"
                f"repair or remove them, or raise --data.bad_share"
            )

    def report(self, console: Console) -> None:
        if self.known:
            console.say(
                f"{len(self.known)} of {self.size} images could not be read; others stood in for "
                f"them, and warnings.jsonl lists them"
            )
