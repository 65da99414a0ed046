"""The signs of collapse where the answer is known, and the warning on both sides of its limits."""

import pytest
import torch

from meanshift.ops.collapse import collapse_warning, effective_rank, neighbor_stability, spread


def opposite_pairs(dim):
    """Each axis in both directions: mean 0 and the same energy in every dimension."""
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


def test_spread_is_zero_for_equal_vectors_and_one_around_the_origin():
    equal = torch.nn.functional.normalize(torch.ones(1, 5)).expand(7, 5)
    assert spread(equal) == pytest.approx(0, abs=1e-3)
    assert spread(opposite_pairs(5)) == pytest.approx(1)


def test_spread_of_two_orthogonal_vectors():
    assert spread(torch.tensor([[1.0, 0.0], [0.0, 1.0]])) == pytest.approx(0.5**0.5)


def test_stability_is_the_fraction_of_common_neighbors_in_any_order():
    before = torch.tensor([[1, 2, 3], [4, 5, 6]])
    assert neighbor_stability(before, before.flip(1)) == 1
    assert neighbor_stability(before, before + 10) == 0
    assert neighbor_stability(before, torch.tensor([[3, 8, 9], [6, 4, 7]])) == pytest.approx(0.5)


HINT = "lower the learning rate"


@pytest.mark.parametrize(("rank", "wide"), [(20.0, 0.9), (3.0, 0.2)])
@pytest.mark.parametrize("agreement", [0.9, None])
def test_no_warning_for_healthy_embeddings(rank, wide, agreement):
    assert collapse_warning(agreement=agreement, rank=rank, spread=wide, dim=64, hint=HINT) is None


@pytest.mark.parametrize(
    ("agreement", "rank", "wide"), [(0.5, 20.0, 0.01), (0.98, 2.1, 0.9), (0.0, 0.0, 0.0)]
)
def test_a_warning_for_either_kind_of_collapse(agreement, rank, wide):
    warning = collapse_warning(agreement=agreement, rank=rank, spread=wide, dim=64, hint=HINT)
    assert warning is not None
    assert warning.startswith("collapse")
    for value in (f"agreement {agreement:.2f}", f"spread {wide:.2f}", f"rank {rank:.1f}", HINT):
        assert value in warning


def test_a_method_without_agreement_can_only_be_constant():
    constant = collapse_warning(rank=20.0, spread=0.01, dim=64, hint=HINT)
    assert constant is not None
    assert "agreement" not in constant
    assert collapse_warning(rank=2.1, spread=0.9, dim=64, hint=HINT) is None


def test_a_good_model_may_agree_nearly_perfectly():
    assert collapse_warning(agreement=0.98, rank=30.0, spread=0.9, dim=64, hint=HINT) is None


def test_collapsed_embeddings_cause_a_warning_and_random_ones_do_not():
    noise = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    normalize = torch.nn.functional.normalize
    for embeddings, collapsed in ((normalize(noise), False), (normalize(1 + 0.01 * noise), True)):
        signs = {"rank": effective_rank(embeddings), "spread": spread(embeddings)}
        warning = collapse_warning(agreement=0.5, **signs, dim=64, hint=HINT)
        assert (warning is not None) == collapsed
