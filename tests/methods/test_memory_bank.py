"""The ring and its search, against lists and sorting."""

import resource

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from meanshift import MemoryBank
from meanshift.ops.topk import above, by_query, nearest_neighbors


def unit(rows, dim, seed=0):
    return F.normalize(torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed)), dim=1)


@given(size=st.integers(1, 12), batches=st.lists(st.integers(0, 12), max_size=8))
def test_the_ring_is_a_list_that_forgets_its_oldest(size, batches):
    bank = MemoryBank(size, 2)
    written = []
    for count in (min(batch, size) for batch in batches):
        ids = torch.arange(len(written), len(written) + count)
        slots = bank.enqueue(unit(count, 2, seed=len(written)), ids=ids, labels=ids % 3)
        assert torch.equal(bank.ids[slots], ids)
        written += ids.tolist()
    assert bank.filled == min(size, len(written))
    held = sorted(bank.ids[: bank.filled].tolist())
    assert held == written[-size:]
    assert torch.equal(bank.labels[: bank.filled], bank.ids[: bank.filled] % 3)
    assert (bank.ids[bank.filled :] == -1).all() and (bank.labels[bank.filled :] == -1).all()


def test_wrapping_inside_a_batch_writes_every_row():
    bank, rows = MemoryBank(5, 3), unit(4, 3)
    bank.enqueue(unit(3, 3, seed=1))
    slots = bank.enqueue(rows)
    assert slots.tolist() == [3, 4, 0, 1]
    assert torch.equal(bank.rows[slots], rows)


def test_a_batch_larger_than_the_bank_is_refused_with_what_to_do():
    with pytest.raises(ValueError, match=r"batch of 9 .* bank of 8 rows; raise the bank's size"):
        MemoryBank(8, 2).enqueue(unit(9, 2))


def test_it_begins_with_random_unit_rows_of_its_seed():
    bank = MemoryBank(64, 16, seed=1)
    torch.testing.assert_close(bank.rows.norm(dim=1), torch.ones(64))
    assert torch.equal(bank.rows, MemoryBank(64, 16, seed=1).rows)
    assert not torch.equal(bank.rows, MemoryBank(64, 16, seed=2).rows)


@settings(deadline=None, max_examples=60)
@given(
    size=st.sampled_from([3, 127, 128, 129, 1000, 2048, 4096 + 17]),
    queries=st.integers(1, 5),
    count=st.integers(1, 6),
    chunk=st.sampled_from([1, 4 * 128 * 5 * 3, 16 * 2**20]),
    hide=st.booleans(),
    seed=st.integers(0, 99),
)
def test_search_is_exact_whatever_the_chunks(size, queries, count, chunk, hide, seed):
    count = min(count, size)
    bank = MemoryBank(size, 4, seed=seed, chunk_bytes=chunk)
    asked = unit(queries, 4, seed=seed + 1)
    own = torch.arange(queries) * 37 % size if hide else None
    slots, similarity = bank.search(asked, count, leave_out=own)
    full = asked @ bank.rows.T
    if own is not None:
        full[torch.arange(queries), own] = -torch.inf
    best = full.sort(1, descending=True).values[:, :count]
    torch.testing.assert_close(similarity, best)
    torch.testing.assert_close(full.gather(1, slots), best)
    assert all(len(set(row)) == count for row in slots.tolist())


def test_rows_of_the_same_id_are_skipped():
    bank = MemoryBank(6, 2)
    rows = unit(3, 2)
    bank.enqueue(rows, ids=torch.tensor([7, 8, 9]))
    bank.enqueue(rows, ids=torch.tensor([7, 8, 9]))
    slots, similarity = bank.search(rows, 5, skip_ids=torch.tensor([7, 8, 9]))
    eligible = similarity > -torch.inf
    assert eligible.sum(1).tolist() == [4, 4, 4]
    for row, own in enumerate((7, 8, 9)):
        assert own not in bank.ids[slots[row][eligible[row]]].tolist()


def test_state_survives_a_round_trip_and_goes_on_from_the_same_slot():
    one, two = MemoryBank(5, 3, seed=1), MemoryBank(5, 3, seed=2)
    one.enqueue(unit(3, 3), ids=torch.arange(3))
    two.load_state_dict(one.state_dict())
    assert two.written == 3 and torch.equal(one.rows, two.rows)
    assert torch.equal(one.enqueue(unit(4, 3)), two.enqueue(unit(4, 3)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_storage_finds_nearly_the_same_rows(dtype):
    exact, half = MemoryBank(2048, 64, seed=1), MemoryBank(2048, 64, seed=1, dtype=dtype)
    asked = unit(16, 64, seed=5)
    found, same = exact.search(asked, 5)[0], half.search(asked, 5)[0]
    shared = (found[:, :, None] == same[:, None, :]).any(2).float().mean()
    assert half.rows.element_size() == 2 and shared > 0.9


def test_an_empty_query_finds_nothing():
    slots, _ = nearest_neighbors(unit(0, 4), unit(10, 4), 3)
    assert slots.shape == (0, 3)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    batch=st.integers(0, 4),
    blocks=st.integers(1, 4),
    width=st.integers(1, 5),
    seed=st.integers(0, 2**20),
)
def test_values_above_a_bar_are_found_as_by_looking_at_each(batch, blocks, width, seed):
    """Few different values, so that many are equal to the bar: those are not above it."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 4, (batch, blocks, width), generator=generator).float()
    bar = torch.randint(-1, 4, (batch, 1), generator=generator).float()
    query, where, high = above(values, values.amax(2), bar)
    expected = [
        (row, column, value)
        for row, line in enumerate(values.flatten(1).tolist())
        for column, value in enumerate(line)
        if value > bar[row]
    ]
    found = list(zip(query.tolist(), where.tolist(), high.tolist(), strict=True))
    assert found == expected
    few, slots = by_query(query, where, high, batch)
    for row in range(batch):
        own = [(column, value) for at, column, value in expected if at == row]
        rest = few.shape[1] - len(own)
        assert slots[row, : len(own)].tolist() == [column for column, _ in own]
        assert few[row].tolist() == [value for _, value in own] + [-torch.inf] * rest
    assert few.shape[1] == max((query.tolist().count(row) for row in range(batch)), default=0)


@pytest.mark.slow
def test_a_million_rows_of_512_need_the_bank_and_little_more():
    bank = MemoryBank(1_024_000, 512)
    asked = bank.rows[::4000].clone()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    slots, similarity = bank.search(asked, 5)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert torch.equal(slots[:, 0], torch.arange(0, 1_024_000, 4000))
    torch.testing.assert_close(similarity[:, 0], torch.ones(len(asked)))
    assert (after - before) * 1024 < 300 * 2**20
