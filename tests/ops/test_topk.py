"""The nearest-neighbor search against sorting, in float32 and float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from meanshift.ops import inner_products, search_kernel
from meanshift.ops.topk import (
    EXTRA_CANDIDATES,
    _above_threshold,
    deterministic_neighbors,
    nearest_neighbors,
    stable_topk,
)


@pytest.fixture(params=["kernel", "operators"])
def each_search(request, monkeypatch):
    """Search by the compiled kernel, also few queries, and by torch's operators."""
    if request.param == "operators":
        monkeypatch.setattr(search_kernel, "library", lambda: None)
    elif search_kernel.library() is None:
        pytest.skip("needs a processor with AVX2, Linux and a C compiler")
    monkeypatch.setattr(search_kernel, "MIN_QUERIES", 0)


def random_rows(count, dim, seed=0):
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(seed))


def unit(count, dim, seed=0):
    return F.normalize(random_rows(count, dim, seed), dim=1)


def assert_exact(found, similarity, k):
    indices, similarities = found
    expected = similarity.topk(k)
    torch.testing.assert_close(similarities, expected.values, atol=1e-5, rtol=1e-5)
    assert torch.equal(indices, expected.indices)


@pytest.mark.usefixtures("each_search")
@pytest.mark.parametrize("chunk_bytes", [1, 200_000, 2**24], ids=["tiny", "some", "one"])
@pytest.mark.parametrize("size", [5, 127, 128, 129, 640, 2560, 2561, 6000])
def test_neighbors_are_exact(size, chunk_bytes):
    queries, rows = random_rows(9, 16, 1), random_rows(size, 16, 2)
    for k in (1, 5):
        found = nearest_neighbors(queries, rows, k, chunk_bytes=chunk_bytes)
        assert_exact(found, queries @ rows.T, k)


