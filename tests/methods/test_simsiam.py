"""SimSiam against a naive reference, in two processes, and its settings."""

import copy

import pytest
import torch
from torch import nn

from meanshift.config import Config, Optim
from meanshift.config.recipes import recipe
from meanshift.methods import method_class, view_specs
from meanshift.methods.simsiam import SimSiam
from meanshift.models.sync_batch_norm import convert_sync_batch_norm
from meanshift.runtime import distributed
from meanshift.training.optim import Schedule, build_optimizer
from meanshift.training.session import build_method
from tests.support.forked import in_processes

BATCH, DIM = 6, 5


def build():
    torch.manual_seed(0)
    layers = [nn.Linear(7, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, DIM)]
    return SimSiam(nn.Sequential(*layers), DIM, predictor_hidden=9).double()


def views(step=0):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(2, BATCH, 7, generator=generator, dtype=torch.float64).unbind(0)


def naive_loss(encoder, predictor, frozen, first, second):
    """Minus half of the cosines, image by image; the targets come from a frozen copy."""
    total = 0
    for view, other in ((first, second), (second, first)):
        predicted, goal = predictor(encoder(view)), frozen(other)
        for p, z in zip(predicted, goal, strict=True):
            total = total - (p @ z) / (p.norm() * z.norm()) / 2 / BATCH
    return total


def test_three_steps_follow_the_naive_reference():
    method = build()
    encoder, predictor = copy.deepcopy([method.online, method.predictor])
    ours = torch.optim.SGD(method.parameters(), 0.1, momentum=0.9)
    parameters = [*encoder.parameters(), *predictor.parameters()]
    theirs = torch.optim.SGD(parameters, 0.1, momentum=0.9)
    for step in range(3):
        first, second = views(step)
        output = method(first, second)
        ours.zero_grad()
        output.loss.backward()
        frozen = copy.deepcopy(encoder).requires_grad_(False)
        loss = naive_loss(encoder, predictor, frozen, first, second)
        theirs.zero_grad()
        loss.backward()
        torch.testing.assert_close(output.loss, loss, rtol=1e-12, atol=0)
        for a, b in zip(method.parameters(), parameters, strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-12)
        ours.step()
        method.after_update()
        theirs.step()


def test_output_has_unit_embeddings_and_the_mean_cosine_of_predictions_and_targets():
    method = build()
    first, second = views()
    output = method(first, second)
    z1, z2 = method.online(first), method.online(second)
    assert not output.embeddings.requires_grad
    torch.testing.assert_close(output.embeddings, nn.functional.normalize(z1, dim=1))
    mean, weight = output.metrics["agreement"]
    p1, p2 = method.predictor(z1), method.predictor(z2)
    both = torch.cosine_similarity(p1, z2), torch.cosine_similarity(p2, z1)
    torch.testing.assert_close(mean, torch.cat(both).mean())
    assert weight == BATCH and not mean.requires_grad


@pytest.mark.parametrize("direction", [0, 1])
def test_each_direction_moves_encoder_and_predictor_downhill(direction, monkeypatch):
    """One direction alone: the other one's cosine is 0."""
    from meanshift.methods import simsiam

    cosine, calls = simsiam._cosine, []

    def one_direction(a, b):
        calls.append(0)
        return cosine(a, b) * ((len(calls) - 1) % 2 == direction)

    monkeypatch.setattr(simsiam, "_cosine", one_direction)
    method = build()
    view, other = views() if direction == 0 else views()[::-1]

    def agreement():
        predicted = method.predictor(method.online(view))
        return float(torch.cosine_similarity(predicted, method.online(other)).mean().detach())

    before = agreement()
    method(*views()).loss.backward()
    for module in (method.online, method.predictor):
        assert max(float(p.grad.abs().max()) for p in module.parameters()) > 1e-4
    with torch.no_grad():
        for parameter in method.parameters():
            parameter -= 1e-2 * parameter.grad
    assert agreement() > before + 1e-5


def test_two_processes_are_one_with_the_whole_batch():
    def step():
        method = convert_sync_batch_norm(build(), torch.device("cpu"))
        first, last = distributed.shard_range(BATCH)
        output = method(*(view[first:last] for view in views()))
        output.loss.backward()
        results = [output.loss.detach(), *(p.grad for p in method.parameters())]
        for result in results:
            distributed.all_mean_(result)
        return results

    (whole,) = in_processes(1, step)
    for parts in in_processes(2, step):
        for a, b in zip(parts, whole, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("constant", [True, False])
def test_the_predictors_learning_rate_is_constant(constant):
    method = build()
    method.constant_predictor_lr = constant
    optimizer = build_optimizer(Optim(lr=0.2), method)
    Schedule(Config().with_overrides({"optim.lr": 0.2, "train.epochs": 4}), 5).set_lr(optimizer, 15)
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert all(rates[id(p)] < 0.05 for p in method.online.parameters())
    assert all((rates[id(p)] == 0.2) == constant for p in method.predictor.parameters())
    assert len(rates) == len(list(method.parameters()))


# Settings


def test_the_papers_settings():
    config = recipe("imagenet-r50").with_overrides({"method.name": "simsiam"})
    assert method_class(config.method) is SimSiam
    assert config.optim == Optim() and config.train.batch_norm == "sync"
    assert (config.method.dim, config.method.predictor_hidden) == (2048, 512)
    first, second = view_specs(config)
    assert first.blur == second.blur == 0.5 and first.jitter == second.jitter == 0.8
    assert first.stream != second.stream


def test_the_small_settings():
    config = recipe("cifar10-r18").with_overrides({"method.name": "simsiam"})
    assert (config.optim.lr, config.optim.weight_decay) == (0.03, 5e-4)
    assert config.method.projector_layers == 2 and config.views.blur == 0


@pytest.mark.parametrize("setting", ["dim", "hidden", "projector_layers", "predictor_hidden"])
def test_bad_settings_are_refused(setting):
    with pytest.raises(ValueError, match=rf"method\.{setting}: got 0, need 1 or more"):
        Config().with_overrides({"method.name": "simsiam", f"method.{setting}": 0})


@pytest.mark.parametrize("layers", [2, 3])
def test_the_projector_ends_in_a_batch_norm_without_affine(layers):
    flags = {"encoder.name": "resnet10", "encoder.width": 0.125, "data.image_size": 16}
    sizes = {"method.dim": 6, "method.hidden": 10, "method.projector_layers": layers}
    method = build_method(Config().with_overrides({"method.name": "simsiam", **flags, **sizes}))
    projector = method.online.projector
    linears = [m for m in projector if isinstance(m, nn.Linear)]
    norms = [m for m in projector if isinstance(m, nn.BatchNorm1d)]
    assert [m.out_features for m in linears] == [10] * (layers - 1) + [6]
    assert all(m.bias is None for m in linears) and len(norms) == layers
    assert projector[-1] is norms[-1] and [m.affine for m in norms] == [True] * (layers - 1) + [
        False
    ]
    assert method.predictor[-1].bias is not None
