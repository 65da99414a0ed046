"""timm's networks as backbones: `timm:NAME`, without a classifier, with pooled features."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meanshift.config.parsing import close
from meanshift.config.samples import SampleSpec
from meanshift.models.input_check import InputRefused, count_features
from meanshift.runtime.extras import require

PREFIX = "timm:"
"""how the name of an encoder of timm begins"""


@dataclass(frozen=True)
class Pretrained:
    """Weights that timm knows, and the input that they were trained with."""

    name: str
    """of the network, without a tag"""
    tag: str
    image_size: int
    samples: SampleSpec
    available: bool
    """whether timm can download them"""

    @property
    def title(self) -> str:
        return ".".join(filter(None, [self.name, self.tag]))


def is_timm(name: str) -> bool:
    """Whether the name of an encoder means one of timm's networks."""
    return name.startswith(PREFIX)


def build(name: str, *, image_size: int, channels: int) -> tuple[nn.Module, int]:
    """Build an untrained network of timm; return it and its number of features.

    `name` is with the prefix. Images that the network does not take are an error.
    """
    timm = _require_timm()
    network = name.removeprefix(PREFIX)
    base, _, tag = network.partition(".")
    _check_network(base)
    if tag:
        raise ValueError(
            f"encoder.name: {name} names weights; type --encoder.weights {name} to start from "
            f"them, or --encoder.name {PREFIX}{base} for random ones"
        )
    try:
        return _create(timm, network, image_size, channels)
    except InputRefused as refused:
        raise ValueError(_advice(timm, network, image_size, channels, refused)) from None


def find_pretrained(spec: str) -> Pretrained:
    """What timm knows about weights, by `NAME` or `NAME.TAG`; a network may have none."""
    _require_timm()
    from timm.models import get_pretrained_cfg, list_pretrained

    name, _, tag = spec.partition(".")
    _check_network(name)
    tags = [each.partition(".")[2] for each in list_pretrained(f"{name}.*")]
    known = get_pretrained_cfg(spec, allow_unregistered=True) if not tag or tag in tags else None
    if tag and known is None:
        choices = ", ".join(f"{PREFIX}{name}.{each}" for each in tags) or "none"
        raise ValueError(f"{PREFIX}{spec}: timm has no such weights; it has {choices}")
    size = (3, 224, 224) if known is None else known.input_size
    samples = SampleSpec()
    if known is not None:
        samples = SampleSpec(channels=size[0], mean=tuple(known.mean), std=tuple(known.std))
    return Pretrained(
        name=name,
        tag="" if known is None else known.tag or "",
        image_size=size[-1],
        samples=samples,
        available=known is not None and bool(known.has_weights),
    )


def load_pretrained(weights: Pretrained) -> nn.Module:
    """Download weights, or take them from the cache, with timm's own loading."""
    timm = _require_timm()
    if not weights.available:
        raise ValueError(
            f"{PREFIX}{weights.name}: timm has no weights for it; type "
            f"{PREFIX}{weights.name}=FILE for a file of yours, or --encoder.name "
            f"{PREFIX}{weights.name} to train it from random ones"
        )
    try:
        network: nn.Module = timm.create_model(weights.title, pretrained=True, num_classes=0)
    except Exception as error:  # unreachable, truncated, or other weights than expected
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        raise ValueError(
            f"{PREFIX}{weights.title}: the download failed ({reason}); type "
            f"{PREFIX}{weights.title}=FILE for a file that is here"
        ) from None
    return network.eval()


def resize_input(network: nn.Module, image_size: int) -> bool:
    """Let a network that has a size take another one; whether it can.

    timm interpolates its position embeddings or the like.
    """
    resize = getattr(network, "set_input_size", None)
    if resize is None:
        return False
    try:
        resize(img_size=(image_size, image_size))
    except Exception:  # not every network of timm takes every size
        return False
    return True


def has_activation(norm: nn.Module) -> bool:
    """Whether a batch norm is that of timm, which also applies `drop` and `act`."""
    return type(norm).__name__ == "BatchNormAct2d"


def _require_timm() -> Any:
    require("timm", extra="timm", what="encoders named timm:NAME")
    import timm

    return timm


def _check_network(name: str) -> None:
    """Refuse a name that timm does not know."""
    from timm.models import is_model, list_models

    if not is_model(name):
        near = close(name, list_models(), [])
        there = " or ".join(f"{PREFIX}{each}" for each in near.split(" or ") if each)
        raise ValueError(
            f"{PREFIX}{name}: timm has no such network; need "
            f"{there or 'one of its names, such as timm:resnet18 or timm:convnext_atto'}"
        )


def _create(timm: Any, name: str, image_size: int, channels: int) -> tuple[nn.Module, int]:
    options = {"img_size": image_size} if _has_size(name) else {}
    try:
        network = timm.create_model(name, num_classes=0, in_chans=channels, **options)
    except Exception as error:  # each network fails in its own way
        raise InputRefused(error) from None
    patches = getattr(getattr(network, "patch_embed", None), "proj", None)
    if isinstance(patches, nn.Conv2d) and patches.kernel_size == patches.stride:
        side = patches.stride[0]
        if image_size % side:  # it would ignore the border
            raise InputRefused(f"it is no multiple of its patches of {side} pixels")
    return network, count_features(network, (channels, image_size, image_size))


def _has_size(name: str) -> bool:
    """Whether a network is built for one size of images."""
    from timm.models import get_pretrained_cfg

    known = get_pretrained_cfg(name, allow_unregistered=True)
    return known is not None and bool(known.fixed_input_size)


def _advice(timm: Any, name: str, image_size: int, channels: int, refused: InputRefused) -> str:
    """The error for images that a network does not take: what it takes, and what to type."""

    def takes(size: int, channels: int) -> bool:
        try:
            with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                _create(timm, name, size, channels)
        except InputRefused:
            return False
        return True

    if channels != 3 and takes(image_size, 3):
        return (
            f"data.channels: got {channels}, but {PREFIX}{name} takes 3 channels only ({refused}); "
            f"type --data.channels 3, or choose another encoder.name"
        )
    own = find_pretrained(name).image_size
    multiples = range(max(32, image_size // 32 * 32), min(own, image_size + 97), 32)
    near = next((size for size in multiples if takes(size, channels)), own)
    return (
        f"data.image_size: got {image_size}, which {PREFIX}{name} does not take ({refused}); type "
        f"--data.image_size {near}, or choose another encoder.name"
    )
