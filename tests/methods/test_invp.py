"""InvP against a naive walk over neighbors and sums over samples, one at a time."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from meanshift.config.recipes import recipe
from meanshift.data.arrays import ArraySource
from meanshift.methods import Progress
from meanshift.methods.invp import InvP
from meanshift.training import session as session_module
from tests.support.method_steps import assert_parts_equal_the_whole, take_view_steps

DIM, BATCH, SAMPLES = 5, 6, 15
BACKGROUND, K, LAYERS, POSITIVES = 9, 2, 3, 4
TEMPERATURE, WEIGHT, MEMORY_MOMENTUM = 0.3, 0.6, 0.4


def method(seed=0, **options):
    torch.manual_seed(seed)
    encoder = nn.Sequential(nn.Linear(7, 8), nn.Tanh(), nn.Linear(8, DIM))
    settings = {
        "samples": SAMPLES,
        "temperature": TEMPERATURE,
        "background": BACKGROUND,
        "k": K,
        "layers": LAYERS,
        "positives": POSITIVES,
        "invariance": WEIGHT,
        "memory_momentum": MEMORY_MOMENTUM,
    }
    ours = InvP(encoder, DIM, **(settings | options)).double()
    # neighbors as after some epochs
    generator = torch.Generator().manual_seed(3)
    ours.graph.neighbors.copy_(torch.randint(SAMPLES, (SAMPLES, K), generator=generator))
    return ours


def view(step=0):
    generator = torch.Generator().manual_seed(10 + step)
    return torch.randn(BATCH, 7, generator=generator, dtype=torch.float64)


def ids(step=0):
    return torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(step))[:BATCH]


class Naive:
    def __init__(self, method):
        self.network = copy.deepcopy(method.online)
        self.rows = [row.clone() for row in method.memory.rows]
        self.neighbors = method.graph.neighbors.tolist()
        self.optimizer = torch.optim.SGD(self.network.parameters(), 0.1, momentum=0.9)

    def reached(self, sample, depth=LAYERS):
        if depth == 0:
            return []
        found = []
        for neighbor in self.neighbors[sample]:
            found += [neighbor, *self.reached(neighbor, depth - 1)]
        return found

    def loss(self, images, samples):
        instance, invariance, embeddings, nearest = 0, 0, [], []
        for image, sample in zip(images, samples.tolist(), strict=True):
            v = self.network(image[None])[0]
            v = v / v.norm()
            weights = [((v * row).sum() / TEMPERATURE).exp() for row in self.rows]
            order = sorted(range(SAMPLES), key=lambda i: -weights[i].item())
            background = order[:BACKGROUND]
            whole = sum(weights[i] for i in background)
            instance = instance - (weights[sample] / whole + 1e-7).log()
            hardest = sorted(weights[i] for i in self.reached(sample))[:POSITIVES]
            others = sum(weights[i] for i in background if i != sample)
            invariance = invariance - (sum(hardest) / others + 1e-7).log()
            embeddings.append(v.detach())
            nearest.append([i for i in order[: K + 1] if i != sample][:K])
            if sample in order[:K]:  # the next one takes its place in the row
                nearest[-1] = [order[K] if i == sample else i for i in order[:K]]
        return instance / len(images), invariance / len(images), embeddings, nearest

    def step(self, images, samples):
        instance, invariance, embeddings, nearest = self.loss(images, samples)
        loss = instance + WEIGHT * invariance
        self.optimizer.zero_grad()
        loss.backward()
        gradients = [parameter.grad.clone() for parameter in self.network.parameters()]
        self.optimizer.step()
        for sample, embedding, near in zip(samples.tolist(), embeddings, nearest, strict=True):
            mixed = MEMORY_MOMENTUM * self.rows[sample] + (1 - MEMORY_MOMENTUM) * embedding
            self.rows[sample] = mixed / mixed.norm()
            self.neighbors[sample] = near
        return loss, gradients


def test_three_steps_are_those_of_the_naive_reference():
    ours = method()
    naive = Naive(ours)
    optimizer = torch.optim.SGD(ours.online.parameters(), 0.1, momentum=0.9)
    for step in range(3):
        output = ours(view(step), ids=ids(step))
        optimizer.zero_grad()
        output.loss.backward()
        loss, gradients = naive.step(view(step), ids(step))
        torch.testing.assert_close(output.loss, loss, atol=1e-12, rtol=0)
        for parameter, gradient in zip(ours.online.parameters(), gradients, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, atol=1e-12, rtol=0)
        optimizer.step()
        ours.after_update()
        torch.testing.assert_close(ours.memory.rows, torch.stack(naive.rows), atol=1e-12, rtol=0)
        assert ours.graph.neighbors.tolist() == naive.neighbors
    assert not ours._updates


@pytest.mark.parametrize("term", [0, 1], ids=["instance", "invariance"])
def test_each_term_moves_the_encoder_and_is_lowered_by_its_gradient(term):
    """The gradient is of one term alone; the value is the naive reference's."""

    def value():
        total = ours(view(), ids=ids()).loss
        parts = Naive(ours).loss(view(), ids())
        return total, [parts[0].item(), WEIGHT * parts[1].item()]

    ours = method().eval()
    ours.weight = 0.0 if term == 0 else WEIGHT
    if term == 1:
        ours._loss = _without_first_call(ours)
    total, before = value()
    total.backward()
    for parameter in ours.online.parameters():
        assert parameter.grad.abs().max() > 1e-4
        parameter.data -= 0.01 * parameter.grad
    _, after = value()
    assert after[term] < before[term]


