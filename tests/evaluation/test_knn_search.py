"""k-NN by the compiled search: the neighbors and similarities of torch's operators, bit for bit."""

import pytest
import torch

from meanshift.evaluation import knn
from meanshift.evaluation.knn import knn_accuracy, neighbors
from meanshift.ops import search_kernel

pytestmark = pytest.mark.skipif(
    search_kernel.library() is None, reason="needs a processor with AVX2, Linux and a C compiler"
)


def random_rows(count, dim, seed):
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(seed))


def clustered_rows(count, dim, seed):
    """Rows like those of a network: not negative, around few centers."""
    centers = random_rows(20, dim, 0)
    labels = torch.randint(0, 20, (count,), generator=torch.Generator().manual_seed(seed))
    return (centers[labels] + 0.3 * random_rows(count, dim, seed)).relu()


def search_both_ways(monkeypatch, compute):
    """What a search by torch's operators gives, and what one by the kernel gives."""
    with monkeypatch.context() as patch:
        patch.setattr(search_kernel, "library", lambda: None)
        by_operators = compute()
    searches = []
    search = search_kernel.nearest_rows

    def counted(*arguments, **options):
        searches.append(len(arguments[0]))
        return search(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(search_kernel, "nearest_rows", counted)
        by_kernel = compute()
    assert searches
    return by_operators, by_kernel


def neighbors_both_ways(monkeypatch, train, test, k):
    """Indices and similarities of a search by torch's operators, and of one by the kernel."""

    def compute():
        return [
            torch.cat(parts) for parts in zip(*neighbors(train, test, k, chunk=64), strict=True)
        ]

    return search_both_ways(monkeypatch, compute)


@pytest.mark.parametrize("rows", [333, 65_536])
@pytest.mark.parametrize("make", [random_rows, clustered_rows])
@pytest.mark.parametrize("dim", [6, 512, 2048])
def test_the_results_are_those_of_the_plain_search(monkeypatch, rows, make, dim):
    monkeypatch.setattr(knn, "ROWS", rows)
    train, test = make(1000, dim, 1), make(150, dim, 2)
    plain, ours = neighbors_both_ways(monkeypatch, train, test, 20)
    assert torch.equal(ours[0], plain[0])
    assert torch.equal(ours[1], plain[1])


@pytest.mark.parametrize("rows", [700, 65_536])
@pytest.mark.parametrize("copies", [2, 5, 60])
def test_copies_have_the_order_of_the_plain_search(monkeypatch, rows, copies):
    """Copies of an image are ties; with 60 of them there are more ties than neighbors."""
    monkeypatch.setattr(knn, "ROWS", rows)
    train = clustered_rows(2000, 256, 1)
    for first in range(10):
        places = torch.arange(first, 2000, 2000 // copies)
        train[places] = train[first].clone()
    test = train[:40] * torch.linspace(0.5, 2, 40)[:, None]
    plain, ours = neighbors_both_ways(monkeypatch, train, test, 20)
    assert torch.equal(ours[0], plain[0])
    assert torch.equal(ours[1], plain[1])
    expected = torch.arange(0, 2000, 2000 // copies)[:20]
    assert torch.equal(ours[0][0][: len(expected)], expected)


def test_collapsed_features_have_the_order_of_the_plain_search(monkeypatch):
    """All rows are nearly the same, so float32 decides nothing."""
    center = random_rows(1, 64, 0)
    train = center + 1e-5 * random_rows(800, 64, 1)
    test = center + 1e-5 * random_rows(40, 64, 2)
    plain, ours = neighbors_both_ways(monkeypatch, train, test, 20)
    assert torch.equal(ours[0], plain[0])
    assert torch.equal(ours[1], plain[1])


@pytest.mark.parametrize("temperature", [0.0, 0.07])
def test_the_accuracy_is_that_of_the_plain_search(monkeypatch, temperature):
    train, test = clustered_rows(2000, 32, 1), clustered_rows(500, 32, 2)
    labels = torch.randint(0, 7, (2500,), generator=torch.Generator().manual_seed(0))

    def accuracy():
        return knn_accuracy(
            train, labels[:2000], test, labels[2000:], ks=(1, 20), temperature=temperature
        )

    plain, ours = search_both_ways(monkeypatch, accuracy)
    assert plain == ours
