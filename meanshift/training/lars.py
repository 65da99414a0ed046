"""LARS (You et al. 2017): SGD whose update of a layer is proportional to the layer's own norm."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class LARS(torch.optim.Optimizer):
    """SGD with momentum and one learning rate per layer, for large batches.

    As SimCLR, BYOL and Barlow Twins use it: the gradient of a weight, decay included, is scaled to
    `trust` times the norm of the weight. Groups with `adapt=False` (norms and biases) are plain
    SGD.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust": trust,
            "adapt": True,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                update = parameter.grad.add(parameter, alpha=group["weight_decay"])
                if group["adapt"]:
                    update *= _layer_scale(parameter, update, group["trust"])
                state = self.state[parameter]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                state["momentum_buffer"].mul_(group["momentum"]).add_(update)
                parameter.add_(state["momentum_buffer"], alpha=-group["lr"])


def _layer_scale(weight: Tensor, update: Tensor, trust: float) -> Tensor:
    """trust |weight| / |update|, or 1 where one of them is zero; does not wait for the device."""
    weight_norm = weight.norm()
    update_norm = update.norm()
    scale = trust * weight_norm / update_norm
    return torch.where((weight_norm > 0) & (update_norm > 0), scale, 1.0)
