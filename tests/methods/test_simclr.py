"""SimCLR against a naive reading of the official code, in one and in two processes."""

import copy

import pytest
import torch
from torch import nn

from meanshift.config import Optim, Views
from meanshift.config.methods.contrastive import SimCLR as Settings
from meanshift.config.recipes import recipe
from meanshift.methods import Batch, BuildContext
from meanshift.methods.simclr import SimCLR, nt_xent, projection_head
from meanshift.models.encoder import Encoder
from meanshift.models.sync_batch_norm import convert_sync_batch_norm
from tests.support.forked import in_processes
from tests.support.method_steps import assert_step_lowers, random_views, take_steps

DIM, BATCH, T = 5, 6, 0.5


def build():
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(7, 8), nn.ReLU(), projection_head([8, 8, 8, DIM]))
    method = SimCLR(encoder, DIM, temperature=T).double()
    convert_sync_batch_norm(method, torch.device("cpu"))
    return method


def naive_loss(first, second):
    """Each of the 2N views as an anchor, all others as candidates; summed over both views."""
    rows = [row / (row * row).sum().sqrt() for row in [*first, *second]]
    total, count = 0, len(first)
    for i in range(2 * count):
        similar = {j: torch.exp((rows[i] * rows[j]).sum() / T) for j in range(2 * count) if j != i}
        positive = similar[(i + count) % (2 * count)]
        total = total - torch.log(positive / sum(similar.values()))
    return total / count


def test_three_steps_follow_the_naive_reference():
    method = build()
    online = copy.deepcopy(method.online)
    ours = torch.optim.SGD([p for p in method.parameters() if p.requires_grad], 0.1, momentum=0.9)
    theirs = torch.optim.SGD([p for p in online.parameters() if p.requires_grad], 0.1, momentum=0.9)
    for step in range(3):
        one, two = random_views(step, BATCH, 7)
        output = method.step(Batch((one, two), torch.arange(BATCH)))
        both = online(torch.cat([one, two]))
        loss = naive_loss(both[:BATCH], both[BATCH:])
        torch.testing.assert_close(output.loss, loss, rtol=1e-11, atol=0)
        for optimizer, value in ((ours, output.loss), (theirs, loss)):
            optimizer.zero_grad()
            value.backward()
        for p, expected in zip(method.online.parameters(), online.parameters(), strict=True):
            torch.testing.assert_close(p.grad, expected.grad, rtol=1e-9, atol=1e-12)
        first = nn.functional.normalize(both[:BATCH].detach())
        torch.testing.assert_close(output.embeddings, first)
        cosines = nn.functional.cosine_similarity(both[:BATCH], both[BATCH:])
        torch.testing.assert_close(output.metrics["agreement"][0], cosines.mean().detach())
        assert not output.embeddings.requires_grad
        ours.step()
        theirs.step()
        method.after_update()


def test_the_gradient_lowers_the_loss():
    method = build()
    views = random_views(0, BATCH, 7)
    learning = [p for p in method.parameters() if p.requires_grad]
    assert_step_lowers(lambda: method(*views).loss, learning)


@pytest.mark.parametrize("view", [0, 1])
def test_each_view_is_an_anchor_and_a_candidate(view):
    rows = [nn.functional.normalize(r).requires_grad_() for r in random_views(0, BATCH, DIM)]
    nt_xent(*rows, temperature=T).backward()
    found = rows[view].grad.clone()
    rows[view].grad = None
    naive_loss(*rows).backward()
    flat = rows[view].detach()
    expected = rows[view].grad + (found * flat).sum(1, keepdim=True) * flat  # along the sphere
    torch.testing.assert_close(found, expected)


def test_low_precision_of_autocast_stays_out_of_the_loss():
    method = build().float()
    views = random_views(0, BATCH, 7).float()
    with torch.autocast("cpu", torch.bfloat16):
        output = method(*views)
    assert output.loss.dtype == output.embeddings.dtype == torch.float32


def two_process_steps():
    return take_steps(build, 3, (7, 7))


def test_two_processes_take_the_steps_of_one():
    expected, state = two_process_steps()
    for found, other in in_processes(2, two_process_steps):
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-11)
        torch.testing.assert_close(other, state, rtol=1e-8, atol=1e-11)


def test_settings_of_the_paper_and_of_its_cifar_example():
    large = recipe("imagenet-r50").with_overrides({"method.name": "simclr"})
    lars = Optim(name="lars", lr=0.3, schedule="step", warmup_epochs=10, weight_decay=1e-6)
    assert large.method == Settings() and large.optim == lars
    assert large.views == Views(crop_area=(0.08, 1.0), jitter_strength=(0.8, 0.8, 0.8, 0.2))
    assert large.train.batch_norm == "sync"
    small = recipe("cifar10-r18").with_overrides({"method.name": "simclr"})
    assert small.method == Settings(temperature=0.5)
    assert small.views == Views(crop_area=(0.08, 1.0), blur=0.0)
    assert small.optim.lr == 1.0 and small.optim.name == "lars"
    for setting, value in (("temperature", 0), ("layers", 0), ("dim", 0)):
        with pytest.raises(ValueError, match=rf"method\.{setting}: got"):
            small.with_overrides({f"method.{setting}": value})


@pytest.mark.parametrize("layers", [2, 3])
def test_the_head_has_batch_norm_behind_each_layer_and_no_last_shift(layers):
    config = recipe("cifar10-r18").with_overrides({"encoder.width": 0.125})
    context = BuildContext(lambda **heads: Encoder(config.encoder, **heads))
    method = SimCLR.build(Settings(layers=layers, dim=12, temperature=0.3), context)
    head, features = method.online.projector, method.online.features
    linear = [layer for layer in head if isinstance(layer, nn.Linear)]
    assert [layer.out_features for layer in linear] == [features] * (layers - 1) + [12]
    assert all(layer.bias is None for layer in linear)
    norms = [layer for layer in head if isinstance(layer, nn.BatchNorm1d)]
    assert [norm.bias.requires_grad for norm in norms] == [True] * (layers - 1) + [False]
    assert len(norms) == layers and method.temperature == 0.3
    first, second = SimCLR.views(Settings(), Views())
    assert first.jitter == second.jitter == 0.8 and first.stream != second.stream
