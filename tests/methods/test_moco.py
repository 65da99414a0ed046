"""MoCo against a naive reading of the official code, in one and in two processes."""

import copy

import pytest
import torch
from torch import nn

from meanshift.config import Optim, Views
from meanshift.config.methods.contrastive import MoCo as Settings
from meanshift.config.recipes import recipe
from meanshift.methods import Batch, BuildContext
from meanshift.methods.moco import MoCo
from meanshift.models.encoder import Encoder
from tests.support.forked import in_processes
from tests.support.method_steps import assert_step_lowers, random_views, take_steps

DIM, BATCH, SIZE = 5, 6, 16
T, MOMENTUM = 0.2, 0.9


def network(batch_norm=True):
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(8) if batch_norm else nn.Tanh()
    return nn.Sequential(nn.Linear(7, 8), norm, nn.ReLU(), nn.Linear(8, DIM)).double()


def build(**changed):
    options = {"temperature": T, "bank_size": SIZE, "momentum": MOMENTUM, "seed": 3, **changed}
    return MoCo(network(options.pop("batch_norm", True)), DIM, **options).double()


class Naive:
    """The official step in plain loops; the target is moved before the keys are computed."""

    def __init__(self, method):
        self.online = copy.deepcopy(method.online)
        self.target = copy.deepcopy(method.target)
        self.queue = [row.clone() for row in method.bank.rows]
        self.pointer = 0
        self.optimizer = torch.optim.SGD(self.online.parameters(), 0.1, momentum=0.9)

    def contrast(self, query_view, key_view):
        q, k = self.online(query_view), self.target(key_view).detach()
        losses, keys = [], []
        for i in range(len(q)):
            query, key = q[i] / (q[i] ** 2).sum() ** 0.5, k[i] / (k[i] ** 2).sum() ** 0.5
            positive = torch.exp((query * key).sum() / T)
            negatives = [torch.exp((query * row).sum() / T) for row in self.queue]
            losses.append(-torch.log(positive / (positive + sum(negatives))))
            keys.append(key)
        return sum(losses) / len(losses), keys

    def step(self, one, two, symmetric=False):
        for t, o in zip(self.target.parameters(), self.online.parameters(), strict=True):
            t.data = MOMENTUM * t.data + (1 - MOMENTUM) * o.data
        loss, keys = self.contrast(one, two)
        if symmetric:
            other, other_keys = self.contrast(two, one)
            loss, keys = loss + other, other_keys + keys
        for key in keys:
            self.queue[self.pointer] = key
            self.pointer = (self.pointer + 1) % len(self.queue)
        self.optimizer.zero_grad()
        loss.backward()
        gradients = [p.grad.clone() for p in self.online.parameters()]
        self.optimizer.step()
        return loss.detach(), gradients


@pytest.mark.parametrize("symmetric", [False, True])
def test_three_steps_follow_the_naive_reference(symmetric):
    method = build(symmetric=symmetric)
    naive = Naive(method)
    optimizer = torch.optim.SGD(method.online.parameters(), 0.1, momentum=0.9)
    for step in range(3):
        one, two = random_views(step, BATCH, 7)
        output = method(one, two, ids=torch.arange(BATCH))
        optimizer.zero_grad()
        output.loss.backward()
        loss, gradients = naive.step(one, two, symmetric)
        torch.testing.assert_close(output.loss.detach(), loss, rtol=1e-12, atol=0)
        for p, expected in zip(method.online.parameters(), gradients, strict=True):
            torch.testing.assert_close(p.grad, expected, rtol=1e-10, atol=1e-13)
        torch.testing.assert_close(method.bank.rows, torch.stack(naive.queue))
        optimizer.step()
        method.after_update()
    assert method.bank.written == 3 * BATCH * (2 if symmetric else 1)


def test_output_has_unit_keys_and_their_agreement():
    method = build(batch_norm=False)
    one, two = random_views(0, BATCH, 7)
    output = method(one, two)
    torch.testing.assert_close(output.embeddings, nn.functional.normalize(method.target(two)))
    expected = nn.functional.cosine_similarity(method.online(one), method.target(two)).mean()
    agreement, count = output.metrics["agreement"]
    torch.testing.assert_close(agreement, expected.detach())
    assert count == BATCH and not (agreement.requires_grad or output.embeddings.requires_grad)


