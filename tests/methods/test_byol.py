"""BYOL against a naive reference, in two processes, and its settings."""

import copy
import math

import pytest
import torch
from torch import nn

from meanshift.config import Config
from meanshift.config.recipes import recipe
from meanshift.methods import Batch, Progress, method_class, view_specs
from meanshift.methods.byol import BYOL
from meanshift.models.sync_batch_norm import convert_sync_batch_norm
from meanshift.runtime import distributed
from meanshift.training.session import build_method
from tests.support.forked import in_processes

BATCH, DIM = 6, 5


def build():
    torch.manual_seed(0)
    layers = [nn.Linear(7, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, DIM)]
    method = BYOL(nn.Sequential(*layers), DIM, hidden=9, momentum=0.9).double()
    for parameter in method.target.parameters():  # a target that differs from the online encoder
        parameter.data += 0.1 * torch.randn_like(parameter)
    return method


def views(step=0):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(2, BATCH, 7, generator=generator, dtype=torch.float64).unbind(0)


def trained(method):
    return [p for p in method.parameters() if p.requires_grad]


def naive_loss(online, predictor, target, first, second):
    """The sum of both directions, image by image."""
    total = 0
    for view, other in ((first, second), (second, first)):
        predicted, goal = predictor(online(view)), target(other).detach()
        for p, t in zip(predicted, goal, strict=True):
            difference = p / p.norm() - t / t.norm()
            total = total + (difference**2).sum() / BATCH
    return total


