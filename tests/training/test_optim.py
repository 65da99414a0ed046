"""The optimizer's reach, and every schedule against its formula."""

import itertools
import math

import pytest
import torch
from torch import nn

from meanshift.config import Config, Train
from meanshift.methods.msf import MeanShift
from meanshift.training.optim import Schedule, build_optimizer

STEPS = 7


def schedule(**settings):
    overrides = {name.replace("__", "."): value for name, value in settings.items()}
    return Schedule(Config().with_overrides(overrides), steps=STEPS)


def by_step(function, plan):
    return [function(step) for step in range(plan.total)]


def small_method():
    return MeanShift(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)), 4, k=2, bank_size=8)


def test_total_steps():
    assert schedule(train__epochs=3).total == 3 * STEPS


def test_lr_by_epoch_is_the_authors_rule():
    plan = schedule(train__epochs=10, optim__lr=0.05)
    authors = [0.05 / 2 * (1 + math.cos(math.pi * (e - 1) / 10)) for e in range(1, 11)]
    by_hand = [rate for rate in authors for _ in range(STEPS)]
    assert by_step(plan.lr, plan) == pytest.approx(by_hand, rel=1e-12)


def test_lr_by_step_is_a_cosine_over_all_steps():
    plan = schedule(train__epochs=5, optim__lr=0.3, optim__schedule="step")
    by_hand = [0.3 / 2 * (1 + math.cos(math.pi * s / (5 * STEPS))) for s in range(5 * STEPS)]
    assert by_step(plan.lr, plan) == pytest.approx(by_hand, rel=1e-12)


@pytest.mark.parametrize("kind", ["epoch", "step"])
@pytest.mark.parametrize("warmup", [1, 3])
def test_warm_up_rises_to_the_rate_and_the_cosine_falls_from_it(kind, warmup):
    plan = schedule(
        train__epochs=8, optim__lr=0.2, optim__warmup_epochs=warmup, optim__schedule=kind
    )
    rates = by_step(plan.lr, plan)
    top = warmup * STEPS
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top] == max(rates) == pytest.approx(0.2)
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert 0 <= rates[0] < 0.2 and 0 < rates[-1] < 0.05


@pytest.mark.parametrize(("kind", "stride"), [("epoch", STEPS), ("step", 1)])
@pytest.mark.parametrize("warmup", [1, 3])
def test_warm_up_is_linear_up_to_the_rate(kind, stride, warmup):
    plan = schedule(
        train__epochs=8, optim__lr=0.2, optim__warmup_epochs=warmup, optim__schedule=kind
    )
    rises = [b - a for a, b in itertools.pairwise(
        plan.lr(step) for step in range(0, warmup * STEPS + 1, stride))]  # fmt: skip
    assert rises == pytest.approx([rises[0]] * len(rises))


def test_k_is_constant_by_default():
    plan = schedule(train__epochs=4, method__k=7)
    assert by_step(plan.k, plan) == [7] * plan.total


@pytest.mark.parametrize(("start", "k", "epochs"), [(1, 5, 10), (2, 4, 9), (1, 1, 3)])
def test_a_growing_k_covers_its_range_in_equal_stretches(start, k, epochs):
    plan = schedule(
        train__epochs=epochs, method__k=k, method__k_start=start, method__k_schedule="linear"
    )
    stretch = plan.total // (k - start + 1)
    by_hand = [value for value in range(start, k + 1) for _ in range(stretch)]
    assert by_step(plan.k, plan) == by_hand


@pytest.mark.parametrize("epochs", [2, 7, 17])
def test_a_growing_k_never_falls_and_stays_in_its_range(epochs):
    plan = schedule(train__epochs=epochs, method__k=5, method__k_schedule="linear")
    values = by_step(plan.k, plan)
    assert values == sorted(values)
    assert values[0] == 1 and values[-1] <= 5 and values[-1] > 1
    assert all(len({plan.k(e * STEPS), plan.k(e * STEPS + STEPS - 1)}) == 1 for e in range(epochs))


def test_momentum_is_constant_by_default():
    plan = schedule(train__epochs=4, method__momentum=0.97)
    assert by_step(plan.momentum, plan) == [0.97] * plan.total


def test_cosine_momentum_is_byols_rule_and_ends_near_one():
    plan = schedule(train__epochs=20, method__momentum=0.9, method__momentum_schedule="cosine")
    values = by_step(plan.momentum, plan)
    total = 20 * STEPS
    by_hand = [1 - 0.1 * (math.cos(math.pi * s / total) + 1) / 2 for s in range(total)]
    assert values == pytest.approx(by_hand)
    assert values[0] == pytest.approx(0.9) and 0.9999 < values[-1] < 1


def test_weight_decay_spares_nothing():
    method = small_method()
    optimizer = build_optimizer(Train(lr=0.3, sgd_momentum=0.8, weight_decay=0.01), method)
    for group in optimizer.param_groups:
        assert (group["lr"], group["momentum"], group["weight_decay"]) == (0.3, 0.8, 0.01)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    learning = [*method.online.parameters(), *method.predictor.parameters()]
    assert held == {id(p) for p in learning}


def test_decay_shrinks_biases_and_batch_norm_too():
    network = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = build_optimizer(Train(lr=0.5, weight_decay=0.1), network)
    before = [p.detach().clone() for p in network.parameters()]
    for p in network.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for old, new in zip(before, network.parameters(), strict=True):
        torch.testing.assert_close(new.detach(), old * 0.95)


def test_the_targets_parameters_are_not_in_the_optimizer():
    method = small_method()
    held = {id(p) for p in build_optimizer(Train(), method).param_groups[0]["params"]}
    targets = {id(p) for p in method.target.parameters()}
    assert targets and held.isdisjoint(targets)
