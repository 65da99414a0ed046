"""The search by bounds: never below the true product, and the same neighbours as brute force."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from meanshift import pruned
from meanshift.bank import product
from meanshift.evaluate import knn
from meanshift.evaluate.knn import neighbours
from meanshift.pruned import Pruned, contraction, leading_axes, shortened


def random_rows(count, dim, seed=0):
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(seed))


def flat(count, dim, seed, power=1.0):
    """Unit rows whose axes carry less and less, as features do."""
    turn = torch.linalg.qr(random_rows(dim, dim, 99))[0]
    return F.normalize(random_rows(count, dim, seed) * torch.arange(1, dim + 1) ** -power @ turn)


def some_axes(dim, count, seed=0):
    return torch.linalg.qr(random_rows(dim, dim, seed))[0][:, :count]


KINDS = ("random", "parallel", "copies", "low rank", "lengths", "along", "across", "zero")


def made(kind, seed, dim, axes):
    rows = random_rows(12, dim, seed)
    if kind == "parallel":
        rows = rows[:1] + 1e-4 * rows
    elif kind == "copies":
        rows = rows[:1].repeat(12, 1)
    elif kind == "low rank":
        rows = rows[:, :2] @ random_rows(2, dim, seed + 1)
    elif kind == "lengths":
        rows = rows * 10.0 ** torch.linspace(-15, 15, 12)[:, None]
    elif kind == "along":  # nothing is left but rounding
        rows = random_rows(12, axes.shape[1], seed) @ axes.T
    elif kind == "across":
        rows = rows - rows @ axes @ axes.T
    elif kind == "zero":
        rows[::2] = 0
    return rows


@given(
    seed=st.integers(0, 2**20),
    dim=st.integers(2, 300),
    share=st.floats(0, 1),
    kinds=st.tuples(st.sampled_from(KINDS), st.sampled_from(KINDS)),
    scale=st.sampled_from([1.0, 1 + 1e-3, 0.5]),
)
@settings(deadline=None, max_examples=300, derandomize=True)
def test_the_bound_is_never_below_a_product(seed, dim, share, kinds, scale):
    """Of any rows, along any axes, not only orthonormal ones."""
    axes = some_axes(dim, round(share * dim), seed % 5)
    queries, rows = (made(kind, seed + i, dim, axes) for i, kind in enumerate(kinds))
    rows = torch.cat([rows, queries])
    small = contraction(scale * axes)
    bound = shortened(queries, small) @ shortened(rows, small).T
    assert (bound > queries @ rows.T).all()
    assert (bound.double() >= queries.double() @ rows.double().T).all()


def test_the_bound_is_tight_where_the_axes_hold_all():
    rows, axes = flat(50, 64, 0), some_axes(64, 64)
    short = shortened(rows, contraction(axes))
    torch.testing.assert_close(short @ short.T, rows @ rows.T, atol=3e-5, rtol=0)


def test_axes_are_made_small_enough():
    axes = some_axes(40, 10) * 1.001
    assert torch.linalg.matrix_norm(contraction(axes), 2) <= 1


def exact(train, test, count):
    """Brute force in float64; of equals the first."""
    train, test = (F.normalize(rows, dim=1).double() for rows in (train, test))
    similarity = (test[:, None] * train).sum(2) if len(train) < 900 else test @ train.T
    order = similarity.argsort(stable=True, dim=1, descending=True)[:, :count]
    return order, similarity.gather(1, order)


def assert_as_near(train, test, slots):
    """The same neighbours as by brute force, but for swaps of those that float32 makes equal."""
    expected, similarity = exact(train, test, slots.shape[1])
    assert (slots == expected).double().mean() > 0.99
    train, test = (F.normalize(rows, dim=1) for rows in (train, test))
    reached = (train[slots].double() * test[:, None].double()).sum(2)
    torch.testing.assert_close(reached, similarity, atol=2e-7, rtol=0)
    assert all(len(set(row)) == len(row) for row in slots.tolist())


def both(*found):
    return [torch.cat(parts) for parts in zip(*found, strict=True)]


@pytest.fixture
def always(monkeypatch):
    """Prunes whatever the trial says, and counts how often; 0 axes mean that it may not."""
    used = []

    def force(axes):
        def of(rows, _queries, _count, *, chunk_bytes):
            used.append(axes)
            if not axes:
                return None
            chosen = torch.linalg.eigh(rows.T @ rows)[1].flip(1)[:, :axes]
            return Pruned(rows, chosen, chunk_bytes=chunk_bytes)

        monkeypatch.setattr(knn.Pruned, "of", of)
        return used

    return force


@pytest.mark.parametrize("chunk_bytes", [1, 20_000, 2**20, 2**25])
@pytest.mark.parametrize("axes", [1, 15, 48])
@pytest.mark.parametrize("count", [1, 20, 200])
def test_neighbours_are_those_of_float64(always, monkeypatch, chunk_bytes, axes, count):
    train, test = flat(1500, 48, 1), flat(40, 48, 2)
    expected = exact(train, test, count)
    monkeypatch.setattr(knn, "BYTES", chunk_bytes)
    used = always(axes)
    slots, similarity = both(*neighbours(train, test, count, chunk=17))
    assert used == [axes]
    assert torch.equal(slots, expected[0])
    torch.testing.assert_close(similarity.double(), expected[1], atol=5e-7, rtol=0)


@pytest.mark.parametrize("power", [0.0, 0.5, 2.0])
def test_pruning_changes_nothing_but_the_time(always, power):
    train, test = flat(3001, 64, 1, power), flat(200, 64, 2, power)
    found = {}
    for axes in (0, 8, 40):
        always(axes)
        found[axes] = both(*neighbours(train, test, 30))
    for axes in (8, 40):
        assert torch.equal(found[axes][0], found[0][0])
        torch.testing.assert_close(found[axes][1], found[0][1], atol=5e-7, rtol=0)


@pytest.mark.parametrize("rows", [30, 700, 5000])
def test_parts_of_the_training_rows_change_nothing(always, monkeypatch, rows):
    train, test = flat(1500, 48, 1), flat(40, 48, 2)
    monkeypatch.setattr(knn, "ROWS", rows)
    always(12)
    slots, _ = both(*neighbours(train, test, 9))
    assert torch.equal(slots, exact(train, test, 9)[0])


def test_of_copies_the_first_is_nearer(always):
    train = flat(5000, 96, 1)
    train[-13:], train[2500:2513] = train[:13], train[:13]
    always(20)
    ((slots, _),) = neighbours(train, train[:13], 3)
    assert slots.tolist() == [[i, 2500 + i, 4987 + i] for i in range(13)]


def test_zero_rows_and_rows_in_order_of_class_are_no_trouble(always):
    train = flat(4000, 48, 1, 2.0)
    train = train[(train @ train[0]).argsort()]
    train[100:104] = 0
    test = flat(50, 48, 2, 2.0)
    expected = exact(train, test, 20)[0]
    test = torch.cat([test, torch.zeros(1, 48)])
    always(12)
    slots, similarity = both(*neighbours(train, test, 20))
    assert torch.equal(slots[:-1], expected)
    assert len(set(slots[-1].tolist())) == 20
    assert similarity[-1].eq(0).all()


def test_few_pairs_are_compared_where_few_axes_hold_most(monkeypatch):
    train, test = flat(20_000, 64, 1, 1.5), flat(300, 64, 2, 1.5)
    pairs, compared = [], Pruned._compared

    def counted(self, queries, query, slots):
        pairs.append(len(slots))
        return compared(self, queries, query, slots)

    monkeypatch.setattr(Pruned, "_compared", counted)
    axes = torch.linalg.eigh(train.T @ train)[1].flip(1)[:, :15]
    search = Pruned(train, axes, chunk_bytes=2**20)
    slots, _ = search.nearest(test, 10)
    assert_as_near(train, test, slots)
    assert sum(pairs) < 0.03 * len(train) * len(test)


def trial(power):
    train, test = flat(20_000, 256, 1, power), flat(64, 256, 2, power)
    return leading_axes(train, test, 28, asked=50_000)


def test_the_trial_prunes_flat_features_and_no_round_ones():
    axes = trial(1.25)
    assert axes is not None and axes.shape[1] < 128
    assert trial(0.0) is None


def test_the_trial_is_for_large_searches_and_numbers_only():
    train, test = flat(6000, 16, 1, 3.0), flat(2000, 16, 2, 3.0)
    assert Pruned.of(train[:10], [test[:10]], 5, chunk_bytes=2**20) is None
    assert Pruned.of(train[:300], [test] * 50, 300, chunk_bytes=2**20) is None
    assert Pruned.of(train.double(), [test.double()] * 50, 5, chunk_bytes=2**20) is None
    train[8] = torch.nan
    assert Pruned.of(train, [test] * 50, 5, chunk_bytes=2**20) is None


def test_a_large_search_is_pruned_without_being_told(monkeypatch):
    train, test = flat(20_000, 256, 1, 1.25), flat(900, 256, 2, 1.25)
    made = []
    start = Pruned.__init__

    def noted(self, rows, axes, *, chunk_bytes):
        made.append(axes.shape[1])
        start(self, rows, axes, chunk_bytes=chunk_bytes)

    monkeypatch.setattr(Pruned, "__init__", noted)
    monkeypatch.setattr(pruned, "_WORTH", 1)
    slots, _ = both(*neighbours(train, test, 20))
    assert len(made) == 1
    assert_as_near(train, test, slots)


# The product


@pytest.mark.parametrize("large", [1, 2**40], ids=["numpy", "torch"])
@pytest.mark.parametrize("threads", [1, 2])
def test_either_product_goes_into_the_memory_given(monkeypatch, large, threads):
    monkeypatch.setattr("meanshift.bank._LARGE", large)
    queries, rows = random_rows(9, 20, 1), random_rows(300, 20, 2)
    memory = torch.zeros(9, 64)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        product(queries, rows[::5], memory[:, :60])
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(memory[:, :60], queries @ rows[::5].T)
    assert not memory[:, 60:].any()


def test_numpy_uses_no_more_threads_than_torch(monkeypatch):
    from threadpoolctl import threadpool_info

    def threads():
        return [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]

    seen, before, of_numpy = [], threads(), np.matmul
    monkeypatch.setattr(np, "matmul", lambda *a, **k: (seen.extend(threads()), of_numpy(*a, **k)))
    was = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        product(random_rows(3, 4), random_rows(5, 4), torch.empty(3, 5))
    finally:
        torch.set_num_threads(was)
    assert set(seen) <= {1} and threads() == before
