"""The memory of one row per sample: reading, writing, momentum, several processes."""

import copy
import time
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from meanshift.config.recipes import recipe
from meanshift.data.arrays import ArraySource
from meanshift.methods import Progress
from meanshift.methods.invp import InvP
from meanshift.methods.neighbor_graph import NeighborGraph
from meanshift.methods.pirl import PIRL
from meanshift.methods.sample_memory import SampleMemory, last_of_each, require_ids
from meanshift.runtime import distributed
from meanshift.training.session import build_method
from tests.support.forked import in_processes


def rows(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5))


def test_it_starts_with_random_unit_rows_that_depend_on_the_seed():
    memory = SampleMemory(7, 3)
    torch.testing.assert_close(memory.rows.norm(dim=1), torch.ones(7))
    assert torch.equal(memory.rows, SampleMemory(7, 3).rows)
    assert not torch.equal(memory.rows, SampleMemory(7, 3, seed=1).rows)
    assert not memory.seen.any()


def test_without_momentum_the_rows_are_stored_as_they_are():
    memory = SampleMemory(7, 3)
    before = memory.rows.clone()
    new = rows(2, 3).requires_grad_()
    memory.update(torch.tensor([4, 1]), new)
    assert torch.equal(memory.read(torch.tensor([1, 4])), new.detach().flip(0))
    assert torch.equal(memory.rows[[0, 2, 3, 5, 6]], before[[0, 2, 3, 5, 6]])
    assert memory.seen.nonzero()[:, 0].tolist() == [1, 4]
    assert not memory.rows.requires_grad


def test_with_momentum_rows_are_mixed_and_have_unit_length():
    memory = SampleMemory(7, 3, momentum=0.3)
    old = memory.rows[2].clone()
    new = rows(1, 3)
    memory.update(torch.tensor([2]), new)
    mixed = 0.3 * old + 0.7 * new[0]
    torch.testing.assert_close(memory.rows[2], mixed / mixed.norm())


def test_a_copy_is_read():
    memory = SampleMemory(4, 2)
    past = memory.read(torch.tensor([0]))
    memory.update(torch.tensor([0]), rows(1, 2))
    assert not torch.equal(past, memory.rows[:1])


def test_a_state_dict_restores_rows_and_what_was_seen():
    memory = SampleMemory(4, 2)
    memory.update(torch.tensor([3]), rows(1, 2))
    other = SampleMemory(4, 2, seed=9)
    other.load_state_dict(memory.state_dict())
    assert torch.equal(other.rows, memory.rows)
    assert torch.equal(other.seen, memory.seen)


def write_parts(*sizes):
    """Write five rows; each process has its part of them."""
    memory = SampleMemory(8, 3, momentum=0.5)
    ids = torch.tensor([5, 0, 7, 2, 3]).split(sizes)[distributed.rank()]
    memory.update(ids, rows(5, 3).split(sizes)[distributed.rank()])
    return memory.rows, memory.seen


def test_every_process_has_the_rows_of_all():
    alone = write_parts(5)
    for found in in_processes(2, write_parts, 4, 1):
        assert torch.equal(found[0], alone[0])
        assert torch.equal(found[1], alone[1])


@pytest.mark.parametrize(("size", "dim"), [(0, 3), (3, 0)])
def test_an_empty_memory_is_refused(size, dim):
    with pytest.raises(ValueError, match=f"{size} samples of {dim} values; need at least 1"):
        SampleMemory(size, dim)


@pytest.mark.parametrize("momentum", [-0.1, 1.0])
def test_a_momentum_that_keeps_or_inverts_rows_is_refused(momentum):
    with pytest.raises(ValueError, match="need 0 <= momentum < 1"):
        SampleMemory(3, 3, momentum=momentum)


def test_of_a_sample_that_is_in_a_batch_twice_the_last_row_counts():
    """An image that replaces an unreadable one may be in the batch already."""
    memory = SampleMemory(4, 3)
    rows = torch.nn.functional.normalize(torch.randn(3, 3), dim=1)
    memory.update(torch.tensor([2, 0, 2]), rows)
    assert torch.equal(memory.read(torch.tensor([2, 0])), rows[[2, 1]])
    memory.update(torch.empty(0, dtype=torch.long), rows[:0])


