"""SeLa-v2 against an independent, naive version of our reading."""

import copy

import pytest
import torch
from torch import nn

from meanshift.config.methods.clustering import SeLaV2 as Settings
from meanshift.config.recipes import recipe
from meanshift.methods import Batch, Progress, method_class
from meanshift.methods.base import BuildContext
from meanshift.methods.sela_v2 import SeLaV2
from meanshift.runtime import distributed
from tests.support.forked import in_processes
from tests.support.method_steps import assert_step_lowers
from tests.support.multi_crop import BATCH, DIM, CropEncoder, crops, unit_rows

SAMPLES, PROTOTYPES, CLUSTERINGS = 20, 4, 3
SHARPNESS = 5.0


def build():
    encoder = CropEncoder()
    torch.manual_seed(1)
    sizes = {"samples": SAMPLES, "prototypes": PROTOTYPES, "clusterings": CLUSTERINGS}
    method = SeLaV2(encoder, DIM, sharpness=SHARPNESS, **sizes).double()
    method.after_update()  # unit length in float64 as well
    return method


def images():
    return crops(50, batch=SAMPLES)[0]


def pass_over_the_data():
    parts = torch.arange(SAMPLES).split(3)
    first, last = distributed.shard_range(len(parts))
    return (Batch(views=(images()[ids],), ids=ids) for ids in parts[first:last])


