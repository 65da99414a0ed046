"""NaN and infinity: an error in the step that has them, which names where; nothing is changed."""

import pytest
import torch
from torch import nn

from meanshift import MeanShift
from meanshift.methods.byol import BYOL
from meanshift.methods.cmsf import CMSF
from meanshift.methods.finite import DivergedError, NotFiniteError, require_finite
from meanshift.methods.memory_bank import MemoryBank
from meanshift.methods.swav import SwAV
from meanshift.runtime import distributed
from tests.support.forked import in_processes

DIM = 6


def network():
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, DIM))


def views(bad=None, value=torch.nan):
    pair = list(torch.randn(2, 16, 8))
    if bad is not None:
        pair[bad][3, 2] = value
    return pair


@pytest.fixture
def method():
    torch.manual_seed(0)
    return MeanShift(network(), DIM, k=3, bank_size=256)


@pytest.mark.parametrize(
    ("bad", "value", "named"),
    [
        (0, torch.nan, r"NaN in the input `online_view` in 1 of 16 rows, first in row 3"),
        (1, torch.nan, r"NaN in the input `target_view`"),
        (1, torch.inf, r"infinity in the input `target_view`"),
    ],
)
def test_an_input_is_named_and_nothing_is_changed(method, bad, value, named):
    method(*views())
    before = {name: value.clone() for name, value in method.state_dict(keep_vars=True).items()
              if isinstance(value, torch.Tensor)}  # fmt: skip
    with pytest.raises(NotFiniteError, match=named):
        method(*views(bad, value))
    assert all(torch.equal(method.state_dict()[name], value) for name, value in before.items())
    assert method.bank.written == 16 and method(*views()).loss.isfinite()


@pytest.mark.parametrize("whiten", [False, True])
@pytest.mark.parametrize("name", ["online", "target"])
def test_a_network_that_has_diverged_is_named(name, whiten):
    method = MeanShift(network(), DIM, k=3, bank_size=64, whiten=whiten)
    with torch.no_grad():
        getattr(method, name)[3].weight[1, 1] = torch.nan
    with pytest.raises(DivergedError, match=rf"NaN in {name}\.3\.weight.*lower the learning rate"):
        method(*views())
    assert method.bank.rows.isfinite().all()


@pytest.mark.parametrize("chunk_bytes", [64 * 64, 2**20])
def test_a_row_of_the_bank_is_found_in_every_chunk(method, chunk_bytes):
    method.bank.chunk_bytes = chunk_bytes
    method.bank.rows[200] = torch.nan
    with pytest.raises(NotFiniteError, match=r"from NaN in bank\.rows"):
        method(*views())


@pytest.mark.parametrize(
    "method",
    [
        BYOL(network(), DIM, hidden=16),
        CMSF(network(), DIM, samples=64, bank_size=64),
        SwAV(network(), DIM, prototypes=4),
    ],
    ids=["byol", "cmsf", "swav"],
)
def test_other_methods_name_their_inputs_too(method):
    with pytest.raises(NotFiniteError, match=r"NaN in the input (1|`\w+`) in 1 of 16 rows"):
        method(*views(1), ids=torch.arange(16))


def test_large_values_are_finite():
    require_finite(torch.full((4, 4), 3e38), "x")  # the sum of which is not
    require_finite(torch.full((4, 4), 6e4, dtype=torch.float16), "x")
    with pytest.raises(NotFiniteError, match="infinity in x in 1 of 2 rows, first in row 1"):
        require_finite(torch.tensor([[0.0], [-torch.inf]]), "x")


def search_a_bank_in_float16():
    """Three rows in the first process, two in the second."""
    torch.manual_seed(distributed.rank())
    bank = MemoryBank(16, 4, dtype=torch.float16, sharded=True)
    rows = nn.functional.normalize(torch.randn(3 - distributed.rank(), 4), dim=1)
    with torch.autocast("cpu", torch.bfloat16):
        slots = bank.enqueue(rows)
        near, _, _ = bank.neighbors(rows, 3, exclude_slots=slots)
        return near, distributed.all_gather_with_gradient(rows.half())


def test_a_bank_in_float16_is_filled_by_uneven_shares_under_autocast():
    for near, gathered in in_processes(2, search_a_bank_in_float16):
        assert near.isfinite().all() and gathered.shape == (5, 4)