def test_many_rows_are_written_at_once():
    """A square of 50,000 ids would have 2.5 billion values."""
    memory = SampleMemory(50_000, 2)
    ids = torch.randint(50_000, (50_000,), generator=torch.Generator().manual_seed(1))
    new = rows(50_000, 2)
    start = time.perf_counter()
    memory.update(ids, new)
    assert time.perf_counter() - start < 1
    last = {sample: number for number, sample in enumerate(ids.tolist())}
    assert last_of_each(ids).tolist() == [last[sample] for sample in ids.tolist()]
    assert torch.equal(memory.read(ids), new[last_of_each(ids)])


def test_of_a_sample_that_is_in_a_batch_twice_the_last_neighbors_count(monkeypatch):
    graph = NeighborGraph(9, 2)
    ids = torch.tensor([3, 5, 3, 3])
    nearest = torch.tensor([[3, 1, 2], [5, 6, 7], [4, 3, 8], [0, 3, 6]])
    chosen = []

    def spy(written):
        chosen.append(last_of_each(written).tolist())
        return last_of_each(written)

    monkeypatch.setattr("meanshift.methods.neighbor_graph.last_of_each", spy)
    graph.update(ids, nearest)
    assert graph.neighbors[[3, 5]].tolist() == [[0, 6], [7, 6]]
    assert chosen == [[3, 1, 3, 3]]  # equal rows: their order of writing is not fixed on a GPU


def test_missing_ids_are_named():
    ids = torch.arange(3)
    assert require_ids(ids, "InvP") is ids
    with pytest.raises(ValueError, match="InvP needs the ids of the samples: pass ids"):
        require_ids(None, "InvP")


# Filling


class Item(NamedTuple):
    views: list[torch.Tensor]
    ids: torch.Tensor


def passes(samples):
    """A pass over the data, in two batches."""
    order = torch.arange(len(samples)).flip(0)
    return iter([Item([samples[part]], part) for part in order.split(4)])


def filled(method, samples):
    method.memory.update(torch.tensor([0]), rows(1, 3))
    method.memory.seen.zero_()
    method.begin_epoch(Progress(0, 3, 2), lambda: passes(samples))


@pytest.mark.parametrize("name", ["invp", "pirl"])
def test_a_memory_is_filled_once_with_the_embeddings_if_the_settings_ask_for_it(name):
    encoder = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3))
    samples = rows(6, 5)
    options = {"samples": 6, "memory_momentum": 0.5, "fill_memory": True}
    if name == "invp":
        method = InvP(encoder, 3, k=1, **options)
    else:
        method = PIRL(encoder, 3, features=5, **options)
    before = copy.deepcopy(encoder.state_dict())
    filled(method, samples)
    with torch.no_grad():
        expected = nn.functional.normalize(encoder.eval()(samples), dim=1)
    torch.testing.assert_close(method.memory.rows, expected)
    assert method.memory.seen.all()
    assert all(torch.equal(encoder.state_dict()[key], before[key]) for key in before)
    method.begin_epoch(Progress(3, 3, 2), lambda: pytest.fail("a second pass"))
    method.fill_memory = False
    method.memory.seen.zero_()
    method.begin_epoch(Progress(0, 3, 2), lambda: pytest.fail("it was not asked for"))
    source = ArraySource(np.zeros((50, 8, 8, 3), dtype=np.uint8), None, name="black")
    config = recipe("cifar10-r18").with_overrides({"method.name": name, "encoder.width": 0.125})
    assert not build_method(config, source).fill_memory
    config = config.with_overrides({"method.fill_memory": True})
    assert build_method(config, source).fill_memory
    for start in ({"encoder.init": "pca"}, {"encoder.weights": "meanshift:cifar10-small"}):
        started = recipe("cifar10-r18").with_overrides({"method.name": name, **start})
        assert started.method.fill_memory
        kept = started.with_overrides({"method.fill_memory": False, "train.epochs": 3})
        assert not kept.method.fill_memory
    typed = {"method.name": name, "method.fill_memory": False}
    assert not recipe("small").with_overrides(typed).method.fill_memory
    assert recipe("small").with_overrides({"method.name": name}).method.fill_memory