def batch_ids(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randperm(SAMPLES, generator=generator)[:BATCH]


def optimizer_of(parameters):
    return torch.optim.SGD(list(parameters), 0.1, momentum=0.9, weight_decay=1e-3)


class Naive:
    """Memories as dictionaries; Sinkhorn on powers of probabilities, as in SeLa's program."""

    def __init__(self, method):
        self.encoder = copy.deepcopy(method.online)
        self.prototypes = [nn.Parameter(p.detach().clone()) for p in method.prototypes]
        self.learning = [*self.encoder.parameters(), *self.prototypes]
        self.optimizer = optimizer_of(self.learning)
        with torch.no_grad():
            outputs = self.encoder(images())
            rows = unit_rows(outputs - sum(outputs) / SAMPLES)
        self.memories = [dict(enumerate(rows)), dict(enumerate(rows))]

    @torch.no_grad()
    def label(self):
        self.labels = []
        for number, prototypes in enumerate(self.prototypes):
            memory = self.memories[number % 2]
            rows = torch.stack([memory[i] for i in range(SAMPLES)])
            powers = torch.softmax(rows @ prototypes.T / 0.1, 1) ** SHARPNESS
            c = torch.ones(PROTOTYPES).double()
            while True:
                r = 1 / (powers @ c)
                shares = (powers * r[:, None] * c).sum(0) * PROTOTYPES / SAMPLES
                if (shares - 1).abs().mean() < 0.05:
                    break
                c = SAMPLES / PROTOTYPES / (powers.T @ r)
            self.labels.append((powers * r[:, None] * c).argmax(1))

    def step(self, views, ids):
        z = [unit_rows(self.encoder(view)) for view in views]
        loss = 0
        for prototypes, labels in zip(self.prototypes, self.labels, strict=True):
            for crop in z:
                for row, i in zip(crop, ids.tolist(), strict=True):
                    p = torch.softmax(row @ prototypes.T / 0.1, 0)[labels[i]]
                    loss = loss - p.log() / len(z) / len(ids) / CLUSTERINGS
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        for prototypes in self.prototypes:
            prototypes.data = unit_rows(prototypes.data)
        for j, i in enumerate(ids.tolist()):
            for crop in (0, 1):
                self.memories[crop][i] = z[crop][j].detach()
        return loss.detach()


def test_two_epochs_follow_the_naive_reference():
    method = build()
    naive = Naive(method)
    learning = [*method.online.parameters(), *method.prototypes]
    optimizer = optimizer_of(learning)
    for step in range(6):
        now = Progress(step, 3, 2)
        if step % 3 == 0:
            method.begin_epoch(now, pass_over_the_data)
            naive.label()
            assert torch.equal(method.assignments, torch.stack(naive.labels))
        views, ids = crops(step), batch_ids(step)
        output = method(*views, ids=ids)
        optimizer.zero_grad()
        output.loss.backward()
        loss = naive.step(views, ids)
        torch.testing.assert_close(output.loss.detach(), loss, rtol=1e-9, atol=0)
        for ours, theirs in zip(learning, naive.learning, strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-8, atol=1e-12)
        optimizer.step()
        method.after_update(now)
    for ours, theirs in zip(learning, naive.learning, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-12)


def test_labels_are_balanced_where_the_nearest_prototypes_are_not():
    method = build()
    method.sharpness = 25.0
    method.begin_epoch(Progress(0, 3, 2), pass_over_the_data)
    rows = method.memory.rows[:, :DIM]
    for prototypes, labels in zip(method.prototypes, method.assignments, strict=True):
        nearest = (rows @ prototypes.T).argmax(1).bincount(minlength=PROTOTYPES)
        counts = labels.bincount(minlength=PROTOTYPES)
        assert (counts - 5).abs().max() <= 2 < (nearest - 5).abs().max()


def test_the_step_against_the_gradient_lowers_the_loss():
    method = build()
    method.begin_epoch(Progress(0, 3, 2), pass_over_the_data)
    for parameters in ([*method.online.parameters()], [*method.prototypes]):
        assert_step_lowers(lambda: method(*crops(0), ids=batch_ids(0)).loss, parameters)


def steps(sizes):
    """Losses and gradients of four steps in two epochs, each process with its part."""
    method = build()
    optimizer = optimizer_of(method.parameters())
    found = []
    for step in range(4):
        if step % 2 == 0:
            method.begin_epoch(Progress(step, 2, 2), pass_over_the_data)
        ids, *parts = (
            tensor.split(sizes)[distributed.rank()] for tensor in (batch_ids(step), *crops(step))
        )
        loss = method(*parts, ids=ids).loss * len(ids) / BATCH
        optimizer.zero_grad()
        loss.backward()
        for parameter in method.parameters():
            parameter.grad = distributed.all_sum(parameter.grad)
        gradients = [p.grad.clone() for p in method.parameters()]
        found += [distributed.all_sum(loss.detach()), *gradients]
        optimizer.step()
        method.after_update()
    return [*found, method.memory.rows, method.assignments]


def test_two_processes_take_the_steps_of_one():
    alone = steps([BATCH])
    for found in in_processes(2, steps, [4, 2]):
        torch.testing.assert_close(found, alone, rtol=1e-8, atol=1e-12)


def test_a_recipe_takes_our_settings():
    config = recipe("imagenet-r50").with_overrides({"method.name": "sela-v2"})
    assert method_class(config.method) is SeLaV2
    assert (config.method.sharpness, config.method.iterations) == (25.0, 100)
    assert (config.optim.name, config.optim.warmup_epochs) == ("lars", 10)
    small = recipe("cifar10-r18").with_overrides({"method.name": "sela-v2"})
    assert (small.optim.name, small.method.small_crops) == ("adamw", 0)


@pytest.mark.parametrize(("name", "value"), [("sharpness", 0.0), ("iterations", 0)])
def test_bad_settings_are_refused(name, value):
    with pytest.raises(ValueError, match=rf"method\.{name}: got "):
        Settings(**{name: value})


def test_it_is_built_from_its_settings():
    class Encoder(CropEncoder):
        dim = DIM

    def built(size):
        context = BuildContext(encoder=lambda **_: Encoder(), dataset_size=size)
        return SeLaV2.build(Settings(sharpness=9.0, clusterings=2), context)

    method = built(320)
    assert (method.sharpness, method.iterations, len(method.prototypes)) == (9.0, 100, 2)
    assert all(p.shape == (20, DIM) and p.requires_grad for p in method.prototypes)
    with pytest.raises(ValueError, match="got 'sela-v2', need the number of images"):
        built(0)
