"""Whitening: zero mean, equal variances, the same result with any number of processes."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meanshift import MeanShift
from meanshift.methods import whitening
from meanshift.methods.finite import NotFiniteError
from meanshift.methods.whitening import Whitening, agreement
from meanshift.ops.collapse import collapse_warning, effective_rank, spread
from tests.support.forked import in_processes

DIM = 6


def lopsided(count, seed=0):
    """Rows with a large mean and nearly all variance in two directions."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.tensor([1.0, 0.7, 0.3, 0.2, 0.15, 0.1])
    return 3 + scale * torch.randn(count, DIM, generator=generator)


def trained(batches=1000, **options):
    """Whitening after some batches of training, in evaluation mode."""
    whiten = Whitening(DIM, **options)
    for seed in range(batches):
        whiten(lopsided(64, seed))
    return whiten.eval()


def rank_of(rows):
    energy = torch.linalg.svdvals(rows - rows.mean(0)).square()
    fraction = energy / energy.sum()
    return float((-(fraction * fraction.clamp_min(1e-12).log()).sum()).exp())


def test_white_rows_are_centered_and_spread_evenly():
    rows = lopsided(5000, seed=-1)
    white = trained(floor=1e-6)(rows)
    assert torch.allclose(white.norm(dim=1), torch.ones(5000))
    assert white.mean(0).abs().max() < 0.05
    assert torch.allclose(torch.cov(white.T), torch.eye(DIM) / DIM, atol=0.02)


def test_white_rows_use_all_dimensions_where_the_embeddings_use_two():
    rows = lopsided(2000, seed=-1)
    assert rank_of(rows) < 3 < 4.5 < rank_of(trained()(rows))


def test_a_floor_limits_directions_of_little_variance():
    rows = lopsided(2000, seed=-1)
    without, floored = (trained(floor=floor)(rows)[:, -1].std() for floor in (1e-6, 0.05))
    assert floored < 0.8 * without


def test_it_does_nothing_at_first_and_takes_effect_with_the_batches():
    rows = lopsided(64)
    untrained = Whitening(DIM).eval()
    assert torch.allclose(untrained(rows), F.normalize(rows, dim=1), atol=1e-6)
    ranks = [rank_of(trained(batches)(rows)) for batches in (0, 10, 100, 1000)]
    assert ranks == sorted(ranks)
    assert ranks[0] < ranks[-1]


def test_evaluation_does_not_change_the_statistics():
    whiten = trained(5)
    before = {name: value.clone() for name, value in whiten.state_dict().items()}
    whiten(lopsided(64, seed=99))
    assert all(torch.equal(value, before[name]) for name, value in whiten.state_dict().items())


def test_autocast_rounds_nothing():
    rows = lopsided(64, seed=99)
    whiten = trained(20)
    plain = whiten(rows)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(whiten(rows), plain)
    assert plain.dtype == torch.float32
    plain_statistics, statistics = Whitening(DIM), Whitening(DIM)
    plain_statistics(rows)
    with torch.autocast("cpu", torch.bfloat16):
        statistics(rows)
    assert torch.equal(statistics.square, plain_statistics.square)


@pytest.mark.parametrize("checked", [True, False])
def test_targets_that_are_not_finite_are_an_error_and_change_nothing(monkeypatch, checked):
    """Also on a GPU, where the rows are not checked: torch then finds no eigenvectors."""
    whiten = trained(5).train()
    rows = lopsided(8)
    rows[2, 1] = torch.nan
    before = whiten.square.clone()
    if not checked:
        monkeypatch.setattr(whitening, "require_finite", lambda *_: None)
    with pytest.raises(NotFiniteError, match=r"NaN in the (embeddings|covariance) to whiten"):
        whiten(rows)
    assert not checked or torch.equal(whiten.square, before)


def parts():
    """The statistics after three batches that are divided among the processes."""
    from meanshift.runtime import distributed

    whiten = Whitening(DIM)
    for seed in range(3):
        rows = lopsided(10, seed)
        white = whiten(rows[slice(*distributed.shard_range(len(rows)))])
    return {
        **whiten.state_dict(),
        "rows": distributed.all_gather_rows(white, distributed.all_lengths(len(white))),
    }


@pytest.mark.parametrize("world", [2, 3])
def test_several_processes_whiten_as_one(world):
    (one,) = in_processes(1, parts)
    for other in in_processes(world, parts):
        for name, value in one.items():
            assert torch.allclose(other[name], value, atol=1e-6), name


def network():
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, DIM))


class Collapsed(nn.Module):
    """Nearly the same embedding for every input, with the little variance in few directions."""

    def forward(self, rows):
        scale = 0.01 * torch.tensor([1.0, 0.5, 0.1, 0.1, 0.1, 0.1])
        return torch.ones(DIM) + scale * rows[:, :DIM]


def test_collapsed_targets_are_reported_although_they_are_white():
    torch.manual_seed(0)
    method = MeanShift(Collapsed(), DIM, k=3, bank_size=64, whiten=True)
    method.whiten.momentum = 0.9  # soon white
    for _ in range(200):
        step = method(torch.randn(64, 8), torch.randn(64, 8))
    white = method.bank.rows
    assert spread(white) > 0.9 and rank_of(white) > 1.5 * rank_of(step.embeddings)
    signs = {"rank": effective_rank(step.embeddings), "shape": (64, DIM), "hint": ""}
    assert collapse_warning(spread=spread(white), **signs) is None
    warning = collapse_warning(spread=spread(step.embeddings), **signs)
    assert warning is not None and "spread 0.0" in warning


def test_agreement_is_that_of_the_targets_before_they_are_white():
    """Predictions that miss only the directions of little variance."""
    whiten = trained(floor=1e-6)
    rows = F.normalize(lopsided(500, seed=-1), dim=1)
    white = whiten(rows)
    centered = rows - whiten.mean.float()
    guess = centered * torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 0.0])
    predictions = F.normalize(guess @ torch.linalg.inv(whiten.inverse), dim=1)
    expected = F.cosine_similarity(guess, centered).mean()
    assert agreement(predictions, white, whiten) == pytest.approx(float(expected), abs=1e-3)
    assert (predictions * white).sum(1).mean() < expected - 0.1
    plain = agreement(predictions, white, nn.Identity())
    assert torch.equal(plain, (predictions * white).sum(1).mean())


def test_the_step_searches_among_white_targets():
    torch.manual_seed(0)
    method = MeanShift(network(), DIM, k=3, bank_size=64, whiten=True)
    for _ in range(50):
        step = method(torch.randn(32, 8), torch.randn(32, 8))
    assert method.bank is not None
    newest = method.bank.rows[(method.bank.written - 32) % 64 :][:32]
    assert torch.equal(newest, method.whiten.eval()(step.embeddings))
    assert rank_of(newest) > rank_of(step.embeddings)
    plain = MeanShift(network(), DIM, k=3, bank_size=64)
    assert not any("whiten" in name for name in plain.state_dict())
