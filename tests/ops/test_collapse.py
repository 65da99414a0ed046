"""The signs of collapse where the answer is known, and the warning on both sides of its limits."""

import math

import numpy as np
import pytest
import torch

from meanshift.ops.collapse import (
    PARTIAL_RANK,
    collapse_warning,
    effective_rank,
    lidar,
    neighbor_stability,
    partial_collapse_warning,
    rankme,
    spread,
)


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


def naive_rankme(rows):
    """The definition of the paper, one singular value at a time, in float64."""
    values = np.linalg.svd(rows.double().numpy(), compute_uv=False)
    entropy = 0.0
    for value in values:
        fraction = value / values.sum() + 1e-7
        entropy -= fraction * math.log(fraction)
    return math.exp(entropy)


@pytest.mark.parametrize(("rows", "dim"), [(50, 8), (8, 50), (1, 3)])
def test_rankme_is_that_of_the_paper(rows, dim):
    generator = torch.Generator().manual_seed(0)
    scale = torch.arange(1, dim + 1) ** -1.5
    embeddings = 1 + scale * torch.randn(rows, dim, generator=generator)
    assert rankme(embeddings) == pytest.approx(naive_rankme(embeddings), rel=1e-4)


def test_rankme_of_singular_values_three_and_one():
    """Fractions 3/4 and 1/4; effective rank has 9/10 and 1/10."""
    scaled = opposite_pairs(2) * torch.tensor([3.0, 1.0])
    assert rankme(scaled) == pytest.approx(4 / 3**0.75, rel=1e-4)
    assert effective_rank(scaled) == pytest.approx(10 / 9**0.9, rel=1e-4)


def test_rankme_counts_the_mean_and_effective_rank_does_not():
    rows = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    assert rankme(rows) == pytest.approx(2, rel=1e-4)
    assert effective_rank(rows) == pytest.approx(1, rel=1e-4)


@pytest.mark.parametrize(("value", "rank"), [(0.0, 1), (1.0, 1), (math.nan, 0), (math.inf, 0)])
def test_rankme_of_equal_embeddings(value, rank):
    assert rankme(torch.full((8, 4), value).half()) == pytest.approx(rank, rel=1e-4)


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


def warn(shape=(1024, 64), **signs):
    return collapse_warning(**signs, shape=tuple(shape), hint=HINT)


@pytest.mark.parametrize(("rank", "wide"), [(20.0, 0.9), (3.0, 0.2)])
@pytest.mark.parametrize("agreement", [0.9, None])
def test_no_warning_for_healthy_embeddings(rank, wide, agreement):
    assert warn(agreement=agreement, rank=rank, spread=wide) is None


@pytest.mark.parametrize(
    ("agreement", "rank", "wide"), [(0.5, 20.0, 0.01), (0.98, 2.1, 0.9), (0.0, 0.0, 0.0)]
)
def test_a_warning_for_either_kind_of_collapse(agreement, rank, wide):
    warning = warn(agreement=agreement, rank=rank, spread=wide)
    assert warning is not None
    assert warning.startswith("collapse")
    for value in (f"agreement {agreement:.2f}", f"spread {wide:.2f}", f"rank {rank:.1f}", HINT):
        assert value in warning


def test_a_method_without_agreement_can_only_be_constant():
    constant = warn(rank=20.0, spread=0.01)
    assert constant is not None
    assert "agreement" not in constant
    assert warn(rank=2.1, spread=0.9) is None


def test_a_good_model_may_agree_nearly_perfectly():
    assert warn(agreement=0.98, rank=30.0, spread=0.9) is None


@pytest.mark.parametrize("rows", [16, 85])
def test_few_rows_have_a_low_rank_and_are_not_reported(rows):
    signs = {"agreement": 0.98, "rank": 2.1, "spread": 0.9}
    assert warn(**signs, shape=(rows, 64)) is None and warn(**signs, shape=(86, 64)) is not None


def test_collapsed_embeddings_cause_a_warning_and_random_ones_do_not():
    noise = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    normalize = torch.nn.functional.normalize
    for embeddings, collapsed in ((normalize(noise), False), (normalize(1 + 0.01 * noise), True)):
        signs = {"rank": effective_rank(embeddings), "spread": spread(embeddings)}
        warning = warn(agreement=0.5, **signs, shape=embeddings.shape)
        assert (warning is not None) == collapsed


def lidar_by_loops(rows):
    """The formula of the paper, matrix by matrix."""
    images, views, dim = rows.shape
    means = rows.mean(1)
    within, between = np.zeros((dim, dim)), np.zeros((dim, dim))
    for image in range(images):
        difference = means[image] - means.mean(0)
        between += np.outer(difference, difference) / images
        for view in range(views):
            difference = rows[image, view] - means[image]
            within += np.outer(difference, difference) / (images * views)
    values, vectors = np.linalg.eigh(within + 1e-4 * np.eye(dim))
    root = vectors @ np.diag(values**-0.5) @ vectors.T
    eigenvalues = np.abs(np.linalg.eigvalsh(root @ between @ root))
    fraction = eigenvalues / eigenvalues.sum() + 1e-7
    return math.exp(-(fraction * np.log(fraction)).sum())


@pytest.mark.parametrize("shape", [(7, 3, 4), (30, 5, 6)])
def test_lidar_is_the_published_formula(shape):
    rows = np.random.default_rng(0).normal(size=shape) * np.linspace(0.1, 2, shape[2])
    assert lidar(torch.tensor(rows)) == pytest.approx(lidar_by_loops(rows), rel=1e-5)


def test_lidar_does_not_count_what_differs_between_views():
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(200, 1, 8, generator=generator)
    image[:, :, 4:] = 0  # four dimensions in which images differ
    noise = torch.randn(200, 10, 8, generator=generator) * 0.01
    noise[:, :, 4:] *= 300  # and four in which only views do
    views = image + noise
    assert lidar(views) == pytest.approx(4, abs=0.3)
    assert effective_rank(views.flatten(0, 1)) > 5
    assert lidar(torch.full((5, 3, 4), math.nan)) == 0


@pytest.mark.parametrize(
    ("ranks", "shape", "warned"),
    [
        ([3.9, 2.0], (1024, 128), True),
        ([4.1, 2.0], (1024, 128), False),  # it has only just fallen
        ([2.0, 4.1], (1024, 128), False),  # it has recovered
        ([2.0, 2.0], (1024, 8), False),  # few dimensions are all there are
        ([2.0, 2.0], (32, 128), False),  # few rows have a low rank whatever they are
        ([], (1024, 128), False),
    ],
)
def test_a_warning_of_partial_collapse_where_the_rank_stays_low(ranks, shape, warned):
    warning = partial_collapse_warning(ranks, shape=shape, hint=HINT)
    assert (warning is not None) == warned
    if warning:
        assert warning.startswith("partial collapse: the embeddings have stayed in 2.0 of 128")
        assert HINT in warning
        assert max(ranks) < PARTIAL_RANK
