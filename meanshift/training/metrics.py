"""Averages of the metrics of the steps between two log lines."""

from __future__ import annotations

import torch
from torch import Tensor

from meanshift.methods import StepOutput
from meanshift.runtime import distributed


class MetricAverages:
    """Weighted sums of each metric since the last log line; they stay on the device until then."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.weights: dict[str, Tensor] = {}

    def add(self, output: StepOutput) -> None:
        """Add the loss and the metrics of a step, each weighted by its number of samples."""
        self._add("loss", output.loss, len(output.embeddings))
        for name, (mean, weight) in output.metrics.items():
            self._add(name, mean, weight)

    def _add(self, name: str, mean: Tensor, weight: Tensor | int) -> None:
        zero = torch.zeros((), dtype=torch.float64, device=mean.device)
        total = mean.detach().double() * weight
        self.sums[name] = self.sums.get(name, zero).to(mean.device) + total
        self.weights[name] = self.weights.get(name, zero).to(mean.device) + weight

    def compute(self) -> dict[str, float]:
        """The means over the samples of all processes; the sums start again from zero."""
        names = sorted(self.sums)
        if not names:
            return {}
        pairs = [torch.stack([self.sums[name], self.weights[name]]) for name in names]
        totals = distributed.all_sum(torch.stack(pairs)).tolist()
        self.sums = {}
        self.weights = {}
        return {
            name: total / weight
            for name, (total, weight) in zip(names, totals, strict=True)
            if weight
        }

    def state_dict(self) -> list[dict[str, dict[str, Tensor]]]:
        """The sums of every process."""
        own = {
            "sums": {name: value.cpu() for name, value in self.sums.items()},
            "weights": {name: value.cpu() for name, value in self.weights.items()},
        }
        return distributed.all_gather_list([own])

    def load_state_dict(self, saved: list[dict[str, dict[str, Tensor]]]) -> None:
        """Each process takes its own; with another number of processes the first takes all."""
        if len(saved) == distributed.world_size():
            saved = [saved[distributed.rank()]]
        elif distributed.rank() > 0:
            saved = []
        self.sums = _add_all([part["sums"] for part in saved])
        self.weights = _add_all([part["weights"] for part in saved])


def _add_all(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    total: dict[str, Tensor] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, torch.zeros_like(value)) + value
    return total
