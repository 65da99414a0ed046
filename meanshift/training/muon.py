"""Muon (Jordan et al. 2024): orthogonalized updates of matrices, and AdamW for the rest."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor


class Muon(torch.optim.Optimizer):
    """Muon for groups with `matrices=True`, AdamW for the others; one state dict for both.

    A convolution is a matrix with a row per filter. Updates are scaled to the size of AdamW's
    (0.2 sqrt(longer side), as Moonshot does), so that one learning rate serves both.
    `torch.optim.Muon` accepts only 2-D parameters, and always computes in bfloat16, which takes 20
    times as long on a CPU without native bfloat16 (docs/experiments.md).
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float,
        *,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "matrices": False}
        super().__init__(params, defaults)
        # Fills in AdamW's options in the groups, which both optimizers share.
        others = self._other_groups() or [{"params": []}]
        self._adamw = torch.optim.AdamW(others, betas=(momentum, 0.999), fused=True)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            if group["matrices"]:
                for weight in group["params"]:
                    if weight.grad is not None:
                        self._update_matrix(weight, group)
        self._adamw.param_groups = self._other_groups()  # `load_state_dict` makes new ones
        self._adamw.state = self.state
        self._adamw.step()

    def _update_matrix(self, weight: Tensor, group: dict[str, Any]) -> None:
        """Nesterov momentum, orthogonalized, with decoupled weight decay."""
        gradient = weight.grad
        assert gradient is not None
        state = self.state[weight]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(weight)
        average = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        matrix = gradient.lerp(average, group["momentum"]).flatten(1)
        size = 0.2 * math.sqrt(max(matrix.shape))
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.add_(orthogonalize(matrix).view(weight.shape), alpha=-group["lr"] * size)

    def _other_groups(self) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if not group["matrices"]]


def orthogonalize(matrix: Float[Tensor, "m n"], iterations: int = 5) -> Float[Tensor, "m n"]:
    """Move all singular values close to 1 (about 0.7 to 1.2) by Newton-Schulz iterations.

    An iteration is X <- (a + b G + c G^2) X with G = X X^T, and the coefficients are Muon's. All of
    its factors are polynomials of the first G, so only small square matrices are multiplied until
    the end.
    """
    wide = matrix if len(matrix) <= matrix.shape[1] else matrix.T
    wide = wide / wide.norm().clamp(min=1e-7)
    gram = wide @ wide.T
    identity = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    product = factor = _factor(gram, identity)
    for _ in range(iterations - 1):
        gram = factor @ gram @ factor
        factor = _factor(gram, identity)
        product = factor @ product
    result: Tensor = product @ wide
    return result if len(matrix) <= matrix.shape[1] else result.T


def _factor(gram: Tensor, identity: Tensor) -> Tensor:
    """The factor a + b G + c G^2 of one iteration."""
    factor: Tensor = torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
    factor.add_(identity, alpha=3.4445)
    return factor
