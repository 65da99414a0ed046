"""ISD against a naive reading of the official code, in one and in two processes."""

import copy

import pytest
import torch
from torch import nn

from meanshift.config import Optim, Views
from meanshift.config.methods.contrastive import ISD as Settings
from meanshift.config.recipes import recipe
from meanshift.methods import BuildContext
from meanshift.methods.isd import ISD
from meanshift.models.encoder import Encoder
from tests.support.forked import in_processes
from tests.support.method_steps import assert_step_lowers, random_views, take_steps

DIM, BATCH, SIZE = 5, 6, 16
T_ONLINE, T_TARGET, MOMENTUM = 0.3, 0.05, 0.9


def build(batch_norm=True):
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(7, 8), nn.Tanh(), nn.Linear(8, DIM))
    method = ISD(
        encoder,
        DIM,
        temperature=T_ONLINE,
        target_temperature=T_TARGET,
        bank_size=SIZE,
        momentum=MOMENTUM,
        hidden=10,
    )
    if not batch_norm:
        method.predictor[1] = nn.Identity()
    return method.double()


def distribution(row, queue, temperature):
    weights = [torch.exp((row * other).sum() / temperature) for other in queue]
    return [weight / sum(weights) for weight in weights]


def test_three_steps_follow_the_naive_reference():
    method = build()
    online, target, predictor = map(copy.deepcopy, (method.online, method.target, method.predictor))
    queue = list(method.bank.rows.clone())
    ours = torch.optim.SGD([p for p in method.parameters() if p.requires_grad], 0.1)
    theirs = torch.optim.SGD([*online.parameters(), *predictor.parameters()], 0.1)
    for step in range(3):
        one, two = random_views(step, BATCH, 7)
        output = method(one, two)
        for t, o in zip(target.parameters(), online.parameters(), strict=True):
            t.data = MOMENTUM * t.data + (1 - MOMENTUM) * o.data
        loss, keys = 0, []
        for a, b in zip(predictor(online(one)), target(two).detach(), strict=True):
            q, k = a / (a * a).sum().sqrt(), b / (b * b).sum().sqrt()
            P, Q = distribution(k, queue, T_TARGET), distribution(q, queue, T_ONLINE)
            for p, other in zip(P, Q, strict=True):
                loss = loss + p * (torch.log(p) - torch.log(other)) / BATCH
            keys.append(k)
        for number, key in enumerate(keys):
            queue[(step * BATCH + number) % SIZE] = key
        torch.testing.assert_close(output.loss, loss, rtol=1e-10, atol=0)
        torch.testing.assert_close(output.embeddings, torch.stack(keys))
        torch.testing.assert_close(method.bank.rows, torch.stack(queue))
        for optimizer, value in ((ours, output.loss), (theirs, loss)):
            optimizer.zero_grad()
            value.backward()
        for mine, other in ((method.online, online), (method.predictor, predictor)):
            for p, expected in zip(mine.parameters(), other.parameters(), strict=True):
                torch.testing.assert_close(p.grad, expected.grad, rtol=1e-9, atol=1e-12)
        assert all(p.grad is None for p in method.target.parameters())
        ours.step()
        theirs.step()
        method.after_update()


def test_the_gradient_lowers_the_loss_by_the_encoder_and_by_the_predictor():
    method = build(batch_norm=False).eval()
    views = random_views(0, BATCH, 7)
    for part in (method.online, method.predictor):
        assert_step_lowers(lambda: method(*views).loss, list(part.parameters()))


def test_the_loss_is_zero_where_the_distributions_agree():
    method = build()
    method.target_temperature = method.temperature
    rows = nn.functional.normalize(random_views(0, BATCH, DIM)[0])
    output = method.compare(rows, rows, method.queue(rows.dtype))
    assert float(output.loss) == pytest.approx(0, abs=1e-12)
    assert float(output.metrics["agreement"][0]) == pytest.approx(1)


def two_process_steps():
    return take_steps(lambda: build(batch_norm=False), 3, (7, 7))


def test_two_processes_take_the_steps_of_one():
    expected, state = two_process_steps()
    for found, other in in_processes(2, two_process_steps):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(other, state, rtol=1e-9, atol=1e-12)


def test_settings_of_the_paper_and_of_small_images():
    large = recipe("imagenet-r50").with_overrides({"method.name": "isd"})
    assert large.method == Settings() and (large.optim, large.views) == (Optim(), Views())
    target, online = ISD.views(large.method, large.views)
    assert (target.jitter, online.jitter) == (0.0, 0.8)
    small = recipe("cifar10-r18").with_overrides({"method.name": "isd"})
    assert small.method == Settings(bank_size=16_384)
    mean_shift = recipe("cifar10-r18")
    assert (small.optim, small.views) == (mean_shift.optim, mean_shift.views)
    for setting, value in (("temperature", 0), ("target_temperature", -1.0), ("bank_size", 10)):
        with pytest.raises(ValueError, match=rf"method\.{setting}: got"):
            small.with_overrides({f"method.{setting}": value})


def test_the_heads_are_those_of_mean_shift():
    config = recipe("cifar10-r18").with_overrides({"encoder.width": 0.25})
    context = BuildContext(lambda **heads: Encoder(config.encoder, **heads), seed=2)
    method = ISD.build(Settings(bank_size=64, target_temperature=0.02, momentum=0.7), context)
    features = method.online.features
    assert method.bank.rows.shape == (64, features // 4)
    for head, inputs in ((method.online.projector, features), (method.predictor, features // 4)):
        assert head[0].weight.shape == (2 * features, inputs)
        assert isinstance(head[1], nn.BatchNorm1d) and head[3].out_features == features // 4
    assert (method.temperature, method.target_temperature, method.momentum) == (0.1, 0.02, 0.7)
