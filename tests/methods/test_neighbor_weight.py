"""The weighted mean of neighbors against a loop."""

import pytest
import torch

from meanshift.methods.msf import MeanShift
from meanshift.methods.neighbor_weight import mean_neighbor, most_similar


@pytest.mark.parametrize("k", [1, 2, 5])
def test_mean_neighbor_matches_a_loop(k: int) -> None:
    z = torch.randn(3, k, 4, generator=torch.Generator().manual_seed(k))
    for weight in (0.0, 0.25, 1.0):
        shares = [1 / k] * k if weight == 0 else [1 - weight] + [weight / max(1, k - 1)] * (k - 1)
        if k == 1:
            shares = [1.0]
        expected = sum(share * z[:, i] for i, share in enumerate(shares))
        torch.testing.assert_close(mean_neighbor(z, weight), expected)


@pytest.mark.parametrize("fraction", [0.1, 0.25, 0.5])
@pytest.mark.parametrize("weight", [0.0, 0.25])
def test_the_target_replaces_all_but_the_most_similar_neighbors(weight, fraction) -> None:
    z = torch.nn.functional.normalize(torch.randn(10, 5, 8, generator=torch.Generator()), dim=2)
    pairs = [(float(z[i, 0] @ z[i, j]), i, j) for i in range(10) for j in range(1, 5)]
    counted = {(i, j) for _, i, j in sorted(pairs, reverse=True)[: round(fraction * 40)]}
    replaced = z.clone()
    for i in range(10):
        for j in range(1, 5):
            if (i, j) not in counted:
                replaced[i, j] = z[i, 0]
    expected = mean_neighbor(replaced, weight)
    torch.testing.assert_close(mean_neighbor(z, weight, fraction), expected)
    assert not torch.allclose(mean_neighbor(z, weight), expected)


def test_at_least_one_neighbor_counts() -> None:
    z = torch.nn.functional.normalize(torch.randn(3, 2, 4, generator=torch.Generator()), dim=2)
    assert most_similar(z, 1e-9).sum() == 1
    assert torch.equal(mean_neighbor(z[:, :1], 0.25, 0.5), z[:, 0])


def test_a_step_uses_the_fraction() -> None:
    views = torch.randn(2, 16, 12, generator=torch.Generator().manual_seed(0))
    losses = []
    for options in ({}, {"neighbor_fraction": 1.0}, {"neighbor_fraction": 0.25}, {"k": 1}):
        torch.manual_seed(0)
        kwargs = {"k": 5, "bank_size": 64, **options}
        method = MeanShift(torch.nn.Linear(12, 4), 4, **kwargs)
        losses.append(float(method(views[0], views[1]).loss.detach()))
    assert losses[0] == losses[1]
    assert len(set(losses)) == 3


def test_neighbor_weight_of_four_fifths_is_the_papers_mean_of_five() -> None:
    views = torch.randn(2, 16, 12, generator=torch.Generator().manual_seed(0))
    losses = []
    for weight in (0.0, 0.8, 0.25):
        torch.manual_seed(0)
        method = MeanShift(torch.nn.Linear(12, 4), 4, k=5, bank_size=64, neighbor_weight=weight)
        losses.append(float(method(views[0], views[1]).loss.detach()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert losses[0] != pytest.approx(losses[2], rel=1e-3)
