"""Schedules of k and of the target's momentum, through the method that follows them."""

import math

import pytest
from torch import nn

from meanshift.config import MSF
from meanshift.methods import MeanShift, Progress

STEPS = 7


def scheduled(epochs, **settings):
    """What the method reports in each step of a run."""
    method = MeanShift(nn.Linear(6, 4), 4, k=max(2, settings.get("k", 5)), bank_size=16)
    method.settings = MSF(bank_size=16, **settings)
    method.k = method.settings.k
    method.momentum = method.settings.momentum
    reported = []
    for step in range(epochs * STEPS):
        reported.append(method.set_progress(Progress(step, STEPS, epochs)))
        assert reported[-1] == {"k": method.k, "momentum": method.momentum}
    return reported


def test_both_are_constant_by_default():
    reported = scheduled(4, k=7, momentum=0.97)
    assert reported == [{"k": 7, "momentum": 0.97}] * (4 * STEPS)


@pytest.mark.parametrize(("start", "k", "epochs"), [(1, 5, 10), (2, 4, 9), (1, 1, 3)])
def test_a_growing_k_has_each_value_for_equally_many_epochs(start, k, epochs):
    values = [line["k"] for line in scheduled(epochs, k=k, k_start=start, k_schedule="linear")]
    steps_per_value = epochs * STEPS // (k - start + 1)
    assert values == [value for value in range(start, k + 1) for _ in range(steps_per_value)]


@pytest.mark.parametrize(
    ("epochs", "expected"), [(1, [5]), (2, [1, 5]), (3, [1, 3, 5]), (4, [1, 2, 4, 5])]
)
def test_with_few_epochs_a_growing_k_leaves_values_out_and_ends_with_k(epochs, expected):
    values = [line["k"] for line in scheduled(epochs, k=5, k_schedule="linear")]
    assert values[::STEPS] == expected


@pytest.mark.parametrize("epochs", [2, 7, 17])
def test_a_growing_k_changes_only_between_epochs_and_stays_in_its_range(epochs):
    values = [line["k"] for line in scheduled(epochs, k=5, k_schedule="linear")]
    assert values == sorted(values)
    assert values[0] == 1 and values[-1] == 5
    by_epoch = [set(values[start : start + STEPS]) for start in range(0, len(values), STEPS)]
    assert all(len(in_epoch) == 1 for in_epoch in by_epoch)


def test_cosine_momentum_is_byols_rule_and_ends_near_one():
    reported = scheduled(20, momentum=0.9, momentum_schedule="cosine")
    total = 20 * STEPS
    by_hand = [1 - 0.1 * (math.cos(math.pi * s / total) + 1) / 2 for s in range(total)]
    values = [line["momentum"] for line in reported]
    assert values == pytest.approx(by_hand)
    assert values[0] == pytest.approx(0.9) and 0.9999 < values[-1] < 1
