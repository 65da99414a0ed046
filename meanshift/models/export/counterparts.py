"""Networks of other programs that take the weights of a run as they are."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchvision import models

from meanshift.config import Encoder
from meanshift.models.encoder import torchvision_options
from meanshift.models.weights import Weights

TIMM_PREFIX = "timm:"
"""what the name of an encoder of timm begins with"""

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

    def call(self, function: str, **more: Any) -> str:
        """The Python code of a call that builds it."""
        arguments = {**self.arguments, **more}
        words = [literal(self.name), *(f"{name}={literal(arguments[name])}" for name in arguments)]
        return f"{function}({', '.join(words)})"


def literal(value: Any) -> str:
    """A value as Python code; a text is in double quotes."""
    is_text = isinstance(value, (str, Path))
    return json.dumps(str(value), ensure_ascii=False) if is_text else repr(value)


def in_torchvision(weights: Weights) -> Counterpart | None:
    """torchvision's network with exactly these parameters, beside its classifier."""
    encoder = _plain_encoder(weights)
    if encoder is None or encoder.name not in models.list_models(module=models):
        return None
    if _channels(weights) != 3:
        return None
    return Counterpart(encoder.name, torchvision_options(encoder.name, weights.image_size))


def in_timm(weights: Weights) -> Counterpart | None:
    """timm's network with exactly these parameters."""
    encoder = _plain_encoder(weights)
    if encoder is None:
        return None
    arguments: dict[str, Any] = {"num_classes": 0, "in_chans": _channels(weights)}
    if encoder.name in _SAME_NAMES:
        return Counterpart(encoder.name, arguments)
    if not encoder.name.startswith(TIMM_PREFIX):
        return None
    name = encoder.name.removeprefix(TIMM_PREFIX)
    if _has_size(name):
        arguments["img_size"] = weights.image_size
    return Counterpart(name, arguments)


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


def _plain_encoder(weights: Weights) -> Encoder | None:
    """The settings of a network without what only this program has."""
    encoder = weights.encoder
    assert encoder is not None
    own = encoder.stem != "imagenet" or encoder.width != 1 or encoder.output != "plain"
    return None if own else encoder


def _has_size(name: str) -> bool:
    """Whether a network of timm is built for one size of images."""
    from timm.models import get_pretrained_cfg  # there, as the network is one of timm's

    known = get_pretrained_cfg(name, allow_unregistered=True)
    return known is not None and bool(known.fixed_input_size)


def _channels(weights: Weights) -> int:
    spec = weights.sample_spec
    assert spec is not None
    return spec.channels
