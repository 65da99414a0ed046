"""Averages between two log lines: weighted by samples, over all processes, saved and restored."""

import pytest
import torch

from meanshift.methods import StepOutput
from meanshift.training.metrics import MetricAverages
from tests.support.forked import in_processes


def output(loss, count, **metrics):
    pairs = {name: (torch.tensor(mean), weight) for name, (mean, weight) in metrics.items()}
    return StepOutput(torch.tensor(loss), torch.zeros(count, 2), pairs)


def test_means_are_weighted_by_the_number_of_samples():
    averages = MetricAverages()
    averages.add(output(1.0, 3, purity=(0.5, 2)))
    averages.add(output(2.0, 1, purity=(1.0, torch.tensor(6.0)), other=(7.0, 1)))
    assert averages.compute() == {"loss": 1.25, "purity": 0.875, "other": 7.0}


def test_the_sums_start_again_after_each_line():
    averages = MetricAverages()
    averages.add(output(1.0, 3))
    averages.compute()
    averages.add(output(5.0, 1))
    assert averages.compute() == {"loss": 5.0}
    assert averages.compute() == {}


def test_a_metric_of_no_sample_is_left_out():
    averages = MetricAverages()
    averages.add(output(1.0, 3, purity=(0.0, 0)))
    assert averages.compute() == {"loss": 1.0}


def test_no_gradient_is_followed():
    averages = MetricAverages()
    loss = torch.tensor(1.0, requires_grad=True)
    averages.add(StepOutput(loss, torch.zeros(1, 2)))
    assert not averages.sums["loss"].requires_grad


def of_rank(saved=None):
    """The averages of processes with 1, 2, ... samples, saved half way."""
    from meanshift.runtime import distributed

    averages, count = MetricAverages(), distributed.rank() + 1
    if saved is not None:
        averages.load_state_dict(saved)
    averages.add(output(float(count), count))
    return averages.state_dict(), averages.compute()["loss"]


def test_processes_have_the_mean_over_all_their_samples():
    results = in_processes(2, of_rank)
    assert [mean for _, mean in results] == pytest.approx([(1 + 2 * 2) / 3] * 2)


@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 2), (2, 1), (1, 3)])
def test_saved_sums_are_restored_in_any_number_of_processes(before, after):
    saved = in_processes(before, of_rank)[0][0]
    assert len(saved) == before
    samples = [*range(1, before + 1), *range(1, after + 1)]
    expected = sum(count**2 for count in samples) / sum(samples)
    results = in_processes(after, of_rank, saved)
    assert [mean for _, mean in results] == pytest.approx([expected] * after)
