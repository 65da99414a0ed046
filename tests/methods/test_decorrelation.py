"""The variance and covariance terms against their formulas, and what they do in a step."""

import pytest
import torch
from torch import Tensor

from meanshift.methods.base import StepOutput
from meanshift.methods.decorrelation import Decorrelation, variance_and_covariance
from meanshift.methods.msf import MeanShift


def naive_terms(rows: Tensor) -> tuple[float, float]:
    """The formulas of the paper, dimension by dimension."""
    count, dim = rows.shape
    centered = rows - rows.mean(0)
    variance = sum(max(0.0, 1 - float((centered[:, j].var() + 1e-4).sqrt())) for j in range(dim))
    covariance = sum(
        float(centered[:, i] @ centered[:, j] / (count - 1)) ** 2
        for i in range(dim)
        for j in range(dim)
        if i != j
    )
    return variance / dim, covariance / dim


def test_terms_match_the_formulas() -> None:
    rows = torch.randn(30, 5, generator=torch.Generator().manual_seed(0)).double()
    rows[:, 1] += rows[:, 0]
    rows[:, 2] *= 0.1
    low, correlated = variance_and_covariance(rows)
    assert (float(low), float(correlated)) == pytest.approx(naive_terms(rows))


def test_terms_are_zero_for_white_rows_and_not_for_constant_ones() -> None:
    white = 3 * torch.cat([torch.eye(8), -torch.eye(8)])
    low, correlated = variance_and_covariance(white)
    assert float(low) == pytest.approx(0, abs=1e-6)
    assert float(correlated) == pytest.approx(0, abs=1e-6)
    low, correlated = variance_and_covariance(torch.ones(16, 8))
    assert float(low) == pytest.approx(0.99)


def test_gradient_spreads_rows_that_collapsed() -> None:
    generator = torch.Generator().manual_seed(1)
    rows = (torch.ones(64, 6) + 0.01 * torch.randn(64, 6, generator=generator)).requires_grad_()
    penalty = Decorrelation(1.0, 0.04)
    optimizer = torch.optim.SGD([rows], lr=10.0)
    for _ in range(200):
        output = penalty.add_to(StepOutput(torch.zeros(()), rows.detach()), rows)
        optimizer.zero_grad()
        output.loss.backward()
        optimizer.step()
    assert float(rows.detach().std(0).min()) > 0.9


def test_without_weights_a_step_is_the_papers() -> None:
    encoder = torch.nn.Linear(12, 4)
    views = torch.randn(2, 8, 12, generator=torch.Generator().manual_seed(2))
    losses = {}
    for weight in (0.0, 1.0):
        torch.manual_seed(0)
        method = MeanShift(encoder, 4, k=1, variance=weight, covariance=0.04 * weight)
        output = method(views[0], views[1])
        losses[weight] = float(output.loss.detach())
        assert ("decorrelation" in output.metrics) == (weight > 0)
    low, correlated = variance_and_covariance(encoder(views[0]))
    assert losses[1.0] == pytest.approx(losses[0.0] + float((low + 0.04 * correlated).detach()))


def test_symmetric_loss_decorrelates_both_views() -> None:
    encoder = torch.nn.Linear(12, 4)
    a, b = torch.randn(2, 8, 12, generator=torch.Generator().manual_seed(3))
    method = MeanShift(encoder, 4, k=1, variance=1.0, covariance=0.5, symmetric=True)
    expected = sum(
        float((low + 0.5 * correlated).detach())
        for low, correlated in (variance_and_covariance(encoder(view)) for view in (a, b))
    )
    mean, _ = method(a, b).metrics["decorrelation"]
    assert float(mean) == pytest.approx(expected / 2)