@pytest.mark.usefixtures("each_search")
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("count", [1, 31, 63, 64, 65, 200])
def test_the_kernel_finds_what_sorting_finds(monkeypatch, count, threads):
    """Whole and incomplete groups of queries, more queries than a part has, and many neighbors."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for dim, size in ((3, 1), (7, 500), (2100, 301)):
        queries, rows = random_rows(count, dim, 1), random_rows(size, dim, 2)
        k = min(size, 250)
        indices, similarities = nearest_neighbors(queries, rows, k)
        exact = (queries.double() @ rows.double().T).sort(dim=1, descending=True)
        torch.testing.assert_close(similarities.double(), exact.values[:, :k], rtol=1e-5, atol=1e-3)
        # equal, but for pairs that are closer than the rounding of float32
        assert (indices == exact.indices[:, :k]).double().mean() > 0.999


def without_rounding(monkeypatch, *arguments, **options):
    with monkeypatch.context() as patch:
        patch.setattr(search_kernel, "ROUND_FIRST", False)
        return search_kernel.nearest_rows(*arguments, **options)


@pytest.fixture
def rounding():
    if search_kernel.library() is None or not torch.cpu.get_capabilities().get("avx512_bf16"):
        pytest.skip("needs a processor with products of bfloat16, Linux and a C compiler")


@pytest.mark.usefixtures("rounding")
@pytest.mark.parametrize("spread", [1.0, 0.03, 0.001])
@pytest.mark.parametrize("dim", [1, 2, 15, 31, 33, 64, 129, 513])
def test_rounding_first_changes_no_bit(monkeypatch, dim, spread):
    """However near the rows are to one another: rounding is then too coarse to tell them apart."""
    center = random_rows(1, dim, 3)
    queries = F.normalize(center + spread * random_rows(150, dim, 1))
    rows = F.normalize(center + spread * random_rows(5000, dim, 2))
    ids = torch.arange(5000) % 150
    for options in (
        {},
        {"exclude": torch.arange(150)},
        {"exclude_ids": (torch.arange(150), ids)},
    ):
        for k in (1, 20):
            found = search_kernel.nearest_rows(queries, rows, k, **options)
            expected = without_rounding(monkeypatch, queries, rows, k, **options)
            assert all(map(torch.equal, found, expected))


@pytest.mark.usefixtures("rounding")
@pytest.mark.parametrize("dim", [1, 2, 3, 64, 513])
def test_rounding_first_changes_no_bit_where_it_errs_most(monkeypatch, dim):
    """1 + 2**-8 is rounded down by half of the last bit, and rows of few values are close."""
    queries = torch.full((64, dim), 1 + 2**-8)
    rows = torch.full((3000, dim), 1.002)
    rows[2000] = 1 + 2**-8
    indices, _ = search_kernel.nearest_rows(queries, rows, 1)
    assert (indices == 2000).all()
    for seed in range(5 if dim <= 3 else 0):
        some, others = unit(512, dim, seed), unit(20_000, dim, 100 + seed)
        found = search_kernel.nearest_rows(some, others, 5)
        expected = without_rounding(monkeypatch, some, others, 5)
        assert all(map(torch.equal, found, expected))


@pytest.mark.usefixtures("rounding")
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-22, 1e-14, 1e-10, 1e10, 1e16, 3e38, torch.inf])
def test_rounding_first_changes_no_bit_of_very_large_or_small_values(monkeypatch, scale):
    queries, rows = random_rows(70, 40, 1), random_rows(3000, 40, 2)
    rows[::7] *= scale
    rows[::11, :20] *= scale
    for some in (queries, queries * scale if 0 < scale < 1e30 else queries):
        found = search_kernel.nearest_rows(some, rows, 5)
        expected = without_rounding(monkeypatch, some, rows, 5)
        assert (found is None) == (expected is None)
        assert found is None or all(map(torch.equal, found, expected))


@pytest.mark.usefixtures("rounding")
@pytest.mark.parametrize("column", [0, 2999])
def test_rounding_first_overlooks_nothing_that_is_not_a_number(column):
    queries, rows = random_rows(70, 40, 1), random_rows(3000, 40, 2)
    rows[column, 39] = torch.nan
    assert search_kernel.nearest_rows(queries, rows, 5) is None


def test_the_kernel_is_used_for_many_queries_only(monkeypatch):
    if search_kernel.library() is None:
        pytest.skip("needs a processor with AVX2, Linux and a C compiler")
    counts = []
    search = search_kernel.nearest_rows

    def counted(queries, *rest, **options):
        counts.append(len(queries))
        return search(queries, *rest, **options)

    monkeypatch.setattr(search_kernel, "nearest_rows", counted)
    rows = unit(100, 16)
    for queries in (rows[:31], rows[:32], rows[:64].double(), rows[:40].bfloat16()):
        nearest_neighbors(queries, rows.to(queries.dtype), 3)
    nearest_neighbors(rows, unit(16, 100).T, 3)
    assert counts == [32]
    assert search_kernel.can_search(rows, rows, 1)
    assert not search_kernel.can_search(rows, rows, 0)
    assert not search_kernel.can_search(rows, rows[:, :15].contiguous(), 1)


@pytest.mark.usefixtures("each_search")
@pytest.mark.parametrize("column", [0, 99])
def test_a_similarity_that_is_not_a_number_is_not_overlooked(column):
    queries, rows = unit(70, 8), unit(100, 8)
    rows[column, 3] = torch.nan
    _, similarities = nearest_neighbors(queries, rows, 5)
    assert similarities.isnan().any(1).all()


@pytest.mark.parametrize("has_onednn", [True, False])
def test_the_neighbors_are_the_same_with_and_without_onednn(monkeypatch, has_onednn):
    queries, rows = unit(50, 64, 1), unit(5000, 64, 2)
    monkeypatch.setattr(search_kernel, "library", lambda: None)
    monkeypatch.setattr(inner_products, "_has_onednn", lambda: has_onednn)
    indices, similarities = deterministic_neighbors(queries, rows, 5)
    exact = (queries.double() @ rows.double().T).topk(5)
    assert torch.equal(indices, exact.indices)
    torch.testing.assert_close(similarities.double(), exact.values, atol=1e-6, rtol=0)


@pytest.mark.usefixtures("each_search")
@pytest.mark.parametrize("chunk_bytes", [1, 2**24])
def test_neighbors_are_exact_when_the_best_are_in_one_block(chunk_bytes):
    rows = random_rows(4096, 8, 0)
    rows[1280:1290] = 10 * torch.ones(8) + torch.arange(10)[:, None]
    indices, _ = nearest_neighbors(torch.ones(2, 8), rows, 7, chunk_bytes=chunk_bytes)
    assert indices.tolist() == [list(range(1289, 1282, -1))] * 2


@pytest.mark.usefixtures("each_search")
@pytest.mark.parametrize("chunk_bytes", [1, 2**24])
@pytest.mark.parametrize("size", [100, 3000])
def test_an_index_and_an_id_can_be_excluded(size, chunk_bytes):
    queries, rows = random_rows(6, 8, 1), random_rows(size, 8, 2)
    similarity = queries @ rows.T
    row_ids = torch.arange(size) % 7
    excluded = similarity.argmax(1)
    query_ids = row_ids[similarity.topk(2).indices[:, 1]]
    allowed = similarity.masked_fill(query_ids[:, None] == row_ids, -torch.inf)
    allowed.scatter_(1, excluded[:, None], -torch.inf)
    found = nearest_neighbors(
        queries,
        rows,
        4,
        exclude=excluded,
        exclude_ids=(query_ids, row_ids),
        chunk_bytes=chunk_bytes,
    )
    assert_exact(found, allowed, 4)


@pytest.mark.usefixtures("each_search")
def test_the_similarity_is_minus_infinity_where_no_row_is_left():
    rows = random_rows(3, 4)
    _, similarities = nearest_neighbors(rows, rows, 5, exclude=torch.arange(3))
    assert similarities.isinf().sum(1).tolist() == [3, 3, 3]


@pytest.mark.usefixtures("each_search")
def test_no_query_has_no_neighbors():
    indices, _ = nearest_neighbors(unit(0, 4), unit(10, 4), 3)
    assert indices.shape == (0, 3)


@pytest.mark.usefixtures("each_search")
@pytest.mark.parametrize("copies", [3, 40])
def test_among_equal_rows_the_lower_index_comes_first(copies):
    rows = unit(6, 24).repeat(copies, 1)  # rows i, i + 6, ... are equal
    queries = unit(6, 24)
    indices, similarities = deterministic_neighbors(queries, rows, 3)
    assert indices.tolist() == [[i, i + 6, i + 12] for i in range(6)]
    assert (similarities[:, :1] == similarities).all()
    others, _ = deterministic_neighbors(queries, rows, 3, exclude=torch.arange(6))
    expected = [[i + 6, i + 12, i + 18] for i in range(6)]
    assert others[:, :2].tolist() == [row[:2] for row in expected]
    assert copies <= EXTRA_CANDIDATES or others.tolist() == expected


@pytest.mark.usefixtures("each_search")
@pytest.mark.parametrize("shape", [(1, 3), (7, 64), (32, 1000), (5, 4097)])
def test_the_order_is_that_of_float64_whatever_the_chunks(shape):
    queries, rows = unit(shape[0], 48, 1), unit(shape[1], 48, 2)
    exact = (queries.double() @ rows.double().T).float()
    expected = exact.sort(dim=1, descending=True, stable=True)
    for chunk_bytes in (1, 2**14, 2**24):
        for exact_similarities in (False, True):
            indices, similarities = deterministic_neighbors(
                queries, rows, 3, chunk_bytes=chunk_bytes, exact_similarities=exact_similarities
            )
            assert torch.equal(indices, expected.indices[:, :3])
            torch.testing.assert_close(similarities, expected.values[:, :3], rtol=0, atol=1e-6)
        assert torch.equal(similarities, expected.values[:, :3])


@pytest.mark.usefixtures("each_search")
def test_rows_that_differ_by_rounding_errors_are_found_in_order():
    """A collapsed network: all rows are equal up to a rounding error."""
    noise = random_rows(5000, 32)
    rows = F.normalize(unit(1, 32) + 1e-8 * noise)
    queries = F.normalize(unit(1, 32) + 1e-8 * noise[:9])
    exact = (queries.double() @ rows.double().T).float()
    expected = exact.sort(dim=1, descending=True, stable=True)
    for chunk_bytes in (2**14, 2**24):
        for exact_similarities in (False, True):
            indices, similarities = deterministic_neighbors(
                queries, rows, 4, chunk_bytes=chunk_bytes, exact_similarities=exact_similarities
            )
            assert torch.equal(indices, expected.indices[:, :4])
            assert torch.equal(similarities, expected.values[:, :4])
    rough, _ = nearest_neighbors(queries, rows, 4)
    assert not torch.equal(rough, indices)  # or this test shows nothing


def test_a_stable_topk_sorts_by_similarity_and_then_by_index():
    indices = torch.tensor([[7, 3, 9, 1, 5]])
    similarities = torch.tensor([[0.5, 0.9, 0.5, 0.2, 0.5]])
    best, values = stable_topk(indices, similarities, 3)
    assert best.tolist() == [[3, 5, 7]]
    assert values.tolist() == [[pytest.approx(0.9), 0.5, 0.5]]


@settings(max_examples=60, derandomize=True)
@given(
    batch=st.integers(0, 4),
    rows=st.sampled_from([1, 5, 63, 64, 128, 192]),
    seed=st.integers(0, 2**20),
)
def test_values_above_a_threshold_are_all_found(batch, rows, seed):
    """There are few different values, so that many are equal to the threshold, not above it."""
    generator = torch.Generator().manual_seed(seed)
    similarity = torch.randint(0, 4, (batch, rows), generator=generator).float()
    threshold = torch.randint(-1, 4, (batch, 1), generator=generator).float()
    values, columns = _above_threshold(similarity, threshold)
    expected = [
        [(column, value) for column, value in enumerate(row) if value > threshold[query]]
        for query, row in enumerate(similarity.tolist())
    ]
    assert values.shape[1] == max(map(len, expected), default=0)
    for query, pairs in enumerate(expected):
        padding = [-torch.inf] * (values.shape[1] - len(pairs))
        assert columns[query, : len(pairs)].tolist() == [column for column, _ in pairs]
        assert values[query].tolist() == [value for _, value in pairs] + padding
