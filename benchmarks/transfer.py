"""The path of 45 penalties against 45 fits of scikit-learn, and whose losses are lower."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor
from torch.nn import functional as F

from meanshift.ops.logistic_regression import PENALTIES, Layer, Problem
from meanshift.reproduce.laps import Laps


def bench_transfer(
    *, rounds: int, images: int = 3_000, width: int = 2_048, classes: int = 102
) -> str:
    """Features like a network's: not negative, in correlated classes that overlap."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    if rounds < 1:
        raise ValueError(f"--rounds: got {rounds}, need 1 or more")
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(images) % classes
    hidden = torch.randn(classes, 64, generator=generator)[labels]
    hidden += 1.5 * torch.randn(images, 64, generator=generator)
    mixed = hidden @ torch.randn(64, width, generator=generator) / 8
    features = (mixed + 0.5 * torch.randn(images, width, generator=generator)).relu() / 2
    laps, fits, stopped = Laps(), dict[str, list[Layer]](), 0

    def ours() -> None:
        fits["ours"] = list(Problem(features, labels, classes=classes).path())

    def theirs() -> None:
        nonlocal stopped
        fits["theirs"], stopped = [], 0
        for penalty in PENALTIES:
            fit = LogisticRegression(C=1 / penalty)
            with warnings.catch_warnings(record=True) as raised:
                warnings.simplefilter("always", ConvergenceWarning)
                fit.fit(features.numpy(), labels.numpy())
            stopped += bool(raised)
            weight, bias = (torch.from_numpy(held).float() for held in (fit.coef_, fit.intercept_))
            fits["theirs"].append(Layer(weight, bias, penalty, 0.0, True))

    for _ in range(rounds):
        laps.time("ours", ours)
        laps.time("theirs", theirs)
    took = laps.medians()
    pairs = zip(fits["ours"], fits["theirs"], strict=True)
    apart = [_loss(a, features, labels) / _loss(b, features, labels) - 1 for a, b in pairs]
    return "\n".join(
        [
            f"{images} x {width} features, {classes} classes, {len(PENALTIES)} penalties from "
            f"{PENALTIES[0]:g} to {PENALTIES[-1]:g}, {torch.get_num_threads()} threads, median of "
            f"{rounds} rounds",
            "",
            f"  scikit-learn's fits / our path                {took['theirs'] / took['ours']:8.1f}",
            f"  our loss / theirs at the same penalty         {1 + min(apart):8.2g} to 1 + "
            f"{max(apart):.1e}",
            f"  fits that scikit-learn's 100 iterations ended {stopped:8d}",
        ]
    )


def _loss(layer: Layer, features: Tensor, labels: Tensor) -> float:
    """In float64: of either, by one rule."""
    weight, bias = layer.weight.double(), layer.bias.double()
    scores = torch.addmm(bias, features.double(), weight.T)
    fit = F.cross_entropy(scores, labels, reduction="sum")
    return float(fit + layer.penalty / 2 * weight.square().sum())
