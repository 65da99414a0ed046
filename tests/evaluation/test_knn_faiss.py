"""k-NN with faiss: the same neighbors and similarities as the plain search, bit for bit."""

import pytest
import torch

from meanshift.evaluation import knn
from meanshift.evaluation.knn import knn_accuracy, neighbors
from tests.support.packages import hide_packages

faiss = pytest.importorskip("faiss")
pytestmark = pytest.mark.extras


def random_rows(count, dim, seed):
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(seed))


def clustered_rows(count, dim, seed):
    """Rows like those of a network: not negative, around few centers."""
    centers = random_rows(20, dim, 0)
    labels = torch.randint(0, 20, (count,), generator=torch.Generator().manual_seed(seed))
    return (centers[labels] + 0.3 * random_rows(count, dim, seed)).relu()


@pytest.fixture
def count_searches(monkeypatch):
    """The number of searches that faiss has done, in a list of one entry."""
    searches = [0]
    search = faiss.knn

    def counted(*arguments, **options):
        searches[0] += 1
        return search(*arguments, **options)

    monkeypatch.setattr(faiss, "knn", counted)
    monkeypatch.setattr(knn, "is_faster_than_faiss", lambda: False)
    return searches


def search_both_ways(monkeypatch, count_searches, train, test, k):
    """Indices and similarities of the plain search and of faiss."""
    results = []
    for work in (10**30, 0):
        monkeypatch.setattr(knn, "FAISS_WORK", work)
        chunks = zip(*neighbors(train, test, k, chunk=64), strict=True)
        results.append([torch.cat(parts) for parts in chunks])
        assert (count_searches[0] > 0) == (work == 0)
    return results


@pytest.mark.parametrize("rows", [333, 65_536])
@pytest.mark.parametrize("make", [random_rows, clustered_rows])
@pytest.mark.parametrize("dim", [6, 512, 2048])
def test_the_results_are_those_of_the_plain_search(monkeypatch, count_searches, rows, make, dim):
    monkeypatch.setattr(knn, "ROWS", rows)
    train, test = make(1000, dim, 1), make(150, dim, 2)
    plain, ours = search_both_ways(monkeypatch, count_searches, train, test, 20)
    assert torch.equal(ours[0], plain[0])
    assert torch.equal(ours[1], plain[1])


@pytest.mark.parametrize("rows", [700, 65_536])
@pytest.mark.parametrize("copies", [2, 5, 60])
def test_copies_have_the_order_of_the_plain_search(monkeypatch, count_searches, rows, copies):
    """Copies of an image are ties; with 60 of them there are more ties than neighbors."""
    monkeypatch.setattr(knn, "ROWS", rows)
    train = clustered_rows(2000, 256, 1)
    for first in range(10):
        places = torch.arange(first, 2000, 2000 // copies)
        train[places] = train[first].clone()
    test = train[:40] * torch.linspace(0.5, 2, 40)[:, None]
    plain, ours = search_both_ways(monkeypatch, count_searches, train, test, 20)
    assert torch.equal(ours[0], plain[0])
    assert torch.equal(ours[1], plain[1])
    expected = torch.arange(0, 2000, 2000 // copies)[:20]
    assert torch.equal(ours[0][0][: len(expected)], expected)


def test_collapsed_features_have_the_order_of_the_plain_search(monkeypatch, count_searches):
    """All rows are nearly the same, so float32 decides nothing."""
    center = random_rows(1, 64, 0)
    train = center + 1e-5 * random_rows(800, 64, 1)
    test = center + 1e-5 * random_rows(30, 64, 2)
    plain, ours = search_both_ways(monkeypatch, count_searches, train, test, 20)
    assert torch.equal(ours[0], plain[0])
    assert torch.equal(ours[1], plain[1])


@pytest.mark.parametrize("temperature", [0.0, 0.07])
def test_the_accuracy_is_that_of_the_plain_search(monkeypatch, count_searches, temperature):
    train, test = clustered_rows(2000, 32, 1), clustered_rows(500, 32, 2)
    labels = torch.randint(0, 7, (2500,), generator=torch.Generator().manual_seed(0))
    results = []
    for work in (10**30, 0):
        monkeypatch.setattr(knn, "FAISS_WORK", work)
        results.append(
            knn_accuracy(
                train, labels[:2000], test, labels[2000:], ks=(1, 20), temperature=temperature
            )
        )
    assert count_searches[0] > 0
    assert results[0] == results[1]


def test_faiss_is_for_large_searches_on_a_linux_cpu_without_avx512(monkeypatch):
    monkeypatch.setattr(knn.sys, "platform", "linux")
    monkeypatch.setattr(knn, "is_faster_than_faiss", lambda: False)
    cpu = torch.device("cpu")
    assert knn._use_faiss(50_000 * 10_000 * 512, cpu)
    assert not knn._use_faiss(1000 * 1000 * 512, cpu)
    assert not knn._use_faiss(50_000 * 10_000 * 512, torch.device("cuda"))
    monkeypatch.setattr(knn, "is_faster_than_faiss", lambda: True)
    assert not knn._use_faiss(50_000 * 10_000 * 512, cpu)
    monkeypatch.setattr(knn, "is_faster_than_faiss", lambda: False)
    monkeypatch.setattr(knn.sys, "platform", "darwin")
    assert not knn._use_faiss(50_000 * 10_000 * 512, cpu)


def test_without_faiss_the_plain_search_is_used(monkeypatch):
    monkeypatch.setattr(knn, "FAISS_WORK", 0)
    monkeypatch.setattr(knn, "is_faster_than_faiss", lambda: False)
    train = random_rows(100, 8, 1)
    with_faiss = list(neighbors(train, train[:10], 3))
    hide_packages(monkeypatch, "faiss")
    ((indices, similarities),) = neighbors(train, train[:10], 3)
    assert torch.equal(indices, with_faiss[0][0])
    assert torch.equal(similarities, with_faiss[0][1])
