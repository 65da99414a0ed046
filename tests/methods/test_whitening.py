"""White targets: no mean, the same variance everywhere, the same in any number of processes."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meanshift import MeanShift
from meanshift.methods.whitening import Whitening
from tests.support.forked import in_processes

DIM = 6


def lopsided(count, seed=0):
    """Rows with a large mean and nearly all variance in two directions."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.tensor([1.0, 0.7, 0.3, 0.2, 0.15, 0.1])
    return 3 + scale * torch.randn(count, DIM, generator=generator)


def seen(batches=1000, **given):
    whiten = Whitening(DIM, **given)
    for seed in range(batches):
        whiten(lopsided(64, seed))
    return whiten.eval()


def rank_of(rows):
    share = torch.linalg.svdvals(rows - rows.mean(0)).square()
    share = share / share.sum()
    return float((-(share * share.clamp_min(1e-12).log()).sum()).exp())


def test_white_rows_are_centered_and_spread_evenly():
    rows = lopsided(5000, seed=-1)
    white = seen(floor=1e-6)(rows)
    assert torch.allclose(white.norm(dim=1), torch.ones(5000))
    assert white.mean(0).abs().max() < 0.05
    assert torch.allclose(torch.cov(white.T), torch.eye(DIM) / DIM, atol=0.02)


def test_they_use_all_dimensions_where_the_embeddings_use_two():
    rows = lopsided(2000, seed=-1)
    assert rank_of(rows) < 3 < 4.5 < rank_of(seen()(rows))


def test_a_floor_keeps_directions_of_little_variance_quiet():
    rows = lopsided(2000, seed=-1)
    without, floored = (seen(floor=floor)(rows)[:, -1].std() for floor in (1e-6, 0.05))
    assert floored < 0.8 * without


def test_it_does_nothing_at_first_and_sets_in_with_the_batches():
    rows = lopsided(64)
    begun = Whitening(DIM).eval()
    assert torch.allclose(begun(rows), F.normalize(rows, dim=1), atol=1e-6)
    ranks = [rank_of(seen(batches)(rows)) for batches in (0, 10, 100, 1000)]
    assert ranks == sorted(ranks)
    assert ranks[0] < ranks[-1]


def test_judging_leaves_the_statistics_alone():
    whiten = seen(5)
    before = {name: held.clone() for name, held in whiten.state_dict().items()}
    whiten(lopsided(64, seed=99))
    assert all(torch.equal(held, before[name]) for name, held in whiten.state_dict().items())


def test_autocast_rounds_nothing():
    rows, whiten = lopsided(64, seed=99), seen(20)
    plain = whiten(rows)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(whiten(rows), plain) and plain.dtype == torch.float32


def parts():
    """The statistics after three batches, of which each process has its part."""
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
        for name, held in one.items():
            assert torch.allclose(other[name], held, atol=1e-6), name


def network():
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, DIM))


def test_the_step_searches_among_white_targets():
    torch.manual_seed(0)
    method = MeanShift(network(), DIM, k=3, bank_size=64, whiten=True)
    for _ in range(50):
        step = method(torch.randn(32, 8), torch.randn(32, 8))
    assert method.bank is not None
    assert torch.equal(method.bank.rows[(method.bank.written - 32) % 64 :][:32], step.embeddings)
    assert rank_of(step.embeddings) > rank_of(F.normalize(method.target(torch.randn(32, 8)), dim=1))
    plain = MeanShift(network(), DIM, k=3, bank_size=64)
    assert not any("whiten" in name for name in plain.state_dict())
