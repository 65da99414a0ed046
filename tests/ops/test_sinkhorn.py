"""Sinkhorn against a naive matrix version, an optimal assignment, and several processes."""

import pytest
import torch
from scipy.optimize import linear_sum_assignment

from meanshift.ops.sinkhorn import balanced_labels, sinkhorn
from meanshift.runtime import distributed
from tests.support.forked import in_processes
from tests.support.multi_crop import unit_rows


def scores(samples=7, prototypes=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.rand(samples, prototypes, generator=generator, dtype=torch.float64) - 1


def naive_sinkhorn(scores, epsilon, iterations):
    """The paper's algorithm: a matrix of exponentials, its sums made equal one at a time."""
    n, k = scores.shape
    q = (scores / epsilon).exp()
    q = q / q.sum()
    for _ in range(iterations):
        for j in range(k):
            q[:, j] /= q[:, j].sum() * k
        for i in range(n):
            q[i] /= q[i].sum() * n
    return q * n


def rows_and_prototypes(n=60, k=5, dim=6):
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(n + k, dim, generator=generator, dtype=torch.float64)
    return unit_rows(values[:n]), unit_rows(values[n:])


@pytest.mark.parametrize("iterations", [1, 3, 7])
def test_it_is_the_naive_algorithm_after_each_number_of_rounds(iterations):
    expected = naive_sinkhorn(scores(), 0.05, iterations)
    found = sinkhorn(scores(), epsilon=0.05, iterations=iterations)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-14)


def test_many_rounds_give_every_prototype_the_same_share():
    codes = sinkhorn(scores(40, 5), epsilon=0.1, iterations=200)
    torch.testing.assert_close(codes.sum(1), torch.ones(40).double())
    torch.testing.assert_close(codes.sum(0), torch.full((5,), 8.0).double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_small_epsilon_does_not_overflow(dtype):
    codes = sinkhorn(scores(40, 5).to(dtype), epsilon=1e-3, iterations=10)
    assert codes.dtype == torch.float32
    torch.testing.assert_close(codes.sum(1), torch.ones(40))


def test_no_gradient_flows_through_the_codes():
    assert not sinkhorn(scores().requires_grad_()).requires_grad


def own_codes(sizes):
    parts = scores(sum(sizes)).split(sizes)
    return sinkhorn(parts[distributed.rank()])


def test_two_processes_with_parts_of_their_own_share_the_prototypes():
    found = torch.cat(in_processes(2, own_codes, [5, 2]))
    torch.testing.assert_close(found, sinkhorn(scores(7)), rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("chunk", [7, 1000])
def test_labels_are_those_of_the_converged_naive_algorithm(chunk):
    rows, prototypes = rows_and_prototypes()
    options = {"epsilon": 0.05, "iterations": 500, "tolerance": 1e-9}
    labels = balanced_labels(rows, prototypes, **options, chunk=chunk)
    assert torch.equal(labels, naive_sinkhorn(rows @ prototypes.T, 0.05, 500).argmax(1))


def test_sharp_labels_are_nearly_the_best_balanced_assignment():
    rows, prototypes = rows_and_prototypes()
    cosines = rows @ prototypes.T
    places, columns = linear_sum_assignment(-cosines.repeat(1, 12).numpy())
    best = cosines[places, columns % 5].mean()
    options = {"epsilon": 0.004, "iterations": 2000, "tolerance": 1e-3}
    labels = balanced_labels(rows.float(), prototypes.float(), **options)
    assert labels.bincount(minlength=5).sub(12).abs().max() <= 1
    assert cosines[torch.arange(60), labels].mean() == pytest.approx(float(best), abs=0.01)
    assert (cosines.argmax(1).bincount(minlength=5) - 12).abs().max() > 3  # not balanced before


def test_the_rounds_end_at_the_tolerance():
    rows, prototypes = rows_and_prototypes()
    nearest = (rows @ prototypes.T).argmax(1)
    kept = balanced_labels(rows, prototypes, epsilon=0.05, tolerance=100.0)
    assert torch.equal(kept, nearest)
    assert not torch.equal(balanced_labels(rows, prototypes, epsilon=0.05), nearest)


def test_two_processes_find_the_labels_of_one():
    rows, prototypes = rows_and_prototypes(61)
    alone = balanced_labels(rows, prototypes, epsilon=0.05)
    for labels in in_processes(2, lambda: balanced_labels(rows, prototypes, epsilon=0.05)):
        assert torch.equal(labels, alone)
