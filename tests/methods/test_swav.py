"""SwAV against an independent, naive reading of the paper and its code."""

import copy

import pytest
import torch
from torch import nn

from meanshift.config import Config, Views
from meanshift.config.methods.clustering import SwAV as Settings
from meanshift.config.recipes import recipe
from meanshift.methods import Progress, method_class, view_specs
from meanshift.methods.base import BuildContext
from meanshift.methods.swav import SwAV
from meanshift.runtime import distributed
from meanshift.transforms.augment import MultiViewTransform
from tests.support.forked import in_processes
from tests.support.method_steps import assert_step_lowers
from tests.support.multi_crop import BATCH, DIM, CropEncoder, crops, unit_rows

PROTOTYPES, QUEUE = 4, 12


def build(**options):
    encoder = CropEncoder()
    torch.manual_seed(1)
    method = SwAV(encoder, DIM, prototypes=PROTOTYPES, queue_size=QUEUE, **options).double()
    method.after_update()  # unit length in float64 as well
    return method


def optimizer_of(parameters):
    return torch.optim.SGD(list(parameters), 0.1, momentum=0.9, weight_decay=1e-3)


class Naive:
    """The paper in plain loops: lists as queues, a matrix of exponentials, one pair at a time."""

    def __init__(self, method):
        self.encoder = copy.deepcopy(method.online)
        self.prototypes = nn.Parameter(method.prototypes.weight.detach().clone())
        self.optimizer = optimizer_of([*self.encoder.parameters(), self.prototypes])
        self.queues = [[], []]

    def codes(self, crop, z):
        rows = self.queues[crop] if len(self.queues[crop]) == QUEUE else []
        with torch.no_grad():
            q = (torch.stack([*rows, *z]) @ self.prototypes.T / 0.05).exp()
            for _ in range(3):
                q = q / q.sum(0, keepdim=True)
                q = q / q.sum(1, keepdim=True)
        self.queues[crop] = (self.queues[crop] + [*z.detach()])[-QUEUE:]
        return q[-len(z) :]

    def step(self, views, frozen):
        with torch.no_grad():
            self.prototypes.copy_(unit_rows(self.prototypes))  # the official place: before
        z = [unit_rows(self.encoder(view)) for view in views]
        loss = 0
        for t in (0, 1):
            q = self.codes(t, z[t])
            for s in range(len(views)):
                if s == t:
                    continue
                for i in range(len(q)):
                    p = torch.softmax(z[s][i] @ self.prototypes.T / 0.1, 0)
                    loss = loss - (q[i] * p.log()).sum() / len(q) / (len(views) - 1) / 2
        self.optimizer.zero_grad()
        loss.backward()
        gradients = [p.grad.clone() for p in [*self.encoder.parameters(), self.prototypes]]
        if frozen:
            self.prototypes.grad = None
        self.optimizer.step()
        return loss.detach(), gradients


def test_five_steps_follow_the_naive_reference():
    method = build()
    naive = Naive(method)
    learning = [*method.online.parameters(), method.prototypes.weight]
    optimizer = optimizer_of(learning)
    for step in range(5):  # the queue is full after two; the prototypes are frozen in the first
        views, now = crops(step), Progress(step, 1, 5)
        method.set_progress(now)
        output = method(*views)
        optimizer.zero_grad()
        output.loss.backward()
        loss, gradients = naive.step(views, frozen=step == 0)
        torch.testing.assert_close(output.loss.detach(), loss, rtol=1e-9, atol=0)
        for parameter, gradient in zip(learning, gradients, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-8, atol=1e-12)
        method.before_update(now)
        before = method.prototypes.weight.detach().clone()
        optimizer.step()
        method.after_update(now)
        moved = not torch.allclose(method.prototypes.weight, before, rtol=0, atol=1e-6)
        assert moved == (step > 0)
    torch.testing.assert_close(method.prototypes.weight, unit_rows(naive.prototypes))
    rows = method.queue.rows.roll(-method.queue.written, 0)  # oldest first
    expected = torch.cat([torch.stack(queue) for queue in naive.queues], 1)
    torch.testing.assert_close(rows, expected, rtol=1e-9, atol=1e-12)


@torch.no_grad()
def test_the_queue_changes_the_loss_only_when_it_is_full_and_in_use():
    method, without = build(), build()
    without.queue = None

    def differs(step):
        return float(method(*crops(step)).loss) != float(without(*crops(step)).loss)

    assert [differs(step) for step in range(3)] == [False, False, True]
    written = method.queue.written
    assert written == 3 * BATCH
    method.queue_epoch = 1
    method.set_progress(Progress(1, 2, 4))
    assert not differs(3)
    method.set_progress(Progress(2, 2, 4))
    method.eval()
    assert differs(3)
    assert method.queue.written == written  # nothing is enqueued


def test_crops_of_one_size_are_one_forward_pass():
    method = build()
    method(*crops(0))
    assert method.online.calls == [(2 * BATCH, 4, 7), (2 * BATCH, 4, 3)]
    with pytest.raises(ValueError, match="got 1 crops of each image; need 2"):
        method(crops(0)[0])


