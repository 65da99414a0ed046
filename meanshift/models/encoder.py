"""Backbones, with ImageNet and small-image stems, and the heads of the paper."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torchvision import models
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

from meanshift import config

_RESNETS: dict[str, tuple[type[BasicBlock | Bottleneck], list[int]]] = {
    "resnet10": (BasicBlock, [1, 1, 1, 1]),
    "resnet18": (BasicBlock, [2, 2, 2, 2]),
    "resnet34": (BasicBlock, [3, 4, 6, 3]),
    "resnet50": (Bottleneck, [3, 4, 6, 3]),
    "resnet101": (Bottleneck, [3, 4, 23, 3]),
    "resnet152": (Bottleneck, [3, 8, 36, 3]),
}


class Encoder(nn.Module):
    """A backbone and its projector: images to embeddings of `dim` values.

    The authors' rule for the heads: hidden layers of twice the features, embeddings of a quarter.
    """

    def __init__(self, settings: config.Encoder, *, dim: int = 0, image_size: int = 224) -> None:
        super().__init__()
        self.backbone, self.features = build_backbone(settings, image_size=image_size)
        self.dim, self.hidden = dim or self.features // 4, 2 * self.features
        self.projector = mlp(self.features, self.hidden, self.dim)

    def forward(
        self, images: Float[Tensor, "batch channels height width"]
    ) -> Float[Tensor, "batch dim"]:
        embeddings: Tensor = self.projector(self.backbone(images))
        return embeddings


def mlp(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    """Projector and predictor alike: Linear, batch norm, ReLU, Linear."""
    return nn.Sequential(
        nn.Linear(inputs, hidden),
        nn.BatchNorm1d(hidden),
        nn.ReLU(inplace=True),
        nn.Linear(hidden, outputs),
    )


def build_backbone(settings: config.Encoder, *, image_size: int = 224) -> tuple[nn.Module, int]:
    """An untrained backbone without its classifier, and the number of its features."""
    if settings.name in _RESNETS:
        resnet = _ScaledResNet(settings)
        return resnet, resnet.features
    if settings.name not in models.list_models(module=models):
        raise ValueError(f"encoder.name: got {settings.name!r}, need {_suggest(settings.name)}")
    if settings.stem != "imagenet" or settings.width != 1:
        raise ValueError(
            f"encoder.stem and encoder.width are for {', '.join(_RESNETS)}; "
            f"got {settings.name} with stem {settings.stem} and width {settings.width:g}"
        )
    given: dict[str, Any] = {}
    if settings.name.startswith("vit_"):
        patch = int(settings.name.rpartition("_")[2])
        if image_size % patch:
            raise ValueError(
                f"data.image_size: got {image_size}, need a multiple of {patch} for {settings.name}"
            )
        given = {"image_size": image_size}
    elif settings.name in ("googlenet", "inception_v3"):  # auxiliary classifiers have no place here
        given = {"aux_logits": False, "init_weights": True}
    backbone = models.get_model(settings.name, weights=None, **given)
    return backbone, _behead(backbone, settings.name)


def resnet_of(shapes: Mapping[str, tuple[int, ...]]) -> config.Encoder | None:
    """The ResNet that has weights of these shapes by name, as far as shapes can tell.

    A stride leaves no trace in a shape: a 3x3 stem is taken as `small`.
    """
    blocks = {
        stage: {key.split(".")[1] for key in shapes if key.startswith(f"layer{stage}.")}
        for stage in range(1, 5)
    }
    block = Bottleneck if "layer1.0.conv3.weight" in shapes else BasicBlock
    kind = (block, [len(names) for names in blocks.values()])
    name = next((name for name, known in _RESNETS.items() if known == kind), None)
    channels, _, side, _ = (*shapes.get("conv1.weight", ()), 0, 0, 0, 0)[:4]
    if name is None or side not in (3, 7):
        return None
    stem: Literal["imagenet", "small"] = "imagenet" if side == 7 else "small"
    return config.Encoder(name=name, stem=stem, width=channels / 64)


class _ScaledResNet(ResNet):
    """torchvision's ResNet with a choice of stem and all channels scaled, and no classifier."""

    def __init__(self, settings: config.Encoder) -> None:
        block, layers = _RESNETS[settings.name]
        self._width = settings.width
        super().__init__(block, layers)
        first = self._scaled(64)
        if settings.stem != "imagenet" or first != 64:
            side, stride = {"imagenet": (7, 2), "small": (3, 1), "small-stride2": (3, 2)}[
                settings.stem
            ]
            self.conv1 = nn.Conv2d(3, first, side, stride=stride, padding=side // 2, bias=False)
            nn.init.kaiming_normal_(self.conv1.weight, mode="fan_out", nonlinearity="relu")
            self.bn1 = nn.BatchNorm2d(first)
        if settings.stem != "imagenet":
            self.maxpool: nn.Module = nn.Identity()
        self.fc: nn.Module = nn.Identity()
        self.features = self.inplanes

    def _make_layer(self, block: Any, planes: int, *args: Any, **kwargs: Any) -> nn.Sequential:
        if planes == 64:
            self.inplanes = self._scaled(64)  # the stem feeds the first stage
        stage: nn.Sequential = super()._make_layer(block, self._scaled(planes), *args, **kwargs)
        return stage

    def _scaled(self, channels: int) -> int:
        return max(8, round(channels * self._width / 8) * 8)


def _behead(backbone: nn.Module, name: str) -> int:
    """Replace a classifier's last linear layer by nothing, and say how many features feed it."""
    linears = [(path, m) for path, m in backbone.named_modules() if isinstance(m, nn.Linear)]
    if not linears:
        raise ValueError(f"encoder.name: {name} does not end in a linear layer; try resnet50")
    path, last = linears[-1]
    parent, _, child = path.rpartition(".")
    setattr(backbone.get_submodule(parent), child, nn.Identity())
    return last.in_features


def _suggest(name: str) -> str:
    import difflib

    known = [*_RESNETS, *models.list_models(module=models)]
    close = difflib.get_close_matches(name, known, n=3)
    return " or ".join(close) if close else "a torchvision backbone such as resnet18 or resnet50"


def memory_format(encoder: nn.Module) -> torch.memory_format:
    """Channels-last where there are 2-D convolutions to gain from it."""
    convolves = any(isinstance(m, nn.Conv2d) for m in encoder.modules())
    return torch.channels_last if convolves else torch.contiguous_format