def _without_first_call(method):
    """The losses of a step, of which the first one of each pair has no gradient."""
    calls = []
    original = method._loss

    def loss(part, whole):
        calls.append(1)
        value = original(part, whole)
        return value.detach() if len(calls) % 2 else value

    return loss


def test_the_walk_counts_every_way():
    ours = method()
    ours.graph.neighbors.copy_(torch.arange(SAMPLES)[:, None].repeat(1, K))  # only itself
    assert ours.graph.walk(torch.tensor([4]), 3).tolist() == [[4] * (2 + 4 + 8)]
    ours.graph.neighbors[4] = torch.tensor([1, 2])
    ours.graph.neighbors[1] = torch.tensor([3, 4])
    assert sorted(ours.graph.walk(torch.tensor([4]), 2)[0].tolist()) == [1, 2, 2, 2, 3, 4]


def test_a_new_method_has_samples_that_are_their_own_neighbors():
    fresh = InvP(nn.Linear(7, DIM), DIM, samples=SAMPLES, background=9, k=2)
    assert torch.equal(fresh.graph.neighbors, torch.arange(SAMPLES)[:, None].repeat(1, 2))
    assert "graph.neighbors" in fresh.state_dict()
    with pytest.raises(ValueError, match="pass ids"):
        fresh(torch.randn(2, 7))
    with pytest.raises(ValueError, match="need fewer: lower k"):
        InvP(nn.Linear(7, DIM), DIM, samples=4, k=4)
    with pytest.raises(ValueError, match="number of samples of the dataset"):
        InvP(nn.Linear(7, DIM), DIM, samples=0)


def test_in_eval_mode_nothing_is_written():
    ours = method().eval()
    before = copy.deepcopy(ours.state_dict())
    ours(view(), ids=ids())
    ours.after_update()
    assert all(torch.equal(value, before[name]) for name, value in ours.state_dict().items())


def test_two_processes_give_the_gradient_and_the_memory_of_the_whole_batch():
    def part():
        ours = method()
        losses, gradients = take_view_steps(ours, view, ids, 2)
        return losses, gradients, ours.memory.rows, ours.graph.neighbors

    assert_parts_equal_the_whole(part)


def test_the_invariance_starts_after_the_warm_up():
    ours = method()
    ours.warmup_epochs = 30

    def weight(epoch, epochs):
        return ours.set_progress(Progress(epoch * 10, 10, epochs))["invariance"]

    assert [weight(epoch, 800) for epoch in (0, 29, 30, 799)] == [0, 0, WEIGHT, WEIGHT]
    assert [weight(epoch, 20) for epoch in (0, 4, 5)] == [0, 0, WEIGHT]
    ours.set_progress(Progress(0, 10, 800))
    output = ours(view(), ids=ids())
    torch.testing.assert_close(output.loss, output.metrics["loss_instance"][0])


def test_settings():
    large = recipe("imagenet-r50").with_overrides({"method.name": "invp"})
    assert (large.optim.lr, large.optim.weight_decay) == (0.06, 1e-4)
    assert (large.method.temperature, large.method.positives, large.method.dim) == (0.2, 50, 128)
    small = recipe("cifar10-r18").with_overrides({"method.name": "invp", "encoder.width": 0.125})
    assert (small.method.temperature, small.method.positives) == (0.07, 20)
    assert small.optim.weight_decay == 5e-4 and small.views.blur == small.views.flip == 0
    for name, value in {"temperature": 0, "k": 0, "background": 4, "memory_momentum": 1}.items():
        with pytest.raises(ValueError, match=f"method.{name}: got"):
            large.with_overrides({f"method.{name}": value})

    source = ArraySource(np.zeros((9000, 8, 8, 3), dtype=np.uint8), None, name="black")
    built = session_module.build_method(small, source)
    assert [type(layer) for layer in built.online.projector] == [nn.Linear]
    assert built.background == 4096 and len(built.memory.rows) == 9000
    assert built.temperature == 0.07 and built.positives == 20 and built.warmup_epochs == 30
    mlp = small.with_overrides({"method.head": "mlp"})
    layers = session_module.build_method(mlp, source).online.projector
    assert [type(layer) for layer in layers] == [nn.Linear, nn.ReLU, nn.Linear]
    assert (layers[0].in_features, layers[0].out_features) == (64, 2048)
    as_wide = session_module.build_method(mlp.with_overrides({"method.hidden": 0}), source)
    assert as_wide.online.projector[0].out_features == 64


def test_the_memory_of_rows_neighbors_and_similarities_is_reported():
    ours = InvP(nn.Linear(7, DIM), DIM, samples=30_000)
    rows, neighbors, similarities = ours.memory_use(batch_size=256).values()
    assert rows == 30_000 * (DIM * 4 + 1) and neighbors == 30_000 * 4 * 8
    assert similarities == 256 * 30_000 * 4
    assert "similarities of a step: 31 MB" in ours.memory_report(256)
