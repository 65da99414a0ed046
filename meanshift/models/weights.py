"""Trained encoders in, from runs and from anybody's files, and ours out."""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from meanshift.config import Config
from meanshift.models import third_party
from meanshift.models.encoder import Encoder, build_backbone
from meanshift.runtime import checkpoint, rng
from meanshift.runtime.run_directory import RunDirectory, atomic_writer

_SIDE = 32  # of the images whose pixels are taken as they are
_OURS = "meanshift"  # the key under which an exported file keeps the settings of its run


class RawPixels(nn.Module):
    """No encoder: an image's pixels in one row, minus the mean of the training images."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3 * _SIDE * _SIDE))

    def center(self, mean: Float[Tensor, " pixels"]) -> None:
        self.mean = self.mean + mean.to(self.mean)

    def forward(self, images: Float[Tensor, "n 3 _ _"]) -> Float[Tensor, "n pixels"]:
        if images.shape[2:] != (_SIDE, _SIDE):
            images = F.interpolate(images, (_SIDE, _SIDE), mode="bilinear", antialias=True)
        return images.flatten(1) - self.mean


@dataclass(frozen=True)
class Weights:
    """A frozen backbone, what it is, and where its results belong."""

    spec: str
    """what a user types to name them"""
    backbone: nn.Module
    title: str
    image_size: int
    home: Path
    name: str = ""
    """added to the names of results when they are not those of a run's newest weights"""
    config: Config | None = None
    projector: nn.Module | None = None


def load_weights(spec: Path | str) -> Weights:
    """A run, one of its checkpoints, an exported encoder, anybody's file, or `torchvision:NAME`.

    Two baselines have names too: `untrained:RUN` is the encoder with which a run began, and
    `pixels` no encoder at all.
    """
    path, (kind, _, rest) = Path(spec), str(spec).partition(":")
    judged = Path("judged") / (re.sub(r"[^\w.-]+", "-", rest or path.stem) or "weights")
    if kind == "torchvision" and rest:
        found = third_party.from_torchvision(rest)
        return Weights(str(spec), found.backbone, found.title, found.image_size, judged)
    if kind == "untrained" and rest:
        return _untrained(Path(rest))
    if kind == "pixels" and not path.exists():
        return Weights("pixels", RawPixels(), f"raw pixels at {_SIDE}x{_SIDE}", _SIDE, judged)
    if not path.exists():
        raise ValueError(
            f"{path}: not found; need a run directory, a file of weights, torchvision:NAME, "
            f"untrained:RUN or pixels"
        )
    if path.is_dir():
        state, unreadable = checkpoint.latest(RunDirectory.open(path).checkpoints)
        if state is None:
            raise ValueError(f"{path}: no checkpoint yet; continue the run until it has saved one")
        for message in unreadable:
            warnings.warn(f"{message}; step {state['step']} is used instead", stacklevel=2)
        return _ours(state, path, path, "")
    held = third_party.read_file(path)
    if isinstance(held, Mapping) and isinstance(held.get("format"), int):  # others write words
        run = path.absolute().parent.parent
        inside = (run / "config.json").is_file()
        return _ours(held, path, run if inside else judged, path.stem if inside else "")
    if isinstance(held, Mapping) and _OURS in held:
        return _exported(held, path)
    found = third_party.recognize(held, path)
    size, projector, home = found.image_size, found.projector, _home(path, found.backbone)
    return Weights(str(spec), found.backbone, found.title, size, home, projector=projector)


def load_encoder(weights: Path | str) -> nn.Module:
    """The online backbone of a run (or of any file of weights), heads removed, in eval mode.

    >>> backbone = load_encoder("runs/demo")
    >>> features = backbone(images)      # normalized as ImageNet's, shape (n, 3, height, width)
    """
    return load_weights(weights).backbone


def export(weights: Weights, out: Path) -> Path:
    """Write the backbone alone, with torchvision's names, for other programs (and for this one)."""
    if weights.config is None:
        raise ValueError("export: need a run directory or one of its checkpoints")
    state = {k: v.contiguous() for k, v in weights.backbone.state_dict().items()}
    told = json.dumps({"title": weights.title, "config": weights.config.to_dict()})
    if out.suffix not in (".safetensors", ".pt", ".pth"):
        raise ValueError(f"{out}: need a name that ends in .safetensors, .pt or .pth")
    if out.suffix == ".safetensors":
        from safetensors.torch import save

        with atomic_writer(out) as file:
            file.write(save(state, {_OURS: told}))
    else:
        checkpoint.write(out, {"state_dict": state, _OURS: told})
    return out


def fingerprint(network: nn.Module) -> str:
    """A short name for exactly these weights, with the strides that leave no trace in them."""
    digest = hashlib.sha256()
    for name, module in network.named_modules():
        told = [getattr(module, at, None) for at in ("stride", "padding", "transform_input")]
        digest.update(f"{name} {told}".encode())
    for name, tensor in sorted(network.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def _ours(state: Mapping[str, Any], path: Path, home: Path, name: str) -> Weights:
    if state["format"] != checkpoint.FORMAT or "method" not in state:
        raise ValueError(
            f"{path}: holds no whole model; need a run directory or its checkpoints/*.pt"
        )
    config = Config.from_dict(state["config"])
    encoder = Encoder(config.encoder, dim=config.method.dim, image_size=config.data.image_size)
    online = {
        k.removeprefix("online."): v for k, v in state["method"].items() if k.startswith("online.")
    }
    encoder.load_state_dict(online)
    encoder.eval()
    title, size = f"{_describe(config)}, step {state['step']}", config.data.image_size
    return Weights(str(path), encoder.backbone, title, size, home, name, config, encoder.projector)


def _untrained(run: Path) -> Weights:
    config = RunDirectory.open(run).config
    with torch.random.fork_rng(devices=[]):  # as training begins: see `train.build_method`
        torch.manual_seed(rng.derive_seed(config.train.seed, 0, rng.INITIAL))
        encoder = Encoder(config.encoder, dim=config.method.dim, image_size=config.data.image_size)
    title, size = f"{_describe(config)}, before its first step", config.data.image_size
    name, encoder = f"untrained:{run}", encoder.eval()
    return Weights(name, encoder.backbone, title, size, run, "untrained", config, encoder.projector)


def _home(path: Path, backbone: nn.Module) -> Path:
    """Where the results of a file belong: many files are called checkpoint.pth."""
    return Path("judged") / f"{path.stem}-{fingerprint(backbone)[:6]}"


def _exported(held: Mapping[str, Any], path: Path) -> Weights:
    told = json.loads(held[_OURS])
    config = Config.from_dict(told["config"])
    backbone, _ = build_backbone(config.encoder, image_size=config.data.image_size)
    state = held.get("state_dict", {k: v for k, v in held.items() if isinstance(v, torch.Tensor)})
    try:
        backbone.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(f"{path}: not a whole exported encoder ({error})") from None
    title = f"exported by meanshift, {told['title']}"
    size, home = config.data.image_size, _home(path, backbone)
    return Weights(str(path), backbone.eval(), title, size, home, config=config)


def _describe(config: Config) -> str:
    settings = config.encoder
    stem = "" if settings.stem == "imagenet" else f", {settings.stem} stem"
    wide = "" if settings.width == 1 else f", width {settings.width:g}"
    return f"our {config.method.name}, {settings.name}{stem}{wide}"
