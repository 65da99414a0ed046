"""Backbones with stems for ImageNet and for small images, and the encoder of the paper."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from meanshift import config
from meanshift.config.parsing import close
from meanshift.config.samples import RGB
from meanshift.models import timm_networks
from meanshift.models.convnet import CONVNETS, ConvNet, scaled
from meanshift.models.heads import mlp
from meanshift.models.small_networks import MLP, SHORTEST, Conv1d
from meanshift.models.split_batch_norm import split_batch_norm
from meanshift.models.view_whitening import ViewWhitening, without_whitening

_RESNETS: dict[str, tuple[Literal["BasicBlock", "Bottleneck"], list[int]]] = {
    "resnet10": ("BasicBlock", [1, 1, 1, 1]),
    "resnet18": ("BasicBlock", [2, 2, 2, 2]),
    "resnet34": ("BasicBlock", [3, 4, 6, 3]),
    "resnet50": ("Bottleneck", [3, 4, 6, 3]),
    "resnet101": ("Bottleneck", [3, 4, 23, 3]),
    "resnet152": ("Bottleneck", [3, 8, 36, 3]),
}
"""block of torchvision and blocks of each stage"""


_OF_OTHER_KINDS = {"mlp": "vector", "conv1d": "signal"}
_RECIPES = {"image": "small", "vector": "vector", "signal": "signal"}


class Encoder(nn.Module):
    """A backbone and its projector: maps images to embeddings of `dim` values.

    The heads follow the authors' rule: hidden layers have twice as many values as the features,
    embeddings have a quarter (`hidden=0`, `dim=0`). Another projector is built by `projector` from
    the number of features.
    """

    def __init__(
        self,
        settings: config.Encoder,
        *,
        dim: int = 0,
        hidden: int = 0,
        image_size: int = 224,
        samples: config.SampleSpec = RGB,
        projector: Callable[[int], nn.Module] | None = None,
    ) -> None:
        super().__init__()
        self.backbone, self.features = build_backbone(
            settings, image_size=image_size, samples=samples
        )
        if settings.batch_groups > 1:
            split_batch_norm(self.backbone, settings.batch_groups)
        self.fixed_batch_norm = settings.batch_norm == "fixed"
        self.dim = dim or self.features // 4
        self.hidden = hidden or 2 * self.features
        build = projector or (lambda features: mlp(features, self.hidden, self.dim))
        self.projector = build(self.features)

    def forward(self, images: Float[Tensor, "batch channels *size"]) -> Float[Tensor, "batch dim"]:
        embeddings: Tensor = self.projector(without_whitening(self.backbone)(images))
        return embeddings

    def train(self, mode: bool = True) -> Encoder:
        super().train(mode)
        if self.fixed_batch_norm:
            for module in self.backbone.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.eval()
        return self


def build_backbone(
    settings: config.Encoder, *, image_size: int = 224, samples: config.SampleSpec = RGB
) -> tuple[nn.Module, int]:
    """Build an untrained backbone without its classifier; return it and its number of features.

    Its batch norm is plain: the groups of `batch_groups` are for pretraining (`Encoder`) only.
    """
    if samples.kind == "image" and settings.name not in _OF_OTHER_KINDS:
        network, features = _build_image_network(settings, image_size, samples.channels)
    else:
        network, features = _build_small_network(settings, image_size, samples)
    if settings.output == "whitened":
        return ViewWhitening(network, features), features
    return network, features


def _build_small_network(
    settings: config.Encoder, image_size: int, samples: config.SampleSpec
) -> tuple[nn.Module, int]:
    """A network for vectors or signals."""
    if _OF_OTHER_KINDS.get(settings.name) != samples.kind:
        fitting = {"image": "resnet18", "vector": "mlp", "signal": "conv1d"}[samples.kind]
        raise ValueError(
            f"encoder.name: {settings.name} does not take {samples.kind}s; type --encoder.name "
            f"{fitting}, or choose the recipe {_RECIPES[samples.kind]}"
        )
    if settings.name == "mlp":
        network: MLP | Conv1d = MLP(
            samples.channels, scaled(max(512, samples.channels), settings.width)
        )
    elif image_size < SHORTEST:
        raise ValueError(
            f"data.image_size: got {image_size}, need at least {SHORTEST} values of a signal for "
            f"{settings.name}"
        )
    else:
        network = Conv1d(samples.channels, scaled(64, settings.width))
    return network, network.features


def _build_image_network(
    settings: config.Encoder, image_size: int, channels: int
) -> tuple[nn.Module, int]:
    """A network of ours, torchvision's or timm's."""
    if timm_networks.is_timm(settings.name):
        if settings.stem != "imagenet" or settings.width != 1:
            raise ValueError(
                f"encoder.stem and encoder.width do not apply to {settings.name}; got stem "
                f"{settings.stem} and width {settings.width:g}: type --encoder.stem imagenet "
                f"--encoder.width 1, or choose another network of timm"
            )
        return timm_networks.build(settings.name, image_size=image_size, channels=channels)
    network, features = _build_network(settings, image_size)
    if channels != 3:
        replace_first_convolution(network, channels)
    return network, features


def _build_network(settings: config.Encoder, image_size: int) -> tuple[nn.Module, int]:
    if settings.name in _RESNETS:
        from meanshift.models.resnet import ScaledResNet  # torchvision is slow to import

        block, layers = _RESNETS[settings.name]
        resnet = ScaledResNet(block, layers, stem=settings.stem, width=settings.width)
        return resnet, resnet.features
    if settings.name in CONVNETS and settings.stem != "small":
        architecture = CONVNETS[settings.name]
        channels = tuple(scaled(channels, settings.width) for channels in architecture.channels)
        pool = settings.stem == "imagenet"
        network = ConvNet(replace(architecture, channels=channels), pool=pool)
        return network, network.features
    from torchvision import models

    if settings.name not in (*CONVNETS, *models.list_models(module=models)):
        raise ValueError(f"encoder.name: got {settings.name!r}, need {_suggest(settings.name)}")
    if settings.stem != "imagenet" or settings.width != 1:
        raise ValueError(
            f"encoder.stem is for {', '.join(_RESNETS)}, encoder.width also for "
            f"{', '.join(CONVNETS)}; "
            f"got {settings.name} with stem {settings.stem} and width {settings.width:g}"
        )
    options = torchvision_options(settings.name, image_size)
    backbone = models.get_model(settings.name, weights=None, **options)
    return backbone, _remove_classifier(backbone, settings.name)


def torchvision_options(name: str, image_size: int) -> dict[str, Any]:
    """The arguments with which torchvision builds a network for images of this size."""
    if name.startswith("vit_"):
        patch = int(name.rpartition("_")[2])
        if image_size % patch:
            raise ValueError(
                f"data.image_size: got {image_size}, need a multiple of {patch} for {name}"
            )
        return {"image_size": image_size}
    if name in ("googlenet", "inception_v3"):  # without their auxiliary classifiers
        return {"aux_logits": False, "init_weights": True}
    return {}


def replace_first_convolution(network: nn.Module, channels: int) -> None:
    """Let a network take another number of channels; its first convolution is random again."""
    name, first = next((name, m) for name, m in network.named_modules() if isinstance(m, nn.Conv2d))
    replaced = nn.Conv2d(
        channels,
        first.out_channels,
        first.kernel_size,  # type: ignore[arg-type]
        first.stride,  # type: ignore[arg-type]
        first.padding,  # type: ignore[arg-type]
        bias=first.bias is not None,
    )
    nn.init.kaiming_normal_(replaced.weight, mode="fan_out", nonlinearity="relu")
    network.set_submodule(name, replaced)


def resnet_from_shapes(shapes: Mapping[str, tuple[int, ...]]) -> config.Encoder | None:
    """Return the settings of the ResNet whose weights have these shapes by name, if there is one.

    Shapes do not show strides: a 3x3 stem is assumed to be `small`.
    """
    depths = [
        len({key.split(".")[1] for key in shapes if key.startswith(f"layer{stage}.")})
        for stage in range(1, 5)
    ]
    block = "Bottleneck" if "layer1.0.conv3.weight" in shapes else "BasicBlock"
    name = next((name for name, kind in _RESNETS.items() if kind == (block, depths)), None)
    channels, _, kernel, _ = (*shapes.get("conv1.weight", ()), 0, 0, 0, 0)[:4]
    if name is None or kernel not in (3, 7):
        return None
    stem: Literal["imagenet", "small"] = "imagenet" if kernel == 7 else "small"
    return config.Encoder(name=name, stem=stem, width=channels / 64)


def _remove_classifier(backbone: nn.Module, name: str) -> int:
    """Replace the last linear layer and its dropout by the identity; return its inputs' number."""
    linears = [(path, m) for path, m in backbone.named_modules() if isinstance(m, nn.Linear)]
    if not linears:
        raise ValueError(f"encoder.name: {name} does not end in a linear layer; try resnet50")
    path, last = linears[-1]
    parent, _, child = path.rpartition(".")
    classifier = backbone.get_submodule(parent)
    setattr(classifier, child, nn.Identity())
    before = str(int(child) - 1) if child.isdecimal() else "dropout"
    if isinstance(getattr(classifier, before, None), nn.Dropout):
        setattr(classifier, before, nn.Identity())
    return last.in_features


