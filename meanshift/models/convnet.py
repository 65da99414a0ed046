"""Small convolutional networks for CPUs: plain convolutions and a 2x2 grid of means.

They are meant for weights that start from the principal components of the data (`encoder.init
pca`). Per second of CPU time they then learn far more than a ResNet (docs/experiments.md): the
shortcuts of a ResNet add other features to the principal components. Here the trunk has none, and
residual blocks begin as the identity.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor, nn


@dataclass(frozen=True)
class Architecture:
    channels: tuple[int, ...]
    """of the convolutions of the trunk"""
    blocks: bool = False
    """whether a residual block follows each convolution but the first"""


CONVNETS = {
    "conv3": Architecture((64, 128, 256)),
    "conv4": Architecture((64, 128, 256, 512)),
    "conv7": Architecture((64, 128, 256), blocks=True),
}


class ConvNet(nn.Module):
    """A 5x5 convolution with stride 2 and a max pool, then 3x3 convolutions, then a grid of means.

    Each convolution is followed by batch norm and ReLU; from the third one on it has stride 2. The
    features are the means over each quarter of the last map, which keep where something is, so
    there are four times as many as channels. Without the pool all maps have twice the side, at four
    times the cost.
    """

    def __init__(self, architecture: Architecture, *, pool: bool = True) -> None:
        super().__init__()
        first, *others = architecture.channels
        layers: list[nn.Module] = [
            nn.Sequential(*_convolution(3, first, kernel=5, stride=2), nn.ReLU(inplace=True)),
        ]
        if pool:
            layers.append(nn.MaxPool2d(3, stride=2, padding=1))
        inputs = first
        for number, outputs in enumerate(others):
            stride = 1 if number == 0 else 2
            convolution = _convolution(inputs, outputs, stride=stride)
            layers.append(nn.Sequential(*convolution, nn.ReLU(inplace=True)))
            if architecture.blocks:
                layers.append(ResidualBlock(outputs))
            inputs = outputs
        self.layers = nn.Sequential(*layers)
        self.grid = nn.AdaptiveAvgPool2d(2)
        self.features = 4 * inputs

    def forward(
        self, images: Float[Tensor, "batch channels height width"]
    ) -> Float[Tensor, "batch features"]:
        means: Tensor = self.grid(self.layers(images))
        return means.flatten(1)


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions whose output is added to their input; at first they add nothing."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        first, first_norm = _convolution(channels, channels)
        second, second_norm = _convolution(channels, channels)
        nn.init.zeros_(second_norm.weight)
        self.layers = nn.Sequential(first, first_norm, nn.ReLU(inplace=True), second, second_norm)
        self.relu = nn.ReLU(inplace=True)

    def forward(
        self, x: Float[Tensor, "batch channels height width"]
    ) -> Float[Tensor, "batch channels height width"]:
        total: Tensor = self.relu(x + self.layers(x))
        return total


def _convolution(
    inputs: int, outputs: int, *, kernel: int = 3, stride: int = 1
) -> tuple[nn.Conv2d, nn.BatchNorm2d]:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    return convolution, nn.BatchNorm2d(outputs)


def scaled(channels: int, width: float) -> int:
    """Channels times a factor, as a multiple of 8."""
    return max(8, round(channels * width / 8) * 8)
