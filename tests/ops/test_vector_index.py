"""Which index fits, how its lists are chosen, and what its recall is; without FAISS."""

import numpy as np
import pytest

from meanshift.ops import vector_index
from meanshift.ops.vector_index import choose_layout, choose_nprobe, list_count, recall, train_rows

GB = 1e9


@pytest.mark.parametrize(
    ("rows", "dim", "memory", "factory"),
    [
        (1, 512, 4, "Flat"),
        (100_000, 512, 4, "Flat"),
        (100_001, 512, 4, "IVF1024,SQ8"),
        (100_000, 2048, 1, "IVF512,SQ8"),  # too little memory for an exact one
        (10_000_000, 128, 4, "IVF2048,SQ8"),
        (10_000_000, 128, 2, "IVF2048,PQ32"),
        (10_000_000, 2048, 8, "IVF512,PQ256"),
        (10_000_000, 2048, 4, "IVF512,PQ128"),
        (100_000_000, 128, 8, "IVF2048,PQ32"),
        (1_000_000, 127, 4, "IVF2048,SQ8"),
        (1_000_000, 127, 0.2, "IVF2048,PQ1"),  # a prime number of dimensions
    ],
)
def test_the_most_precise_index_that_fits_is_chosen(rows, dim, memory, factory):
    layout = choose_layout(rows, dim, memory=memory * GB)
    assert layout.factory == factory and layout.nbytes <= memory * GB
    assert (layout.lists == 0) == (factory == "Flat")


def test_a_kind_can_be_demanded():
    assert choose_layout(1000, 64, memory=GB, kind="ivf-pq").factory == "IVF16,PQ16"
    assert choose_layout(200_000, 64, memory=GB, kind="flat").factory == "Flat"
    with pytest.raises(ValueError, match=r"--kind: got 'hnsw', need one of auto, flat"):
        choose_layout(1000, 64, memory=GB, kind="hnsw")


def test_too_little_memory_is_an_error_that_says_how_much_is_needed():
    with pytest.raises(ValueError, match=r"got 0.1 GB, and 10,000,000 rows .* type --memory 0\.\d"):
        choose_layout(10_000_000, 128, memory=0.1 * GB)
    with pytest.raises(ValueError, match=r"need 7\.68 GB as flat; type --memory 7.7, or leave --k"):
        choose_layout(10_000_000, 128, memory=4 * GB, kind="flat")
    assert choose_layout(10_000_000, 128, memory=7.7 * GB, kind="flat").kind == "flat"
    with pytest.raises(ValueError, match="got 0 rows"):
        choose_layout(0, 128, memory=GB)


def test_the_rows_to_train_on_are_bounded_and_suffice_for_the_lists():
    for rows in (1, 50, 5000, 10**6, 10**9):
        for dim in (2, 128, 4096):
            trained = train_rows(rows, dim)
            assert 1 <= trained <= min(rows, 131_072) and trained * dim * 4 <= 256 * 2**20
            lists = list_count(rows, dim)
            assert lists == 1 or trained >= 39 * lists  # below, FAISS warns


def test_recall_is_the_fraction_of_exact_neighbors_that_were_found():
    exact = np.array([[1, 2], [3, 4]])
    assert recall(np.array([[2, 1, 9], [8, 4, -1]]), exact) == 0.75
    assert recall(np.array([[5], [6]]), exact) == 0.0


@pytest.mark.parametrize(
    ("recalls", "expected"),
    [
        ({1: 0.99}, 1),
        ({1: 0.5, 2: 0.8, 4: 0.95, 8: 1.0}, 4),
        ({1: 0.5, 2: 0.8, 4: 0.801, 8: 1.0}, 2),  # more lists change little
        ({1: 0.1, 2: 0.2, 4: 0.3, 8: 0.4, 16: 0.5}, 16),  # all lists
    ],
)
def test_lists_are_added_until_the_recall_is_reached(monkeypatch, recalls, expected):
    queries = np.zeros((1000, 4), np.float32)
    exact = np.zeros((1000, 1), np.int64)

    def search(_index, queries, _count, *, nprobe):
        hits = np.arange(len(queries)) < recalls[nprobe] * len(queries)
        return np.where(hits, 0, 1)[:, None]

    monkeypatch.setattr(vector_index, "search", search)
    assert choose_nprobe(None, queries, exact, lists=16, candidates=1) == expected
