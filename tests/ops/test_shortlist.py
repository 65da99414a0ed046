"""The search by bytes: bounds never below the products, and the neighbors of brute force."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from meanshift.evaluation import knn
from meanshift.evaluation.knn import neighbors
from meanshift.ops import shortlist
from meanshift.ops.shortlist import Shortlist, _Asked, _Rounded, multiplies_bytes
from meanshift.ops.topk import nearest

pytestmark = pytest.mark.skipif(  # not by `multiplies_bytes`: what is broken may not be skipped
    "onednn" not in torch.backends.quantized.supported_engines, reason="no product of bytes here"
)
BYTES = 2**20


def random_rows(count, dim, seed=0):
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(seed))


def flat(count, dim, seed, power=1.0):
    """Unit rows whose axes carry less and less, as features do."""
    turn = torch.linalg.qr(random_rows(dim, dim, 99))[0]
    return F.normalize(random_rows(count, dim, seed) * torch.arange(1, dim + 1) ** -power @ turn)


def whole_numbers(most, count, dim, seed=0):
    """Each row has its most, so that nothing is left to round where the mean row is zero."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(-most, most + 1, (count, dim), generator=generator).float()
    rows[torch.arange(count), torch.arange(count) % dim] = float(most)
    return rows


# The bound

KINDS = (
    "random", "parallel", "copies", "low rank", "lengths", "zero", "all zero", "huge", "shifted",
    "whole", "coarse", "lost", "found",
)  # fmt: skip


