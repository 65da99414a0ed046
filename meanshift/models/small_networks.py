"""Small networks for samples that are not images: vectors and signals."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

SHORTEST = 1024
"""values of the shortest signal that `Conv1d` takes"""


class MLP(nn.Module):
    """A linear layer and a residual block, for vectors of `columns` values.

    It begins as a rotation: the block adds nothing at first, so the neighbors of a vector are those
    that it has in the data (if there are no fewer features than columns).
    """

    def __init__(self, columns: int, features: int) -> None:
        super().__init__()
        self.features = features
        self.rotation = nn.Linear(columns, features, bias=False)
        nn.init.orthogonal_(self.rotation.weight)
        last = nn.Linear(features, features)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.block = nn.Sequential(
            nn.Linear(features, features, bias=False),
            nn.BatchNorm1d(features),
            nn.ReLU(inplace=True),
            last,
        )

    def forward(self, vectors: Float[Tensor, "batch columns"]) -> Float[Tensor, "batch features"]:
        rotated = self.rotation(vectors)
        output: Tensor = rotated + self.block(rotated)
        return output


class Conv1d(nn.Module):
    """A long first filter and three short ones, each with batch norm, ReLU and a pool of 4.

    The features are the mean and the maximum of each channel over the time, so signals of any
    length of 1,024 or more values will do (M5 of Dai et al., 2017, has the mean alone).
    """

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs = channels
        for number, outputs in enumerate((width, width, 2 * width, 4 * width)):
            kernel, stride = (80, 4) if number == 0 else (3, 1)
            layers += [
                nn.Conv1d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False),
                nn.BatchNorm1d(outputs),
                nn.ReLU(inplace=True),
                nn.MaxPool1d(4),
            ]
            inputs = outputs
        self.features = 2 * inputs
        self.layers = nn.Sequential(*layers)

    def forward(
        self, signals: Float[Tensor, "batch channels time"]
    ) -> Float[Tensor, "batch features"]:
        maps: Tensor = self.layers(signals)
        return torch.cat([maps.mean(2), maps.amax(2)], 1)
