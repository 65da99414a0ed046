"""Projectors and predictors: linear layers with batch norm and ReLU between them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn


def head(
    sizes: Sequence[int],
    *,
    batch_norm: bool = True,
    last_batch_norm: bool = False,
    last_affine: bool = True,
    bias: bool = True,
) -> nn.Sequential:
    """Build a head of linear layers of these sizes, with a ReLU after each but the last.

    `batch_norm` stands before each ReLU, `last_batch_norm` behind the last layer, with a weight and
    a bias if `last_affine`. `bias` is that of all linear layers.

    >>> head([2048, 2048, 128], batch_norm=False)  # MoCo v2
    """
    layers: list[nn.Module] = []
    last = len(sizes) - 2
    for number, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
        layers.append(nn.Linear(inputs, outputs, bias=bias))
        if last_batch_norm if number == last else batch_norm:
            layers.append(nn.BatchNorm1d(outputs, affine=number < last or last_affine))
        if number < last:
            layers.append(nn.ReLU(inplace=True))
    return nn.Sequential(*layers)


def mlp(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    """Build the paper's projector or predictor: linear layer, batch norm, ReLU, linear layer."""
    return head([inputs, hidden, outputs])


def mlp_from_state(state: Mapping[str, Tensor]) -> nn.Sequential | None:
    """Rebuild a head of linear layers, batch norms and ReLUs from its state dict.

    Layers without a state are ReLUs. The result is None if the state is not that of such a head.
    """
    layers: dict[str, dict[str, Tensor]] = {}
    for key, value in state.items():
        index, _, name = key.partition(".")
        layers.setdefault(index, {})[name] = value
    first = state.get("0.weight")
    if first is None or first.ndim != 2 or not all(index.isdecimal() for index in layers):
        return None
    count = 1 + max(map(int, layers))
    head = nn.Sequential(*(_layer_from_state(layers.get(str(i), {})) for i in range(count)))
    try:
        head.load_state_dict(state)
        head.eval()(torch.zeros(1, first.shape[1]))
    except (RuntimeError, ValueError):  # other layers, or widths that do not fit each other
        return None
    return head.train()


def _layer_from_state(state: Mapping[str, Tensor]) -> nn.Module:
    if not state:
        return nn.ReLU(inplace=True)
    if "running_mean" in state:
        return nn.BatchNorm1d(len(state["running_mean"]), affine="weight" in state)
    weight = state.get("weight", torch.empty(0))
    if weight.ndim != 2:
        return nn.Identity()  # does not accept the state
    return nn.Linear(weight.shape[1], weight.shape[0], bias="bias" in state)
