"""Whether a network takes samples of a shape: a pass over a sample of zeros, before training."""

from __future__ import annotations

import torch
from torch import nn


class InputRefused(ValueError):
    """A network does not take samples of a shape."""

    def __init__(self, reason: Exception | str) -> None:
        text = str(reason).strip().partition("\n")[0].rstrip(".")
        kind = type(reason).__name__ if isinstance(reason, Exception) else ""
        super().__init__(": ".join(filter(None, [kind, text])))


@torch.no_grad()
def count_features(network: nn.Module, shape: tuple[int, ...]) -> int:
    """The number of features that a network has for samples of a shape, or `InputRefused`."""
    modes = {module: module.training for module in network.modules()}
    network.eval()
    first = next(network.parameters(), torch.empty(0))
    try:
        features = network(torch.zeros(1, *shape, device=first.device))
    except Exception as error:  # each network fails in its own way
        raise InputRefused(error) from None
    finally:
        for module, training in modes.items():
            module.training = training
    if features.ndim != 2:
        raise InputRefused(f"its output has the shape {tuple(features.shape)}, need one row each")
    return int(features.shape[1])


def check_image_size(network: nn.Module, *, channels: int, image_size: int, error: str) -> None:
    """Raise `error` if a network does not take square images of a size, with its own reason."""
    try:
        count_features(network, (channels, image_size, image_size))
    except InputRefused as refused:
        raise ValueError(f"{error} ({refused})") from None
