"""torchvision's ResNet for small images and narrow networks.

A module of its own: torchvision takes a second to import, and other networks do not need it.
"""

from __future__ import annotations

from typing import Any, Literal

from torch import nn
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

from meanshift.models.convnet import scaled


class ScaledResNet(ResNet):
    """torchvision's ResNet with a choice of stem, scaled channels, and no classifier."""

    def __init__(
        self,
        block: Literal["BasicBlock", "Bottleneck"],
        layers: list[int],
        *,
        stem: Literal["imagenet", "small", "small-stride2"],
        width: float,
    ) -> None:
        self._width = width
        blocks: dict[str, type[BasicBlock | Bottleneck]]
        blocks = {"BasicBlock": BasicBlock, "Bottleneck": Bottleneck}
        super().__init__(blocks[block], layers)
        first = self._scaled(64)
        if stem != "imagenet" or first != 64:
            stems = {"imagenet": (7, 2), "small": (3, 1), "small-stride2": (3, 2)}
            kernel, stride = stems[stem]
            self.conv1 = nn.Conv2d(3, first, kernel, stride=stride, padding=kernel // 2, bias=False)
            nn.init.kaiming_normal_(self.conv1.weight, mode="fan_out", nonlinearity="relu")
            self.bn1 = nn.BatchNorm2d(first)
        if stem != "imagenet":
            self.maxpool: nn.Module = nn.Identity()
        self.fc: nn.Module = nn.Identity()
        self.features = self.inplanes

    def _make_layer(self, block: Any, planes: int, *args: Any, **kwargs: Any) -> nn.Sequential:
        if planes == 64:
            self.inplanes = self._scaled(64)  # the output of the stem
        stage: nn.Sequential = super()._make_layer(block, self._scaled(planes), *args, **kwargs)
        return stage

    def _scaled(self, channels: int) -> int:
        return scaled(channels, self._width)
