"""The label-free signs where the answer is known, and the alarm on both sides of its line."""

import pytest
import torch

from meanshift.ops.collapse import collapse_warning, effective_rank, neighbor_stability, spread


def opposite_pairs(dim):
    """Every axis both ways: mean 0 and the same energy in each direction."""
    return torch.cat([torch.eye(dim), -torch.eye(dim)])


@pytest.mark.parametrize("dim", [2, 5, 16])
def test_rank_of_an_even_spectrum_is_the_dimension(dim):
    assert effective_rank(opposite_pairs(dim)) == pytest.approx(dim, rel=1e-4)


def test_rank_of_one_direction_is_one():
    line = torch.linspace(-1, 1, 9)[:, None] * torch.tensor([[1.0, 2.0, 3.0]])
    assert effective_rank(line) == pytest.approx(1, rel=1e-4)


def test_rank_does_not_count_the_mean():
    assert effective_rank(opposite_pairs(4) + 100) == pytest.approx(4, rel=1e-3)


def test_rank_of_an_uneven_spectrum_is_exp_entropy():
    scaled = opposite_pairs(2) * torch.tensor([3.0, 1.0])
    entropy = -(0.9 * torch.tensor(0.9).log() + 0.1 * torch.tensor(0.1).log())
    assert effective_rank(scaled) == pytest.approx(float(entropy.exp()), rel=1e-4)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_rank_of_a_constant_is_zero(value):
    assert effective_rank(torch.full((8, 4), value)) == 0


def test_rank_of_half_precision_embeddings():
    assert effective_rank(opposite_pairs(6).half()) == pytest.approx(6, rel=1e-3)


def test_spread_is_zero_when_all_coincide_and_one_around_the_origin():
    one = torch.nn.functional.normalize(torch.ones(1, 5)).expand(7, 5)
    assert spread(one) == pytest.approx(0, abs=1e-3)
    assert spread(opposite_pairs(5)) == pytest.approx(1)


def test_spread_between_is_what_the_mean_leaves():
    assert spread(torch.tensor([[1.0, 0.0], [0.0, 1.0]])) == pytest.approx(0.5**0.5)


def test_stability_is_the_share_of_neighbors_kept_in_any_order():
    before = torch.tensor([[1, 2, 3], [4, 5, 6]])
    assert neighbor_stability(before, before.flip(1)) == 1
    assert neighbor_stability(before, before + 10) == 0
    assert neighbor_stability(before, torch.tensor([[3, 8, 9], [6, 4, 7]])) == pytest.approx(0.5)


@pytest.mark.parametrize(("rank", "wide"), [(20.0, 0.9), (3.0, 0.2)])
def test_no_alarm_on_healthy_embeddings(rank, wide):
    for same_view in (False, True):
        assert (
            collapse_warning(agreement=0.9, rank=rank, spread=wide, dim=64, same_view=same_view)
            is None
        )


@pytest.mark.parametrize(
    ("agreement", "rank", "wide"), [(0.5, 20.0, 0.01), (0.98, 2.1, 0.9), (0.0, 0.0, 0.0)]
)
def test_alarm_on_either_sign(agreement, rank, wide):
    alarm = collapse_warning(agreement=agreement, rank=rank, spread=wide, dim=64, same_view=False)
    assert alarm is not None and alarm.startswith("collapse")
    assert f"{agreement:.2f}" in alarm and f"{wide:.2f}" in alarm and f"{rank:.1f}" in alarm


def test_a_good_model_may_agree_nearly_perfectly():
    assert collapse_warning(agreement=0.98, rank=30.0, spread=0.9, dim=64, same_view=False) is None


def test_the_alarm_names_the_likely_cause():
    same = collapse_warning(agreement=1.0, rank=1.0, spread=0.0, dim=64, same_view=True)
    other = collapse_warning(agreement=1.0, rank=1.0, spread=0.0, dim=64, same_view=False)
    assert same is not None and "method.same_view" in same and "optim.lr" not in same
    assert other is not None and "optim.lr" in other and "method.momentum" in other


def test_the_signs_of_collapsed_and_of_random_embeddings_fall_on_their_sides():
    noise = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    unit = torch.nn.functional.normalize
    for embeddings, alarming in ((unit(noise), False), (unit(1 + 0.01 * noise), True)):
        signs = {"rank": effective_rank(embeddings), "spread": spread(embeddings)}
        assert (
            collapse_warning(agreement=0.5, **signs, dim=64, same_view=False) is not None
        ) == alarming
