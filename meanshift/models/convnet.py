"""Small convolutional networks for CPUs: plain convolutions and a 2x2 grid of means.

They are meant for weights that start from the principal components of the data (`encoder.init
pca`). Per second of CPU time they then learn far more than a ResNet (docs/experiments.md): a
shortcut adds other features to the principal components, and a plain layer does not.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn

CONVNETS: dict[str, tuple[int, ...]] = {
    "conv3": (64, 128, 256),
    "conv4": (64, 128, 256, 512),
}
"""channels of the convolutions by name"""


class ConvNet(nn.Module):
    """A 5x5 convolution with stride 2 and a max pool, then 3x3 convolutions, then a grid of means.

    Each convolution is followed by batch norm and ReLU; from the third one on it has stride 2. The
    features are the means over each quarter of the last map, which keep where something is, so
    there are four times as many as channels.
    """

    def __init__(self, channels: tuple[int, ...]) -> None:
        super().__init__()
        first, second, *others = channels
        layers = [
            _convolution(3, first, kernel=5, stride=2),
            nn.MaxPool2d(3, stride=2, padding=1),
            _convolution(first, second),
        ]
        for inputs, outputs in zip(channels[1:], others, strict=False):
            layers.append(_convolution(inputs, outputs, stride=2))
        self.layers = nn.Sequential(*layers)
        self.grid = nn.AdaptiveAvgPool2d(2)
        self.features = 4 * channels[-1]

    def forward(
        self, images: Float[Tensor, "batch 3 height width"]
    ) -> Float[Tensor, "batch features"]:
        means: Tensor = self.grid(self.layers(images))
        return means.flatten(1)


def _convolution(inputs: int, outputs: int, *, kernel: int = 3, stride: int = 1) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )
