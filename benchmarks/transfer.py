"""The path of 45 penalties against 45 fits of scikit-learn: time, and which losses are lower."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor
from torch.nn import functional as F

from meanshift.ops.logistic_regression import PENALTIES, LinearClassifier, LogisticRegression
from meanshift.reproduce.cost import PhaseTimer


def measure_transfer(
    *, rounds: int, images: int = 3_000, width: int = 2_048, classes: int = 102
) -> str:
    """The ratio of times and the range of losses, as text."""
    features, labels = _features(images, width, classes)
    timer = PhaseTimer()
    fits: dict[str, list[LinearClassifier]] = {}
    stopped_early: list[bool] = []

    def ours() -> None:
        fits["ours"] = list(LogisticRegression(features, labels, classes=classes).path())

    def theirs() -> None:
        fits["theirs"] = []
        stopped_early.clear()
        for penalty in PENALTIES:
            layer, stopped = _fit_scikit_learn(features, labels, penalty)
            fits["theirs"].append(layer)
            stopped_early.append(stopped)

    for _ in range(rounds):
        timer.time("ours", ours)
        timer.time("theirs", theirs)
    seconds = timer.medians()
    pairs = zip(fits["ours"], fits["theirs"], strict=True)
    excess = [_loss(a, features, labels) / _loss(b, features, labels) - 1 for a, b in pairs]
    ratio = seconds["theirs"] / seconds["ours"]
    return "\n".join(
        [
            f"{images} x {width} features, {classes} classes, {len(PENALTIES)} penalties from "
            f"{PENALTIES[0]:g} to {PENALTIES[-1]:g}, {torch.get_num_threads()} threads, median of "
            f"{rounds} rounds",
            "",
            f"  scikit-learn's fits / our path                {ratio:8.1f}",
            f"  our loss / theirs at the same penalty         {1 + min(excess):8.2g} to 1 + "
            f"{max(excess):.1e}",
            f"  fits that scikit-learn's 100 iterations ended {sum(stopped_early):8d}",
        ]
    )


def _features(images: int, width: int, classes: int) -> tuple[Tensor, Tensor]:
    """Features like a network's: not negative, in correlated classes that overlap."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(images) % classes
    hidden = torch.randn(classes, 64, generator=generator)[labels]
    hidden += 1.5 * torch.randn(images, 64, generator=generator)
    mixed = hidden @ torch.randn(64, width, generator=generator) / 8
    features = (mixed + 0.5 * torch.randn(images, width, generator=generator)).relu() / 2
    return features, labels


def _fit_scikit_learn(
    features: Tensor, labels: Tensor, penalty: float
) -> tuple[LinearClassifier, bool]:
    """A fit, and whether it stopped before it converged."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression as ScikitLearn

    fit = ScikitLearn(C=1 / penalty)
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always", ConvergenceWarning)
        fit.fit(features.numpy(), labels.numpy())
    weight = torch.from_numpy(fit.coef_).float()
    bias = torch.from_numpy(fit.intercept_).float()
    return LinearClassifier(weight, bias, penalty, 0.0, True), bool(raised)


def _loss(layer: LinearClassifier, features: Tensor, labels: Tensor) -> float:
    """The objective of either fit, in float64."""
    weight = layer.weight.double()
    bias = layer.bias.double()
    scores = torch.addmm(bias, features.double(), weight.T)
    fit = F.cross_entropy(scores, labels, reduction="sum")
    return float(fit + layer.penalty / 2 * weight.square().sum())