def made(kind, seed, count, dim):
    rows = random_rows(count, dim, seed)
    if kind == "parallel":
        rows = rows[:1] + 1e-4 * rows
    elif kind == "copies":
        rows = random_rows(1, dim, seed // 2).repeat(count, 1)  # at times those of the other side
    elif kind == "low rank":
        rows = random_rows(count, 2, seed) @ random_rows(2, dim, seed + 1)
    elif kind == "lengths":
        rows = rows * 10.0 ** torch.linspace(-3, 3, count)[:, None]
    elif kind == "zero":
        rows[::2] = 0
    elif kind == "all zero":
        rows = torch.zeros(count, dim)
    elif kind == "huge":  # the rest of the row is nearly all rounded away
        rows[:, seed % dim] = 1e3
    elif kind == "shifted":
        rows = rows + 30 * random_rows(1, dim, seed // 2)
    elif kind == "whole":
        rows = whole_numbers(127, count, dim, seed)
    elif kind == "coarse":
        rows = whole_numbers(63, count, dim, seed)
    elif kind == "lost":  # what is rounded away points where "found" does
        rows = torch.full((count, dim), 0.499)
        rows[:, 0] = 127
    elif kind == "found":
        rows = torch.ones(count, dim)
        rows[:, 0] = 0
    return rows


def assert_bounded(queries, rows):
    """For the sum with `along`, and for the bar as the search makes it, which must be exceeded."""
    center = rows.mean(0)
    asked = _Asked(queries, center, float(rows.norm(dim=1).max()))
    bound = _Rounded(rows, center).bound(asked)
    assert bound.shape == (len(queries), -(-len(rows) // 64) * 64)
    assert bound[:, len(rows) :].eq(-torch.inf).all()
    bound = bound[:, : len(rows)]
    product = queries @ rows.T
    assert (bound + asked.along >= product).all()
    precise = queries.double() @ rows.double().T
    assert (bound.double() + asked.along.double() >= precise).all()
    if queries.any() or rows.any():
        assert (bound > product - asked.along).all()
        one_by_one = (queries[:, None] * rows).sum(2)
        assert (bound > one_by_one - asked.along).all()


@given(
    seed=st.integers(0, 2**20),
    dim=st.integers(2, 300),
    batch=st.integers(1, 6),
    size=st.sampled_from([1, 7, 64, 65]),
    kinds=st.tuples(st.sampled_from(KINDS), st.sampled_from(KINDS)),
    mirrored=st.booleans(),
    unit=st.booleans(),
    own=st.booleans(),
)
@settings(deadline=None, max_examples=250, derandomize=True)
def test_the_bound_is_never_below_a_product(seed, dim, batch, size, kinds, mirrored, unit, own):
    queries, rows = made(kinds[0], seed, batch, dim), made(kinds[1], seed + 1, size, dim)
    if mirrored:  # the mean row is then zero
        rows = torch.cat([rows, -rows])
    if unit:
        queries, rows = F.normalize(queries), F.normalize(rows)
    if own:
        queries = torch.cat([queries, rows[:2]])
    assert_bounded(queries, rows)


@pytest.mark.parametrize("dim", [2, 64, 300])
@pytest.mark.parametrize("unit", [False, True])
@pytest.mark.parametrize(
    ("asked", "kept"),
    [
        ("lost", "found"),  # the queries lose all of what counts
        ("found", "lost"),  # the rows do
        ("coarse", "whole"),  # nothing is lost, and only the slack is left
        ("coarse", "coarse"),
        ("copies", "copies"),
        ("shifted", "shifted"),
        ("huge", "lengths"),
        ("lengths", "huge"),
    ],
)
def test_the_bound_holds_where_it_is_tight(asked, kept, dim, unit):
    queries, rows = made(asked, 2, 5, dim), made(kept, 3, 40, dim)
    rows = torch.cat([rows, -rows]) if asked not in ("copies", "shifted") else rows
    if unit:
        queries, rows = F.normalize(queries), F.normalize(rows)
    for some in (queries, queries[:1]):
        assert_bounded(some, rows)


def test_the_bound_is_close():
    """Else nothing would be left out: the wrong scale may not hide in a large error."""
    queries, rows = flat(50, 64, 1), flat(300, 64, 2)
    asked = _Asked(queries, rows.mean(0), 1.0)
    bound = _Rounded(rows, rows.mean(0)).bound(asked)[:, :300] + asked.along
    over = bound - queries @ rows.T
    assert over.min() > 0 and over.max() < 0.12
    assert asked.slack < 1e-4


@pytest.mark.parametrize("dim", [2, 3, 63, 64, 65, 300, 1000])
def test_all_whole_numbers_are_multiplied_exactly(dim):
    """Bytes from 1 to 127 by -127 to 127, and sums of the largest, which fill 16 bits."""
    queries, rows = whole_numbers(63, 127, dim), whole_numbers(127, 255, dim, 1)
    queries[:, 0], queries[:, -1] = 63, torch.arange(-63.0, 64)
    rows[:, 0], rows[:, -1] = 127, torch.arange(-127.0, 128)
    signs = torch.ones(3, dim)
    signs[1], signs[2, ::2] = -1, -1
    queries, rows = torch.cat([queries, 63 * signs]), torch.cat([rows, 127 * signs])
    asked, kept = _Asked(queries, torch.zeros(dim), 1.0), _Rounded(rows, torch.zeros(dim))
    assert asked.scale == 1 and asked.error == 0
    assert kept.scale.eq(1).all() and kept.error.eq(0).all()
    assert torch.equal(asked.whole, (queries + 64).to(torch.uint8))
    assert asked.whole.unique().tolist() == list(range(1, 128))
    assert rows.unique().tolist() == list(range(-127, 128))
    asked.slack = 0.0
    expected = queries.double() @ rows.double().T
    assert expected.abs().max() == 63 * 127 * dim
    assert torch.equal(kept.bound(asked)[:, : len(rows)].double(), expected)


def test_a_product_that_overflows_or_fails_is_not_used(monkeypatch):
    check = multiplies_bytes.__wrapped__
    assert check()
    bound = _Rounded.bound
    for most in (63.0, 32.0):
        monkeypatch.setattr(_Rounded, "bound", lambda *of, m=most: bound(*of).clamp(-m, m))
        assert not check()
    for error in (AttributeError, RuntimeError, NotImplementedError):

        def missing(*_, error=error):
            raise error("none here")

        monkeypatch.setattr(_Rounded, "bound", missing)
        assert not check()


# The rounded rows

MEASURE = """
import resource, torch
from meanshift.shortlist import _Rounded
torch.set_num_threads(1)
rows = torch.randn(20_000, 1024)
center = rows.mean(0)
_Rounded(rows[:2048], center)  # what is loaded by the first call
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
_Rounded(rows, center)
print(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="another system counts in other units")
def test_rows_are_rounded_without_copies_of_all_of_them():
    """Beside the bytes, packed and not, there are some slices; once there were five copies."""
    told = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, check=True).stdout
    assert int(told) < 2.2 * 20_000 * 1024 + 4 * 1024 * 1024 * 4


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("count", "dim"), [(1, 3), (1023, 64), (1024, 64), (1025, 64), (4097, 300), (5000, 512)]
)
def test_slices_are_rounded_as_all_rows_at_once(monkeypatch, count, dim, threads):
    rows, packed = random_rows(count, dim) + 0.3, []
    rows[0], center = rows.mean(0), rows.mean(0)  # a row of nearly zeros among them
    prepack = torch.ops.onednn.qlinear_prepack

    def noted(whole, shape):
        packed.append(whole)
        return prepack(whole, shape)

    monkeypatch.setattr(torch.ops.onednn, "qlinear_prepack", noted)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        got = _Rounded(rows, center)
        y = rows - center
        scale = y.abs().amax(1, keepdim=True) / 127
        scale = torch.where(scale > 0, scale, 1.0)
        whole = (y / scale).round().clamp(-127, 127)
        assert torch.equal(packed[0][:count], whole.to(torch.int8))
        assert packed[0][count:].eq(0).all() and packed[0].shape == (-(-count // 64) * 64, dim)
        assert torch.equal(got.scale[:count], scale[:, 0]) and got.scale[count:].eq(1).all()
        assert torch.equal(got.length, (whole * scale).norm(dim=1))
        assert torch.equal(got.error, (y - whole * scale).norm(dim=1))
        torch.testing.assert_close(got.offset[:count], y @ center)  # its order is the library's
        assert got.offset[count:].eq(-torch.inf).all()
    finally:
        torch.set_num_threads(before)


# The search


def exact(rows, queries, count):
    """Brute force in float64; of equals the first."""
    similarity = queries.double() @ rows.double().T
    best, order = similarity.sort(dim=1, stable=True, descending=True)
    return order[:, :count], best[:, :count]


def assert_as_near(rows, queries, found, atol=1e-6):
    """The neighbors of brute force, but for swaps of those that float32 makes equal."""
    slots, best = found
    expected, similarity = exact(rows, queries, slots.shape[1])
    assert (slots == expected).double().mean() > 0.99
    reached = (rows[slots].double() * queries[:, None].double()).sum(2)
    torch.testing.assert_close(reached, similarity, atol=atol, rtol=0)
    torch.testing.assert_close(best.double(), similarity, atol=atol, rtol=0)
    assert all(len(set(row)) == len(row) for row in slots.tolist())


@pytest.fixture
def parts(monkeypatch):
    """How many queries were searched by bytes at a time, and of how many at a time by `plain`."""
    seen, by_bytes = {"bytes": [], "plain": []}, Shortlist._nearest

    def noted(self, queries, count):
        seen["bytes"].append(len(queries))
        return by_bytes(self, queries, count)

    def plain(queries, rows, count, *, chunk_bytes):
        seen["plain"].append(len(queries))
        return nearest(queries, rows, count, chunk_bytes=chunk_bytes)

    monkeypatch.setattr(Shortlist, "_nearest", noted)
    monkeypatch.setattr(shortlist, "nearest", plain)
    return seen


@pytest.fixture
def pairs(monkeypatch):
    """How many pairs were compared, call by call: first for the bars, then of the lists."""
    seen, compared = [], Shortlist._compared

    def counted(self, queries, query, slots):
        seen.append(len(slots))
        return compared(self, queries, query, slots)

    monkeypatch.setattr(Shortlist, "_compared", counted)
    return seen


@pytest.fixture
def cheap(monkeypatch):
    """No list is too long, so that none is left to the plain search."""
    monkeypatch.setattr(shortlist, "_of_a_pair", lambda _: 0.0)


@pytest.mark.usefixtures("cheap")
@pytest.mark.parametrize("power", [0.0, 1.0, 2.0])
@pytest.mark.parametrize(
    ("count", "size"), [(1, 64), (1, 65), (3, 193), (20, 1500), (20, 1536), (200, 12_801)]
)
def test_the_search_finds_what_float64_does(parts, count, size, power):
    rows, queries = flat(size, 48, 1, power), flat(40, 48, 2, power)
    assert_as_near(rows, queries, Shortlist(rows, chunk_bytes=BYTES).nearest(queries, count))
    assert parts == {"bytes": [40], "plain": []}


@given(
    seed=st.integers(0, 2**20),
    dim=st.integers(2, 100),
    size=st.integers(300, 700),
    kinds=st.tuples(st.sampled_from(KINDS), st.sampled_from(KINDS)),
    count=st.integers(1, 5),
)
@settings(deadline=None, max_examples=80, derandomize=True)
def test_the_search_is_as_good_for_any_rows(seed, dim, size, kinds, count):
    queries, rows = made(kinds[0], seed, 6, dim), made(kinds[1], seed + 1, size, dim)
    if not (queries.any() or rows.any()):
        return
    slots, best = Shortlist(rows, chunk_bytes=BYTES).nearest(queries, count)
    assert slots.max() < size and all(len(set(row)) == count for row in slots.tolist())
    product = queries.double() @ rows.double().T
    near = float(queries.norm(dim=1).max() * rows.norm(dim=1).max()) * 1e-6
    expected = product.topk(count).values
    torch.testing.assert_close(product.gather(1, slots), expected, atol=near, rtol=0)
    torch.testing.assert_close(best.double(), expected, atol=near, rtol=0)


@pytest.mark.usefixtures("cheap")
@pytest.mark.parametrize("length", [1e-3, 1e3])
def test_lengths_do_not_matter(length):
    rows = flat(1000, 48, 1) * torch.linspace(1, 2, 1000)[:, None]
    queries = flat(30, 48, 2)
    found = Shortlist(length * rows, chunk_bytes=BYTES).nearest(queries / length, 9)
    assert_as_near(rows, queries, found)


@pytest.mark.usefixtures("cheap")
@pytest.mark.parametrize("together", [1, 7, 40, 41])
def test_parts_of_the_queries_change_nothing(parts, monkeypatch, together):
    rows, queries = flat(1500, 48, 1), flat(40, 48, 2)
    monkeypatch.setattr(shortlist, "_TOGETHER", together)
    assert_as_near(rows, queries, Shortlist(rows, chunk_bytes=BYTES).nearest(queries, 9))
    whole, rest = divmod(40, together)
    assert parts == {"bytes": [together] * whole + [rest] * (rest > 0), "plain": []}


def test_lists_that_are_too_long_are_left_to_the_plain_search(parts, pairs, monkeypatch):
    rows, queries = flat(1500, 48, 1), flat(40, 48, 2)
    monkeypatch.setattr(shortlist, "_TOGETHER", 16)
    monkeypatch.setattr(shortlist, "_of_a_pair", lambda _: 1e9)
    search = Shortlist(rows, chunk_bytes=BYTES)
    assert_as_near(rows, queries, search.nearest(queries, 9))
    assert parts == {"bytes": [16], "plain": [16, 24]}
    assert pairs == [16 * 9]  # for the bars only
    assert not search.pays
    assert_as_near(rows, queries, search.nearest(queries, 9))
    assert parts == {"bytes": [16], "plain": [16, 24, 40]}


def test_lists_that_hardly_pay_are_compared_but_no_more_are_made(parts, pairs, monkeypatch):
    rows, queries = flat(1500, 48, 1), flat(40, 48, 2)
    monkeypatch.setattr(shortlist, "_TOGETHER", 16)
    monkeypatch.setattr(shortlist, "_of_a_pair", lambda _: 1e-9)
    monkeypatch.setattr(shortlist, "_PAYS", 0.0)
    search = Shortlist(rows, chunk_bytes=BYTES)
    assert_as_near(rows, queries, search.nearest(queries, 9))
    assert parts == {"bytes": [16], "plain": [24]} and len(pairs) == 2
    assert not search.pays


def test_rows_that_crowd_do_not_pay(parts):
    rows = F.normalize(random_rows(1, 64) + 1e-3 * random_rows(2000, 64, 1))
    queries = rows[:20]
    search = Shortlist(rows, chunk_bytes=BYTES)
    slots, _ = search.nearest(queries, 5)
    assert not search.pays and parts == {"bytes": [20], "plain": [20]}
    assert slots.shape == (20, 5)


def test_few_pairs_are_compared(parts, pairs):
    rows, queries = flat(20_000, 128, 1, 0.5), flat(100, 128, 2, 0.5)
    search = Shortlist(rows, chunk_bytes=BYTES)
    assert_as_near(rows, queries, search.nearest(queries, 10))
    bars, lists = pairs
    assert bars == 100 * 10 <= lists < 0.002 * len(rows) * len(queries)
    assert search.pays and parts == {"bytes": [100], "plain": []}


@pytest.mark.usefixtures("cheap")
def test_bars_are_set_by_good_rows(pairs):
    """By the most promising ones, of whatever blocks; with worse ones the lists were longer."""
    rows, queries = flat(9000, 64, 1), flat(50, 64, 2)
    Shortlist(rows, chunk_bytes=BYTES).nearest(queries, 10)
    center = rows.mean(0)
    asked = _Asked(queries, center, 1.0)
    bound = _Rounded(rows, center).bound(asked)[:, :9000] + asked.along
    least = (bound > exact(rows, queries, 10)[1][:, -1:]).sum()
    assert least <= pairs[1] < 1.3 * least


# Which searches


@pytest.fixture
def worth(monkeypatch):
    monkeypatch.setattr(shortlist, "_WORTH", 1)


def test_small_searches_are_left_to_the_plain_one(monkeypatch):
    rows, queries = flat(1024, 16, 1), [flat(7, 16, 2), flat(3, 16, 3)]
    assert Shortlist.of(rows, queries, 4) is None
    monkeypatch.setattr(shortlist, "_WORTH", 1024 * 16 * 10 + 1)
    assert Shortlist.of(rows, queries, 4) is None
    monkeypatch.setattr(shortlist, "_WORTH", 1024 * 16 * 10)
    assert Shortlist.of(rows, queries, 4) is not None
    assert Shortlist.of(rows, queries, 5) is None  # so few rows are no shortlist of blocks
    assert Shortlist.of(rows[:-1], queries * 2, 4) is None


@pytest.mark.usefixtures("worth")
def test_only_float32_is_rounded():
    rows = flat(1024, 16, 1)
    assert Shortlist.of(rows, [rows], 4) is not None
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        assert Shortlist.of(rows.to(dtype), [rows.to(dtype)], 4) is None
    assert Shortlist.of(rows.to("meta"), [rows], 4) is None


@pytest.mark.usefixtures("worth")
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_rows_that_are_no_numbers_are_left_to_the_plain_search(wrong):
    rows = flat(1024, 16, 1)
    rows[1000, 3] = wrong
    assert Shortlist.of(rows, [rows], 4) is None


@pytest.mark.usefixtures("worth")
def test_without_a_product_of_bytes_the_plain_search_finds_the_same(parts, monkeypatch):
    train, test = flat(3000, 48, 1), flat(40, 48, 2)
    assert_as_near(train, test, both(*neighbors(train, test, 2)))
    assert parts["bytes"] == [40]
    monkeypatch.setattr(shortlist, "multiplies_bytes", lambda: False)
    assert Shortlist.of(train, [test], 2) is None
    assert_as_near(train, test, both(*neighbors(train, test, 2)))
    assert parts["bytes"] == [40]


# Neighbors


def both(*found):
    return [torch.cat(of) for of in zip(*found, strict=True)]


@pytest.fixture
def always(monkeypatch):
    """By bytes however small the search, as long as there are as many blocks as neighbors."""

    def of(rows, _queries, count, *, chunk_bytes):
        made.append(len(rows))
        return Shortlist(rows, chunk_bytes=chunk_bytes) if len(rows) >= 64 * count else None

    made = []
    monkeypatch.setattr(knn.Shortlist, "of", of)
    monkeypatch.setattr(shortlist, "_of_a_pair", lambda _: 0.0)
    return made


@pytest.mark.parametrize(("count", "size"), [(1, 1500), (14, 1500), (200, 13_350)])
def test_neighbors_are_those_of_float64(always, parts, count, size):
    train, test = flat(size, 48, 1), flat(40, 48, 2)
    found = both(*neighbors(3 * train, test / 3, count, chunk=17))
    assert always == [size] and parts == {"bytes": [17, 17, 6], "plain": []}
    assert_as_near(train, test, found)


@pytest.mark.parametrize("rows", [30, 700, 1000, 5000])
def test_parts_of_the_training_rows_change_nothing(always, monkeypatch, rows):
    train, test = flat(1500, 48, 1), flat(40, 48, 2)
    monkeypatch.setattr(knn, "ROWS", rows)
    assert_as_near(train, test, both(*neighbors(train, test, 2)))
    assert always == [min(rows, 1500 - at) for at in range(0, 1500, rows)]


def test_a_large_search_is_by_bytes_without_being_told(parts, monkeypatch):
    train, test = flat(8000, 128, 1, 0.5), flat(600, 128, 2, 0.5)
    monkeypatch.setattr(shortlist, "_WORTH", 8000 * 128 * 600 + 1)
    expected = both(*neighbors(train, test, 2, chunk=550))
    assert parts["bytes"] == []
    monkeypatch.setattr(shortlist, "_WORTH", 8000 * 128 * 600)
    found = both(*neighbors(train, test, 2, chunk=550))
    assert parts["bytes"] == [512, 38, 50]
    assert_as_near(train, test, found)
    assert (found[0] == expected[0]).double().mean() > 0.999
    torch.testing.assert_close(found[1], expected[1], atol=5e-7, rtol=0)


@pytest.mark.usefixtures("always")
def test_of_copies_the_first_is_nearer(parts):
    train = flat(5000, 96, 1)
    train[-13:], train[2500:2513] = train[:13], train[:13]
    ((slots, _),) = neighbors(train, train[:13], 3)
    assert slots.tolist() == [[i, 2500 + i, 4987 + i] for i in range(13)]
    assert parts["bytes"] == [13]


@pytest.mark.usefixtures("always")
def test_zero_rows_and_rows_in_order_of_class_are_no_trouble(parts):
    train = flat(4000, 48, 1, 2.0)
    train = train[(train @ train[0]).argsort()]
    train[100:104] = 0
    test = torch.cat([flat(50, 48, 2, 2.0), torch.zeros(1, 48)])
    slots, similarity = both(*neighbors(train, test, 20))
    assert parts["bytes"] == [51]
    assert_as_near(train, test[:-1], (slots[:-1], similarity[:-1]))
    assert len(set(slots[-1].tolist())) == 20
    assert similarity[-1].eq(0).all()


# What no encoder should make, but a broken one does


@pytest.mark.parametrize("length", [0.0, 1e-30])
def test_rows_and_queries_of_hardly_any_length_are_searched(length):
    rows = length * flat(1024, 16, 1)
    slots, best = Shortlist(rows, chunk_bytes=BYTES).nearest(rows[:5], 4)
    assert slots.shape == (5, 4) and best.eq(0).all()


@pytest.mark.usefixtures("worth")
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_a_query_that_is_no_number_does_not_spoil_the_others(wrong):
    train, test = flat(4096, 16, 1), flat(9, 16, 2)
    expected = both(*neighbors(train, test, 4))[0]
    test[3, 5] = wrong
    slots, _ = both(*neighbors(train, test, 4))
    keep = torch.arange(9) != 3
    assert torch.equal(slots[keep], expected[keep])


@pytest.mark.usefixtures("worth")
def test_queries_of_another_type_are_searched():
    train, test = flat(4096, 16, 1), flat(9, 16, 2)
    slots, _ = both(*neighbors(train, test.double(), 4))
    assert torch.equal(slots, exact(train, test, 4)[0])
