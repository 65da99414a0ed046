"""Features whitened by what changes between the views of an image.

Two views of an image differ in what a representation should ignore. A linear layer behind the
backbone weakens the directions in which their features differ. It is fitted, not trained, and needs
no labels: it is the whitening of linear discriminant analysis with every image as a class of its
own. This is ours, not the paper's; the effect is in docs/experiments.md.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor, nn

SHRINKAGE = 1.0
"""fraction of the mean variance that is added to the variance of each direction"""


class ViewWhitening(nn.Module):
    """A backbone and the fitted layer; before `fit` the layer does nothing."""

    mean: Float[Tensor, " features"]
    matrix: Float[Tensor, "features features"]

    def __init__(self, network: nn.Module, features: int) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("matrix", torch.eye(features))

    def forward(self, images: Tensor) -> Float[Tensor, "batch features"]:
        features: Tensor = self.network(images)
        with torch.autocast(features.device.type, enabled=False):
            return (features.float() - self.mean) @ self.matrix

    @torch.no_grad()
    def fit(
        self, features: Float[Tensor, "n features"], differences: Float[Tensor, "m features"]
    ) -> None:
        """Center by the mean of `features`, and whiten by the covariance of `differences`.

        The inverse of a Cholesky factor whitens as the inverse square root does: both differ by a
        rotation, which changes no distance and no cosine.
        """
        covariance = differences.double().mT @ differences.double() / (2 * len(differences))
        covariance.diagonal().add_(SHRINKAGE * covariance.diagonal().mean() + 1e-12)
        identity = torch.eye(len(covariance), dtype=covariance.dtype, device=covariance.device)
        factor = torch.linalg.cholesky(covariance)
        matrix = torch.linalg.solve_triangular(factor, identity, upper=False).mT
        self.mean.copy_(features.mean(0))
        self.matrix.copy_(matrix)


def as_classifier(whitening: ViewWhitening, layer: str) -> dict[str, Tensor]:
    """The state of the network alone with its classifier `layer` as the whitening.

    Networks of other programs have such a linear layer, and no whitening.
    """
    bias = -(whitening.mean.double() @ whitening.matrix.double())
    return {
        **whitening.network.state_dict(),
        f"{layer}.weight": whitening.matrix.mT,
        f"{layer}.bias": bias.to(whitening.mean.dtype),
    }


def from_classifier(
    state: Mapping[str, Tensor], layer: str, mean: Float[Tensor, " features"]
) -> dict[str, Tensor]:
    """The state of a `ViewWhitening` from that of `as_classifier`, with its own mean: exactly."""
    own = {f"{layer}.weight", f"{layer}.bias"}
    network = {f"network.{name}": state[name] for name in state if name not in own}
    return {**network, "mean": mean, "matrix": state[f"{layer}.weight"].mT}


def without_whitening(backbone: nn.Module) -> nn.Module:
    """The network whose features a projector takes and a detector is built from."""
    return backbone.network if isinstance(backbone, ViewWhitening) else backbone