def test_the_step_against_the_gradient_lowers_the_loss_for_fixed_codes(monkeypatch):
    method = build()
    codes = torch.softmax(crops(9)[0].flatten(1)[:, :PROTOTYPES], 1)
    monkeypatch.setattr(method, "_assign", lambda scores: codes)
    monkeypatch.setattr(method, "use_queue", False)
    for parameters in ([*method.online.parameters()], [method.prototypes.weight]):
        assert_step_lowers(lambda: method(*crops(0)).loss, parameters)


def test_every_crop_is_trained():
    method = build()
    views = [view.requires_grad_() for view in crops(0)]
    method(*views).loss.backward()
    assert all(float(view.grad.abs().min()) > 0 for view in views)


def test_the_output_has_unit_embeddings_and_the_agreement_of_the_large_crops():
    method = build()
    output = method(*crops(0))
    one, two = (unit_rows(method.online(view)).detach() for view in crops(0)[:2])
    torch.testing.assert_close(output.embeddings, one)
    assert not output.embeddings.requires_grad
    agreement, weight = output.metrics["agreement"]
    torch.testing.assert_close(agreement, (one * two).sum(1).mean())
    assert weight == BATCH


def steps(sizes):
    """Losses and gradients of four steps, each process with its part of the batch."""
    method = build()
    optimizer = optimizer_of(method.parameters())
    found = []
    for step in range(4):
        parts = [view.split(sizes)[distributed.rank()] for view in crops(step)]
        loss = method(*parts).loss * len(parts[0]) / BATCH
        optimizer.zero_grad()
        loss.backward()
        loss = distributed.all_sum(loss.detach())
        for parameter in method.parameters():
            parameter.grad = distributed.all_sum(parameter.grad)
        found += [loss, *(p.grad.clone() for p in method.parameters())]
        optimizer.step()
        method.after_update()
    return [*found, method.queue.rows]


def test_two_processes_take_the_steps_of_one():
    alone = steps([BATCH])
    for found in in_processes(2, steps, [4, 2]):
        torch.testing.assert_close(found, alone, rtol=1e-9, atol=1e-12)


def test_a_recipe_takes_the_settings_of_the_paper():
    config = recipe("imagenet-r50").with_overrides({"method.name": "swav"})
    assert method_class(config.method) is SwAV
    assert (config.method.prototypes, config.method.queue_size) == (3000, 3840)
    assert (config.optim.name, config.optim.lr, config.optim.weight_decay) == ("lars", 0.6, 1e-6)
    assert config.views.crop_area == (0.14, 1.0)
    assert config.views.jitter_strength == (0.8, 0.8, 0.8, 0.2)
    transform = MultiViewTransform(view_specs(config), 0, config.data.image_size)
    views = transform.single_views()
    assert [transform.side(view) for view in views] == [224] * 2 + [96] * 6
    assert [view.crop_area for view in views] == [(0.14, 1.0)] * 2 + [(0.05, 0.14)] * 6
    assert len({view.stream for view in views}) == 8
    assert all(view.jitter == 0.8 and view.blur == 0.5 for view in views)


def test_a_recipe_of_small_images_takes_two_crops_and_adamw():
    config = recipe("cifar10-r18").with_overrides({"method.name": "swav"})
    assert [view.count for view in view_specs(config)] == [2]
    assert (config.method.prototypes, config.method.queue_size) == (512, 0)
    assert (config.optim.name, config.optim.lr) == ("adamw", 0.002)
    assert config.views.blur == 0
    changed = config.with_overrides({"method.small_crops": 4, "method.small_crop_size": 16})
    assert [(view.count, view.size) for view in view_specs(changed)] == [(2, 0), (4, 16)]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prototypes", 1),
        ("temperature", 0.0),
        ("small_crops", -1),
        ("small_crop_size", 4),
        ("small_crop_area", (0.2, 0.1)),
        ("epsilon", 0.0),
        ("iterations", 0),
        ("queue_size", -1),
        ("queue_epoch", -1),
        ("freeze_epochs", -1),
    ],
)
def test_bad_settings_are_refused(name, value):
    with pytest.raises(ValueError, match=rf"method\.{name}: got .*, need "):
        Settings(**{name: value})


def test_a_queue_smaller_than_the_batch_is_refused():
    with pytest.raises(ValueError, match=r"method\.queue_size: got 100.*--method\.queue_size 0"):
        Config(method=Settings(queue_size=100))


def test_a_small_dataset_has_fewer_prototypes():
    settings = Settings(queue_size=8, queue_epoch=3, freeze_epochs=2)

    class Encoder(CropEncoder):
        dim = DIM

    def encoder(**heads):
        assert heads == {"dim": 128, "hidden": 2048}
        return Encoder()

    method = SwAV.build(settings, BuildContext(encoder=encoder, dataset_size=160))
    assert method.prototypes.weight.shape == (10, DIM)
    assert (method.queue.size, method.queue_epoch, method.freeze_epochs) == (8, 3, 2)
    assert settings.prototypes_for(0) == settings.prototypes_for(48_000) == 3000
    assert len(SwAV.views(settings, Views())) == 2
