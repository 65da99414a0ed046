"""Trained backbones out of run directories and checkpoints."""

from __future__ import annotations

import hashlib
import warnings
from pathlib import Path
from typing import Any

from torch import nn

from meanshift import checkpoint
from meanshift.config import Config
from meanshift.encoder import Encoder
from meanshift.journal import Journal


def load_encoder(run: Path | str) -> nn.Module:
    """The online backbone of a run (or of one of its checkpoints), heads removed, in eval mode.

    >>> backbone = load_encoder("runs/demo")
    >>> features = backbone(pictures)      # normalised as ImageNet's, shape (n, 3, height, width)
    """
    state = _state(Path(run))
    config = Config.from_dict(state["config"])
    encoder = Encoder(config.encoder, dim=config.method.dim, image_size=config.data.image_size)
    prefix = "online."
    weights = {
        k.removeprefix(prefix): v for k, v in state["method"].items() if k.startswith(prefix)
    }
    encoder.load_state_dict(weights)
    return encoder.backbone.eval()


def run_of(weights: Path | str) -> tuple[Path, Config]:
    """The run directory that a RUN or one of its checkpoint files belongs to, and its config."""
    path = Path(weights)
    _need_there(path)
    folder = path if path.is_dir() else path.parent.parent
    return folder, Journal.open(folder).config


def fingerprint(network: nn.Module) -> str:
    """A short name for exactly these weights."""
    digest = hashlib.sha256()
    for name, tensor in sorted(network.state_dict().items()):
        digest.update(name.encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def _state(path: Path) -> dict[str, Any]:
    _need_there(path)
    if path.is_dir():
        state, unreadable = checkpoint.latest(Journal.open(path).checkpoints)
        if state is None:
            raise ValueError(f"{path}: no checkpoint yet; continue the run until it has saved one")
        for message in unreadable:
            warnings.warn(f"{message}; step {state['step']} is used instead", stacklevel=3)
    else:
        state = checkpoint.read(path)
    if "method" not in state:
        raise ValueError(
            f"{path}: holds no whole model; need a run directory or its checkpoints/*.pt"
        )
    return state


def _need_there(path: Path) -> None:
    if not path.exists():
        raise ValueError(f"{path}: not found; need a run directory or a checkpoint file")
