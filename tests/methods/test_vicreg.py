"""VICReg against a naive reference, in two processes, and its settings."""

import copy

import pytest
import torch
from torch import nn

from meanshift.config import Config
from meanshift.config.recipes import recipe
from meanshift.methods import method_class, view_specs
from meanshift.methods.vicreg import VICReg
from meanshift.models.sync_batch_norm import convert_sync_batch_norm
from meanshift.runtime import distributed
from meanshift.training.session import build_method
from tests.support.forked import in_processes

BATCH, DIM = 6, 5
TERMS = ("invariance", "variance", "covariance")


def build(**weights):
    torch.manual_seed(0)
    layers = [nn.Linear(7, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, DIM)]
    return VICReg(nn.Sequential(*layers), DIM, **weights).double()


def views(step=0):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(2, BATCH, 7, generator=generator, dtype=torch.float64).unbind(0)


def naive_terms(z1, z2):
    """The three terms of the official code, number by number."""
    invariance = sum((a - b) ** 2 for a, b in zip(z1.flatten(), z2.flatten(), strict=True))
    variance = covariance = 0
    for z in (z1, z2):
        means = [sum(z[:, j]) / BATCH for j in range(DIM)]
        for i in range(DIM):
            for j in range(DIM):
                products = [(row[i] - means[i]) * (row[j] - means[j]) for row in z]
                value = sum(products) / (BATCH - 1)
                if i == j:
                    low = 1 - (value + 1e-4) ** 0.5
                    variance = variance + (low if low > 0 else 0 * low) / DIM / 2
                else:
                    covariance = covariance + value**2 / DIM
    return invariance / (BATCH * DIM), variance, covariance


def test_three_steps_follow_the_naive_reference():
    method = build()
    encoder = copy.deepcopy(method.online)
    ours = torch.optim.SGD(method.parameters(), 0.01, momentum=0.9)
    theirs = torch.optim.SGD(encoder.parameters(), 0.01, momentum=0.9)
    for step in range(3):
        first, second = views(step)
        output = method(first, second)
        ours.zero_grad()
        output.loss.backward()
        terms = naive_terms(encoder(first), encoder(second))
        loss = 25 * terms[0] + 25 * terms[1] + terms[2]
        theirs.zero_grad()
        loss.backward()
        torch.testing.assert_close(output.loss, loss, rtol=1e-11, atol=0)
        for name, term in zip(TERMS, terms, strict=True):
            torch.testing.assert_close(output.metrics[name][0], term.detach())
        for a, b in zip(method.parameters(), encoder.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-11)
        ours.step()
        method.after_update()
        theirs.step()


def test_output_has_unit_embeddings_and_their_mean_cosine():
    method = build()
    first, second = views()
    output = method(first, second)
    z1, z2 = method.online(first), method.online(second)
    assert not output.embeddings.requires_grad
    torch.testing.assert_close(output.embeddings, nn.functional.normalize(z1, dim=1))
    mean, weight = output.metrics["agreement"]
    torch.testing.assert_close(mean, torch.cosine_similarity(z1, z2).mean())
    assert weight == BATCH and not any(m.requires_grad for m, _ in output.metrics.values())


@pytest.mark.parametrize("term", TERMS)
def test_each_term_moves_the_encoder_downhill_through_both_views(term):
    weights = {name: float(name == term) for name in TERMS}
    method = build(**weights)
    first, second = (view.requires_grad_() for view in views())
    before = method(first, second).loss
    before.backward()
    for gradient in (first.grad, second.grad, method.online[0].weight.grad):
        assert float(gradient.abs().max()) > 1e-4
    with torch.no_grad():
        for parameter in method.parameters():
            parameter -= 1e-2 * parameter.grad
    assert float(method(*views()).loss.detach()) < float(before.detach()) - 1e-6


def test_two_processes_are_one_with_the_whole_batch():
    """The covariance is that of the whole batch; parts of other sizes are scaled as in training."""

    def step():
        method = convert_sync_batch_norm(build(), torch.device("cpu"))
        world = distributed.world_size()
        first, last = (0, BATCH) if world == 1 else [(0, 2), (2, BATCH)][distributed.rank()]
        output = method(*(view[first:last] for view in views()))
        (output.loss * (last - first) * world / BATCH).backward()
        shared = [output.metrics[name][0] for name in TERMS[1:]]
        gradients = [p.grad for p in method.parameters()]
        for gradient in gradients:
            distributed.all_mean_(gradient)
        return shared + gradients

    (whole,) = in_processes(1, step)
    for parts in in_processes(2, step):
        for a, b in zip(parts, whole, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_the_terms_are_computed_in_float32_under_autocast():
    method = build().float()
    first, second = (view.float() for view in views())
    with torch.autocast("cpu", torch.bfloat16):
        output = method(first, second)
    assert output.loss.dtype == output.embeddings.dtype == torch.float32
    assert output.loss.isfinite()


# Settings


def test_the_papers_settings():
    config = recipe("imagenet-r50").with_overrides({"method.name": "vicreg"})
    assert method_class(config.method) is VICReg
    assert (config.optim.name, config.optim.lr, config.optim.weight_decay) == ("lars", 0.3, 1e-6)
    assert [getattr(config.method, name) for name in TERMS] == [25, 25, 1]
    assert config.method.dim == 8192 and config.train.batch_norm == "sync"
    first, second = view_specs(config)
    assert (first.blur, first.solarize, second.blur, second.solarize) == (1.0, 0.0, 0.1, 0.2)


def test_the_small_settings():
    config = recipe("cifar10-r18").with_overrides({"method.name": "vicreg"})
    assert config.method.dim == config.method.hidden == 2048
    assert (config.optim.name, config.optim.lr) == ("adamw", 1e-3)
    assert config.optim.weight_decay == 1e-4
    assert all((view.blur, view.solarize) == (0.0, 0.1) for view in view_specs(config))


@pytest.mark.parametrize(
    ("setting", "value"),
    [("invariance", -1.0), ("variance", -1.0), ("covariance", -1.0), ("dim", 0)],
)
def test_bad_settings_are_refused(setting, value):
    with pytest.raises(ValueError, match=rf"method\.{setting}: got {value}, need"):
        Config().with_overrides({"method.name": "vicreg", f"method.{setting}": value})


def test_it_is_built_with_its_projector_and_weights():
    flags = {"encoder.name": "resnet10", "encoder.width": 0.125, "data.image_size": 16}
    sizes = {"method.dim": 6, "method.hidden": 10, "method.covariance": 0.5}
    method = build_method(Config().with_overrides({"method.name": "vicreg", **flags, **sizes}))
    linears = [m for m in method.online.projector if isinstance(m, nn.Linear)]
    assert [m.out_features for m in linears] == [10, 10, 6] and linears[-1].bias is None
    assert (method.invariance, method.variance, method.covariance) == (25, 25, 0.5)
