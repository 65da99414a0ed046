"""The memory bank against lists, and its search against sorting."""

import resource

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from meanshift import MemoryBank


def unit(rows, dim, seed=0):
    return F.normalize(torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed)), dim=1)


@given(size=st.integers(1, 12), batches=st.lists(st.integers(0, 12), max_size=8))
def test_the_bank_is_a_list_without_its_oldest_rows(size, batches):
    bank = MemoryBank(size, 2)
    written = []
    for count in (min(batch, size) for batch in batches):
        ids = torch.arange(len(written), len(written) + count)
        slots = bank.enqueue(unit(count, 2, seed=len(written)), ids=ids, labels=ids % 3)
        assert torch.equal(bank.ids[slots], ids)
        written += ids.tolist()
    assert bank.filled == min(size, len(written))
    assert sorted(bank.ids[: bank.filled].tolist()) == written[-size:]
    assert torch.equal(bank.labels[: bank.filled], bank.ids[: bank.filled] % 3)
    assert (bank.ids[bank.filled :] == -1).all()
    assert (bank.labels[bank.filled :] == -1).all()


def test_wrapping_inside_a_batch_writes_every_row():
    bank = MemoryBank(5, 3)
    rows = unit(4, 3)
    bank.enqueue(unit(3, 3, seed=1))
    slots = bank.enqueue(rows)
    assert slots.tolist() == [3, 4, 0, 1]
    assert torch.equal(bank.rows[slots], rows)


def test_a_batch_larger_than_the_bank_is_refused_with_what_to_do():
    with pytest.raises(ValueError, match=r"batch of 9 .* bank of 8 rows; raise the bank's size"):
        MemoryBank(8, 2).enqueue(unit(9, 2))


def test_the_initial_rows_are_random_unit_rows_of_its_seed():
    bank = MemoryBank(64, 16, seed=1)
    torch.testing.assert_close(bank.rows.norm(dim=1), torch.ones(64))
    assert torch.equal(bank.rows, MemoryBank(64, 16, seed=1).rows)
    assert not torch.equal(bank.rows, MemoryBank(64, 16, seed=2).rows)


@settings(max_examples=60)
@given(
    size=st.sampled_from([3, 127, 128, 129, 1000, 2048, 4096 + 17]),
    queries=st.integers(1, 5),
    count=st.integers(1, 6),
    chunk=st.sampled_from([1, 4 * 128 * 5 * 3, 16 * 2**20]),
    exclude=st.booleans(),
    seed=st.integers(0, 99),
)
def test_search_is_exact_whatever_the_chunks(size, queries, count, chunk, exclude, seed):
    count = min(count, size)
    bank = MemoryBank(size, 4, seed=seed, chunk_bytes=chunk)
    embeddings = unit(queries, 4, seed=seed + 1)
    own = torch.arange(queries) * 37 % size if exclude else None
    slots, similarity = bank.search(embeddings, count, exclude_slots=own)
    full = embeddings @ bank.rows.T
    if own is not None:
        full[torch.arange(queries), own] = -torch.inf
    best = full.sort(1, descending=True).values[:, :count]
    torch.testing.assert_close(similarity, best)
    torch.testing.assert_close(full.gather(1, slots), best)
    assert all(len(set(row)) == count for row in slots.tolist())


def test_rows_of_the_same_id_can_be_excluded():
    bank = MemoryBank(6, 2)
    rows = unit(3, 2)
    bank.enqueue(rows, ids=torch.tensor([7, 8, 9]))
    bank.enqueue(rows, ids=torch.tensor([7, 8, 9]))
    slots, similarity = bank.search(rows, 5, exclude_ids=torch.tensor([7, 8, 9]))
    eligible = similarity > -torch.inf
    assert eligible.sum(1).tolist() == [4, 4, 4]
    for row, own in enumerate((7, 8, 9)):
        assert own not in bank.ids[slots[row][eligible[row]]].tolist()


def test_the_state_includes_the_next_slot():
    one, two = MemoryBank(5, 3, seed=1), MemoryBank(5, 3, seed=2)
    one.enqueue(unit(3, 3), ids=torch.arange(3))
    two.load_state_dict(one.state_dict())
    assert two.written == 3
    assert torch.equal(one.rows, two.rows)
    assert torch.equal(one.enqueue(unit(4, 3)), two.enqueue(unit(4, 3)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_storage_finds_nearly_the_same_rows(dtype):
    full = MemoryBank(2048, 64, seed=1)
    half = MemoryBank(2048, 64, seed=1, dtype=dtype)
    queries = unit(16, 64, seed=5)
    slots, _ = full.search(queries, 5)
    half_slots, _ = half.search(queries, 5)
    shared = (slots[:, :, None] == half_slots[:, None, :]).any(2).float().mean()
    assert half.rows.element_size() == 2
    assert shared > 0.9


@pytest.mark.slow
def test_a_million_rows_of_512_need_the_bank_and_little_more():
    bank = MemoryBank(1_024_000, 512)
    queries = bank.rows[::4000].clone()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    slots, similarity = bank.search(queries, 5)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert torch.equal(slots[:, 0], torch.arange(0, 1_024_000, 4000))
    torch.testing.assert_close(similarity[:, 0], torch.ones(len(queries)))
    assert (after - before) * 1024 < 300 * 2**20