def _suggest(name: str) -> str:
    from torchvision import models

    known = [*_RESNETS, *CONVNETS, *models.list_models(module=models)]
    others = ["a torchvision backbone such as resnet18 or resnet50, or timm:NAME"]
    return close(name, known, others)


@torch.no_grad()
def strides_over_one_pixel(network: nn.Module, shape: tuple[int, ...]) -> bool:
    """Whether a convolution with a stride gets a map of one pixel from samples of this shape.

    On CPUs with native bfloat16 oneDNN leaves parts of the weight gradient of such a convolution
    uninitialized (docs/experiments.md).
    """
    found: list[bool] = []

    def check(module: nn.Conv2d, inputs: tuple[Tensor, ...]) -> None:
        found.append(max(module.stride) > 1 and inputs[0].shape[-2:].numel() == 1)

    convolutions = [m for m in network.modules() if isinstance(m, nn.Conv2d)]
    handles = [m.register_forward_pre_hook(check) for m in convolutions]
    modes = {module: module.training for module in network.modules()}
    network.eval()
    network(torch.zeros(1, *shape))
    for module, training in modes.items():
        module.training = training
    for handle in handles:
        handle.remove()
    return any(found)


def memory_format(encoder: nn.Module) -> torch.memory_format:
    """Return channels-last for networks with 2-D convolutions, which are faster with it."""
    convolutional = any(isinstance(module, nn.Conv2d) for module in encoder.modules())
    return torch.channels_last if convolutional else torch.contiguous_format
