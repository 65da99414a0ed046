"""Networks of other programs that take the weights of a run as they are."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchvision import models

from meanshift.config import Encoder
from meanshift.models.encoder import torchvision_options
from meanshift.models.timm_networks import PREFIX
from meanshift.models.view_whitening import ViewWhitening, without_whitening
from meanshift.models.weights import Weights

_SAME_NAMES = (
    *("resnet18", "resnet34", "resnet50", "resnet101", "resnet152"),
    *("resnext50_32x4d", "resnext101_32x8d", "resnext101_64x4d"),
    *("wide_resnet50_2", "wide_resnet101_2"),
    *("densenet121", "densenet161", "densenet169", "densenet201"),
)
"""networks of torchvision whose names and parameters in timm are the same"""


@dataclass(frozen=True)
class Counterpart:
    """The name of a network in another program, and the arguments that build it."""

    name: str
    arguments: dict[str, Any]
    classifier: str
    """the layer that it has and the backbone has not; a whitened output takes its place"""

    def call(self, function: str, **more: Any) -> str:
        """The Python code of a call that builds it."""
        return call_code(function, self.name, {**self.arguments, **more})


def call_code(function: str, name: str, arguments: dict[str, Any]) -> str:
    """The Python code of a call with a name and keywords."""
    words = [literal(name), *(f"{key}={literal(arguments[key])}" for key in arguments)]
    return f"{function}({', '.join(words)})"


def literal(value: Any) -> str:
    """A value as Python code; a text is in double quotes."""
    is_text = isinstance(value, (str, Path))
    return json.dumps(str(value), ensure_ascii=False) if is_text else repr(value)


def in_torchvision(weights: Weights) -> Counterpart | None:
    """torchvision's network with exactly these parameters, beside its classifier."""
    encoder = _standard_encoder(weights)
    if encoder is None or encoder.name not in models.list_models(module=models):
        return None
    if _channels(weights) != 3:
        return None
    arguments = torchvision_options(encoder.name, weights.image_size)
    if whitened := _whitened_features(weights):
        arguments["num_classes"] = whitened
    return Counterpart(encoder.name, arguments, _torchvision_classifier(weights, encoder.name))


def in_timm(weights: Weights) -> Counterpart | None:
    """timm's network with exactly these parameters."""
    encoder = _standard_encoder(weights)
    if encoder is None:
        return None
    whitened = _whitened_features(weights)
    arguments: dict[str, Any] = {"num_classes": whitened, "in_chans": _channels(weights)}
    if encoder.name in _SAME_NAMES:
        classifier = _torchvision_classifier(weights, encoder.name)
        return Counterpart(encoder.name, arguments, classifier)
    if not encoder.name.startswith(PREFIX):
        return None
    import timm  # it is there, as the network is one of timm's
    from timm.models import get_pretrained_cfg

    name = encoder.name.removeprefix(PREFIX)
    known = get_pretrained_cfg(name, allow_unregistered=True)
    if known is not None and known.fixed_input_size:
        arguments["img_size"] = weights.image_size
    if not whitened:
        return Counterpart(name, arguments, "")
    with torch.random.fork_rng(devices=[]):
        theirs = timm.create_model(name, **arguments)
    layer = _additional_layer(theirs, weights)
    return None if layer is None else Counterpart(name, arguments, layer)


def _torchvision_classifier(weights: Weights, name: str) -> str:
    """The name of the last layer of torchvision's network."""
    with torch.random.fork_rng(devices=[]):
        options = torchvision_options(name, weights.image_size)
        theirs = models.get_model(name, weights=None, **options)
    layer = _additional_layer(theirs, weights)
    assert layer is not None
    return layer


def _additional_layer(theirs: nn.Module, weights: Weights) -> str | None:
    """The one layer that a network has and the backbone has not; None where they differ more."""
    ours = without_whitening(weights.backbone).state_dict().keys()
    additional = theirs.state_dict().keys() - ours
    layers = {name.rpartition(".")[0] for name in additional}
    if ours - theirs.state_dict().keys() or len(layers) != 1 or len(additional) != 2:
        return None
    return layers.pop()


def _whitened_features(weights: Weights) -> int:
    """The number of whitened features; 0 where the output is plain."""
    backbone = weights.backbone
    return len(backbone.mean) if isinstance(backbone, ViewWhitening) else 0


def missing(weights: Weights, program: str) -> ValueError:
    """The error for a network that another program does not have, with what to type instead."""
    formats = []
    if program != "torchvision" and in_torchvision(weights):
        formats.append("--format torchvision")
    if program != "timm" and in_timm(weights):
        formats.append("--format timm")
    formats.append("--format onnx, which needs neither this program nor torch")
    formats.append("--format safetensors, which meanshift reads")
    return ValueError(
        f"{weights.spec}: {program} does not have {describe(weights)}; type {', or '.join(formats)}"
    )


def describe(weights: Weights) -> str:
    """What distinguishes a network from those of other programs."""
    encoder = weights.encoder
    assert encoder is not None
    parts = [encoder.name]
    if encoder.stem != "imagenet":
        parts.append(f"with the stem {encoder.stem}")
    if encoder.width != 1:
        parts.append(f"of width {encoder.width:g}")
    if encoder.output != "plain":
        parts.append(f"with {encoder.output} output")
    if _channels(weights) != 3:
        parts.append(f"of {_channels(weights)} channels")
    return " ".join(parts)


def _standard_encoder(weights: Weights) -> Encoder | None:
    """The settings of a network without stem and width that only this program has."""
    encoder = weights.encoder
    assert encoder is not None
    return encoder if encoder.stem == "imagenet" and encoder.width == 1 else None


def _channels(weights: Weights) -> int:
    spec = weights.sample_spec
    assert spec is not None
    return spec.channels
