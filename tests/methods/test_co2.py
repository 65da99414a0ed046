"""CO2 against the formulas of its paper; its consistency term has a gradient of its own."""

import copy
import math

import pytest
import torch
from torch import nn

from meanshift.config.methods.contrastive import CO2 as Settings
from meanshift.config.recipes import recipe
from meanshift.methods import BuildContext
from meanshift.methods.co2 import CO2
from meanshift.methods.moco import MoCo
from meanshift.models.encoder import Encoder
from tests.support.forked import in_processes
from tests.support.method_steps import assert_step_lowers, random_views, take_steps

DIM, BATCH, SIZE = 5, 6, 16
T, T_CON, ALPHA, MOMENTUM = 0.2, 0.3, 4.0, 0.9


def build(alpha=ALPHA):
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(7, 8), nn.Tanh(), nn.Linear(8, DIM))
    return CO2(
        encoder,
        DIM,
        alpha=alpha,
        consistency_temperature=T_CON,
        temperature=T,
        bank_size=SIZE,
        momentum=MOMENTUM,
    ).double()


def softmax(values):
    total = sum(math.e**value for value in values)
    return [math.e**value / total for value in values]


def naive_step(online, target, queue, one, two):
    """The loss, its two terms apart, and the keys, one image and one negative at a time."""
    contrast = consistency = 0
    keys = []
    for a, b in zip(online(one), target(two).detach(), strict=True):
        q, k = a / (a * a).sum().sqrt(), b / (b * b).sum().sqrt()
        classes = softmax([(q * k).sum() / T, *((q * row).sum() / T for row in queue)])
        contrast = contrast - torch.log(classes[0]) / len(one)
        Q = softmax([(q * row).sum() / T_CON for row in queue])
        P = softmax([(k * row).sum() / T_CON for row in queue])
        for p, qq in zip(P, Q, strict=True):
            divergence = p * torch.log(p / qq) + qq * torch.log(qq / p)
            consistency = consistency + divergence / 2 / len(one)
        keys.append(k)
    return contrast + ALPHA * consistency, consistency, keys


def test_three_steps_follow_the_formulas():
    method = build()
    online, target = copy.deepcopy(method.online), copy.deepcopy(method.target)
    queue = list(method.bank.rows.clone())
    ours = torch.optim.SGD(method.online.parameters(), 0.1)
    theirs = torch.optim.SGD(online.parameters(), 0.1)
    for step in range(3):
        one, two = random_views(step, BATCH, 7)
        output = method(one, two)
        for t, o in zip(target.parameters(), online.parameters(), strict=True):
            t.data = MOMENTUM * t.data + (1 - MOMENTUM) * o.data
        loss, consistency, keys = naive_step(online, target, queue, one, two)
        torch.testing.assert_close(output.loss, loss, rtol=1e-12, atol=0)
        torch.testing.assert_close(output.metrics["consistency"][0], ALPHA * consistency.detach())
        assert not output.metrics["consistency"][0].requires_grad
        for optimizer, value in ((ours, output.loss), (theirs, loss)):
            optimizer.zero_grad()
            value.backward()
        for p, expected in zip(method.online.parameters(), online.parameters(), strict=True):
            torch.testing.assert_close(p.grad, expected.grad, rtol=1e-10, atol=1e-13)
        for number, key in enumerate(keys):
            queue[(step * BATCH + number) % SIZE] = key
        torch.testing.assert_close(method.bank.rows, torch.stack(queue))
        ours.step()
        theirs.step()
        method.after_update()


def test_without_the_term_it_is_moco():
    method = build(alpha=0.0)
    moco = MoCo(copy.deepcopy(method.online), DIM, temperature=T, bank_size=SIZE).double()
    views = random_views(0, BATCH, 7)
    assert torch.equal(method(*views).loss, moco(*views).loss)


def test_each_term_alone_moves_the_online_encoder_towards_lower_values():
    method = build().eval()
    one, two = random_views(0, BATCH, 7)
    queue = method.queue(torch.float64)

    def term(name):
        q, k = method.query(one), method.project(two)
        return MoCo.compare(method, q, k, queue).loss if name else method.consistency(q, k, queue)

    for name in ("contrast", ""):
        assert_step_lowers(lambda: term(name), list(method.online.parameters()))  # noqa: B023
    gradients = []
    for alpha in (0.0, ALPHA):
        method.alpha = alpha
        parameters = list(method.online.parameters())
        gradients.append(torch.autograd.grad(method(one, two).loss, parameters))
    consistency = torch.autograd.grad(term(""), list(method.online.parameters()))
    for without, with_term, alone in zip(*gradients, consistency, strict=True):
        torch.testing.assert_close(with_term - without, ALPHA * alone)


def test_the_term_is_zero_for_equal_views_only():
    method = build()
    q, k = (nn.functional.normalize(rows) for rows in random_views(0, BATCH, DIM))
    queue = method.queue(torch.float64)
    assert float(method.consistency(k, k, queue)) == 0
    assert float(method.consistency(q, k, queue)) > 0.01


def two_process_steps():
    return take_steps(build, 3, (7, 7))


def test_two_processes_take_the_steps_of_one():
    expected, state = two_process_steps()
    for found, other in in_processes(2, two_process_steps):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(other, state, rtol=1e-9, atol=1e-12)


def test_settings_are_those_of_moco_and_two_more():
    small = recipe("cifar10-r18").with_overrides({"method.name": "co2"})
    assert small.method == Settings(temperature=0.1, momentum=0.99, bank_size=4096, layers=1)
    moco = recipe("cifar10-r18").with_overrides({"method.name": "moco"})
    assert (small.optim, small.views) == (moco.optim, moco.views)
    settings = Settings(alpha=2.0, consistency_temperature=0.5, bank_size=64, dim=12)
    method = CO2.build(settings, BuildContext(lambda **heads: Encoder(small.encoder, **heads)))
    assert isinstance(method, CO2)
    assert (method.alpha, method.consistency_temperature, method.temperature) == (2.0, 0.5, 0.2)
    for setting, value in (("alpha", -1.0), ("consistency_temperature", 0)):
        with pytest.raises(ValueError, match=rf"method\.{setting}: got"):
            small.with_overrides({f"method.{setting}": value})
