"""The weighted mean of neighbors against a loop."""

import pytest
import torch

from meanshift.methods.msf import MeanShift
from meanshift.methods.neighbor_weight import mean_neighbor


@pytest.mark.parametrize("k", [1, 2, 5])
def test_mean_neighbor_matches_a_loop(k: int) -> None:
    z = torch.randn(3, k, 4, generator=torch.Generator().manual_seed(k))
    for weight in (0.0, 0.25, 1.0):
        shares = [1 / k] * k if weight == 0 else [1 - weight] + [weight / max(1, k - 1)] * (k - 1)
        if k == 1:
            shares = [1.0]
        expected = sum(share * z[:, i] for i, share in enumerate(shares))
        torch.testing.assert_close(mean_neighbor(z, weight), expected)


def test_neighbor_weight_of_four_fifths_is_the_papers_mean_of_five() -> None:
    views = torch.randn(2, 16, 12, generator=torch.Generator().manual_seed(0))
    losses = []
    for weight in (0.0, 0.8, 0.25):
        torch.manual_seed(0)
        method = MeanShift(torch.nn.Linear(12, 4), 4, k=5, bank_size=64, neighbor_weight=weight)
        losses.append(float(method(views[0], views[1]).loss.detach()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert losses[0] != pytest.approx(losses[2], rel=1e-3)