def test_the_gradient_is_that_of_the_online_encoder_and_lowers_the_loss():
    method = build(batch_norm=False)
    one, two = random_views(0, BATCH, 7)
    method(one, two).loss.backward()
    assert all(p.grad is None for p in method.target.parameters())
    method.eval()  # so that the queue stays as it is
    assert_step_lowers(lambda: method(one, two).loss, list(method.online.parameters()))


def test_the_key_attracts_and_the_queue_repels():
    q, k = (nn.functional.normalize(rows).requires_grad_() for rows in random_views(0, 1, DIM))
    queue = nn.functional.normalize(random_views(1, SIZE, DIM)[0]).requires_grad_()
    build().compare(q, k, queue).loss.backward()
    assert (k.grad * q).sum() < 0
    assert ((queue.grad * q).sum(1) > 0).all()


def test_in_eval_mode_nothing_changes():
    method = build(batch_norm=False).eval()
    before = method.bank.rows.clone()
    method(*random_views(0, BATCH, 7))
    assert torch.equal(method.bank.rows, before) and method.bank.written == 0


def test_views_and_the_shuffle_seed_come_from_the_batch():
    method = build()
    one, two = random_views(0, BATCH, 7)
    ids = torch.arange(BATCH)
    expected = copy.deepcopy(method)(two, one, ids=ids).loss
    assert torch.equal(method.step(Batch((one, two), ids, shuffle_seed=4)).loss, expected)
    assert method.shuffle_seed == 4
    assert method.bank.ids[:BATCH].tolist() == ids.tolist()
    target, online = MoCo.views(Settings(), Views())
    assert (target.jitter, online.jitter, target.stream, online.stream) == (0.8, 0.8, 0, 1)


def two_process_steps(symmetric):
    return take_steps(lambda: build(batch_norm=False, symmetric=symmetric), 3, (7, 7))


@pytest.mark.parametrize("symmetric", [False, True])
def test_two_processes_take_the_steps_of_one(symmetric):
    (expected, state), *_ = in_processes(1, two_process_steps, symmetric)
    for found, other in in_processes(2, two_process_steps, symmetric):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(other, state, rtol=1e-9, atol=1e-12)


def test_settings_of_the_paper_and_of_its_cifar_demo():
    large = recipe("imagenet-r50").with_overrides({"method.name": "moco"})
    assert large.method == Settings() and large.optim == Optim(lr=0.03) and large.views == Views()
    small = recipe("cifar10-r18").with_overrides({"method.name": "moco"})
    assert small.method == Settings(temperature=0.1, momentum=0.99, bank_size=4096, layers=1)
    assert small.optim == Optim(lr=0.03, weight_decay=5e-4)
    assert small.views == Views(crop_area=(0.08, 1.0), blur=0.0)


def test_build_uses_every_setting():
    config = recipe("cifar10-r18").with_overrides(
        {"method.name": "moco", "encoder.width": 0.125, "method.layers": 2, "method.dim": 12}
        | {"method.bank_size": 512, "method.symmetric": True, "method.temperature": 0.3}
    )
    context = BuildContext(lambda **heads: Encoder(config.encoder, **heads), seed=5)
    method = MoCo.build(config.method, context)
    assert [type(layer).__name__ for layer in method.online.projector] == [
        "Linear",
        "ReLU",
        "Linear",
    ]
    assert method.online.projector[0].out_features == method.online.features
    assert method.bank.rows.shape == (512, 12) and method.symmetric
    assert (method.temperature, method.momentum) == (0.3, 0.99)
    assert method.settings is config.method
    assert torch.equal(method.bank.rows, MoCo(network(), 12, bank_size=512, seed=5).bank.rows)


@pytest.mark.parametrize(
    ("setting", "value"),
    [("temperature", 0), ("momentum", 1.1), ("bank_size", 100), ("layers", 0), ("dim", 0)],
)
def test_bad_settings_are_refused(setting, value):
    with pytest.raises(ValueError, match=rf"method\.{setting}: got {value}"):
        recipe("cifar10-r18").with_overrides({"method.name": "moco", f"method.{setting}": value})


def test_a_symmetric_step_needs_room_for_both_views():
    overrides = {"method.name": "moco", "method.bank_size": 300, "train.batch_size": 256}
    assert recipe("cifar10-r18").with_overrides(overrides).method.bank_size == 300
    with pytest.raises(ValueError, match="at least the 512 rows"):
        recipe("cifar10-r18").with_overrides({**overrides, "method.symmetric": True})