def test_three_steps_follow_the_naive_reference():
    method = build()
    online, predictor, target = copy.deepcopy([method.online, method.predictor, method.target])
    ours = torch.optim.SGD(trained(method), 0.1, momentum=0.9)
    theirs = torch.optim.SGD([*online.parameters(), *predictor.parameters()], 0.1, momentum=0.9)
    for step in range(3):
        first, second = views(step)
        method.momentum = 0.9 + 0.03 * step
        output = method(first, second)
        ours.zero_grad()
        output.loss.backward()
        loss = naive_loss(online, predictor, target, first, second)
        theirs.zero_grad()
        loss.backward()
        torch.testing.assert_close(output.loss, loss, rtol=1e-12, atol=0)
        expected = [*online.parameters(), *predictor.parameters()]
        for a, b in zip(trained(method), expected, strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-12)
        ours.step()
        method.after_update()
        theirs.step()
        for t, o in zip(target.parameters(), online.parameters(), strict=True):
            t.data = t.data * method.momentum + o.data * (1 - method.momentum)
        for a, b in zip(method.target.parameters(), target.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_output_has_unit_targets_and_the_mean_cosine():
    method = build()
    first, second = views()
    output = method(first, second)
    assert not output.embeddings.requires_grad
    goal1, goal2 = method.target(first), method.target(second)
    torch.testing.assert_close(output.embeddings, nn.functional.normalize(goal1, dim=1))
    cosines = [
        torch.cosine_similarity(method.predictor(method.online(view)), goal).mean()
        for view, goal in ((first, goal2), (second, goal1))
    ]
    mean, weight = output.metrics["agreement"]
    torch.testing.assert_close(mean, sum(cosines).detach() / 2)
    assert weight == BATCH


@pytest.mark.parametrize("direction", [0, 1])
def test_each_direction_moves_encoder_and_predictor_downhill(direction, monkeypatch):
    """One direction alone: the other one's distance is 0."""
    from meanshift.methods import byol

    distance, calls = byol._distance, []

    def one_direction(prediction, target):
        calls.append(0)
        wanted = (len(calls) - 1) % 2 == direction
        return distance(prediction, target) * wanted

    monkeypatch.setattr(byol, "_distance", one_direction)
    method = build()
    view, other = views() if direction == 0 else views()[::-1]

    def agreement():
        predicted = method.predictor(method.online(view))
        return float(torch.cosine_similarity(predicted, method.target(other)).mean().detach())

    before = agreement()
    method(*views()).loss.backward()
    for module in (method.online, method.predictor):
        assert max(float(p.grad.abs().max()) for p in module.parameters()) > 1e-4
    assert all(p.grad is None for p in method.target.parameters())
    with torch.no_grad():
        for parameter in trained(method):
            parameter -= 1e-3 * parameter.grad
    assert agreement() > before + 1e-5


def test_two_processes_are_one_with_the_whole_batch():
    def step():
        method = convert_sync_batch_norm(build(), torch.device("cpu"))
        first, last = distributed.shard_range(BATCH)
        output = method(*(view[first:last] for view in views()))
        output.loss.backward()
        results = [output.loss.detach(), *(p.grad for p in trained(method))]
        for result in results:
            distributed.all_mean_(result)
        return results

    (whole,) = in_processes(1, step)
    for parts in in_processes(2, step):
        for a, b in zip(parts, whole, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_the_target_images_are_shuffled_by_the_seed_of_the_batch():
    method = build()
    method.step(Batch(views(), torch.arange(BATCH), shuffle_seed=3))
    assert method.shuffle_seed == 3


def test_an_encoder_of_another_size_is_refused():
    with pytest.raises(ValueError, match=r"\(6, 5\); need \(batch, 4\): pass dim=5"):
        BYOL(nn.Linear(7, 5), 4)(*(view.float() for view in views()))


# Settings


def test_the_papers_settings():
    config = recipe("imagenet-r50").with_overrides({"method.name": "byol"})
    assert method_class(config.method) is BYOL
    assert (config.optim.name, config.optim.lr, config.optim.weight_decay) == ("lars", 0.3, 1e-6)
    assert (config.method.dim, config.method.hidden, config.method.momentum) == (256, 4096, 0.99)
    assert config.train.batch_norm == "sync"
    first, second = view_specs(config)
    assert (first.blur, first.solarize) == (1.0, 0.0)
    assert (second.blur, second.solarize) == (0.1, 0.2)
    assert first.stream != second.stream
    assert first.jitter_strength == (0.4, 0.4, 0.2, 0.1) and first.crop_area == (0.08, 1.0)


def test_flags_change_the_asymmetric_views():
    flags = {"method.name": "byol", "views.blur": 0.5, "views.solarize": 0.0}
    first, second = view_specs(recipe("imagenet-r50").with_overrides(flags))
    assert (first.blur, second.blur) == (0.5, 0.05) and first.solarize == second.solarize == 0
    alike = {"method.name": "byol", "method.asymmetric_views": False}
    for view in view_specs(recipe("imagenet-r50").with_overrides(alike)):
        assert (view.blur, view.solarize) == (1.0, 0.2)


def test_the_small_settings():
    config = recipe("cifar10-r18").with_overrides({"method.name": "byol"})
    assert (config.optim.name, config.optim.lr, config.optim.weight_decay) == ("sgd", 0.03, 2e-3)
    assert config.method.hidden == 1024 and config.method.momentum_schedule == "constant"
    assert all(view.blur == view.solarize == 0 for view in view_specs(config))


@pytest.mark.parametrize(
    ("setting", "value"), [("momentum", 1.1), ("momentum", -0.1), ("dim", 0), ("hidden", 0)]
)
def test_bad_settings_are_refused(setting, value):
    with pytest.raises(ValueError, match=rf"method\.{setting}: got {value}, need"):
        Config().with_overrides({"method.name": "byol", f"method.{setting}": value})


def test_it_is_built_with_heads_without_a_last_bias_and_momentum_rises_to_one():
    flags = {"encoder.name": "resnet10", "encoder.width": 0.125, "data.image_size": 16}
    sizes = {"method.dim": 6, "method.hidden": 10, "method.momentum_schedule": "cosine"}
    method = build_method(Config().with_overrides({"method.name": "byol", **flags, **sizes}))
    for part in (method.online.projector, method.predictor):
        linear1, _, _, linear2 = part
        assert linear1.out_features == 10 and linear2.out_features == 6 and linear2.bias is None
    for step, fraction in ((0, 0.0), (5, 0.25), (20, 1.0)):
        logged = method.set_progress(Progress(step, 5, 4))["momentum"]
        expected = 1 - 0.01 * (math.cos(math.pi * fraction) + 1) / 2
        assert logged == method.momentum == pytest.approx(expected, abs=1e-12)
    assert "method.momentum" in method.collapse_hint()
