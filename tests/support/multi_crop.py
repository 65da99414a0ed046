"""Crops of two sizes without images, and an encoder without batch norm that takes both."""

from __future__ import annotations

import torch
from torch import Tensor, nn

DIM, BATCH = 5, 6


class CropEncoder(nn.Module):
    """Maps (batch, 4, any length) to `DIM` values, in float64."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, DIM)).double()
        self.calls: list[tuple[int, ...]] = []

    def forward(self, crops: Tensor) -> Tensor:
        self.calls.append(tuple(crops.shape))
        output: Tensor = self.layers(crops.mean(2))
        return output


def crops(step: int, *, small: int = 2, batch: int = BATCH) -> list[Tensor]:
    """Two large crops of length 7 and small ones of length 3, in float64."""
    generator = torch.Generator().manual_seed(100 + step)
    lengths = [7, 7] + [3] * small
    return [
        torch.randn(batch, 4, length, generator=generator, dtype=torch.float64)
        for length in lengths
    ]


def unit_rows(rows: Tensor) -> Tensor:
    return rows / rows.norm(dim=-1, keepdim=True)
