"""CMSF against a naive reference, in two processes, and its settings."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meanshift.config import Config
from meanshift.config.recipes import recipe
from meanshift.methods import BuildContext, MeanShift, method_class, view_specs
from meanshift.methods.cmsf import CMSF
from meanshift.models.sync_batch_norm import convert_sync_batch_norm
from meanshift.runtime import distributed
from tests.support.exact import assert_same
from tests.support.forked import in_processes

BATCH, DIM, SAMPLES, BANK = 6, 5, 12, 16


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, DIM))


def build(**options):
    options = {"k": 3, "candidates": 4, "momentum": 0.9, "hidden": 9, **options}
    torch.manual_seed(1)
    method = CMSF(
        network(), DIM, samples=SAMPLES, bank_size=BANK, bank_dtype=torch.float64, **options
    )
    method = method.double()
    for bank in (method.bank, method.previous_bank):  # unit in float64 as well
        bank.rows /= bank.rows.norm(dim=1, keepdim=True)
    return method


def batch(step):
    """Two views, ids and labels; two steps are an epoch of 12 images."""
    generator = torch.Generator().manual_seed(step)
    one, two = torch.randn(2, BATCH, 7, generator=generator, dtype=torch.float64)
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(step // 2))
    ids = order[step % 2 * BATCH :][:BATCH]
    return one, two, ids, ids % 3


def trained(method):
    return [p for p in method.parameters() if p.requires_grad]


class Naive:
    """The official step in plain loops; the previous embeddings are looked up by image."""

    def __init__(self, method):
        parts = copy.deepcopy([method.online, method.target, method.predictor])
        self.online, self.target, self.predictor = parts
        self.rows = list(method.bank.rows.clone())
        self.images = [-1] * BANK
        self.labels = [-1] * BANK
        self.previous = list(method.bank.rows.clone())
        self.history = {}
        self.pointer = 0
        self.k, self.candidates = method.k, method.candidates

    def step(self, online_view, target_view, ids, labels):
        v = [row / row.norm() for row in self.predictor(self.online(online_view))]
        u = [row / row.norm() for row in self.target(target_view).detach()]
        own = []
        for row, image, label in zip(u, ids.tolist(), labels.tolist(), strict=True):
            past = self.history.get(image, [])
            self.rows[self.pointer] = row
            self.previous[self.pointer] = past[-1] if past else row
            self.images[self.pointer], self.labels[self.pointer] = image, label
            self.history[image] = [*past, row]
            own.append(self.pointer)
            self.pointer = (self.pointer + 1) % BANK
        loss = pure = 0
        for i, slot in enumerate(own):
            before = [float(((p - self.previous[slot]) ** 2).sum()) for p in self.previous]
            now = [float(((row - u[i]) ** 2).sum()) for row in self.rows]
            before[slot] = now[slot] = -1  # itself is the first
            related = sorted(range(BANK), key=before.__getitem__)[: self.candidates]
            constrained = sorted(related, key=now.__getitem__)[: self.k]
            near = sorted(range(BANK), key=now.__getitem__)[: self.k]
            for j in [*constrained, *near]:
                loss = loss + ((v[i] - self.rows[j]) ** 2).sum() / self.k / 2 / BATCH
            same = [self.labels[j] == labels[i] for j in constrained[1:]]
            pure += sum(same) / len(same) / BATCH
        return loss, float(pure)


def test_six_steps_follow_the_naive_reference():
    """Three epochs: the first has no previous embeddings, then the banks wrap around."""
    method = build()
    naive = Naive(method)
    ours = torch.optim.SGD(trained(method), 0.3, momentum=0.9)
    parameters = [*naive.online.parameters(), *naive.predictor.parameters()]
    theirs = torch.optim.SGD(parameters, 0.3, momentum=0.9)
    for step in range(6):
        one, two, ids, labels = batch(step)
        output = method(one, two, ids=ids, labels=labels)
        ours.zero_grad()
        output.loss.backward()
        loss, purity = naive.step(one, two, ids, labels)
        theirs.zero_grad()
        loss.backward()
        torch.testing.assert_close(output.loss, loss, rtol=1e-10, atol=0)
        assert float(output.metrics["purity_constrained"][0]) == pytest.approx(purity, abs=1e-6)
        for a, b in zip(trained(method), parameters, strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-12)
        ours.step()
        method.after_update()
        theirs.step()
        for t, o in zip(naive.target.parameters(), naive.online.parameters(), strict=True):
            t.data = t.data * 0.9 + o.data * 0.1
        torch.testing.assert_close(method.bank.rows, torch.stack(naive.rows))
        torch.testing.assert_close(method.previous_bank.rows, torch.stack(naive.previous))
        assert method.bank.ids.tolist() == naive.images
    last = torch.stack([naive.history[image][-1] for image in range(SAMPLES)])
    torch.testing.assert_close(method.memory.rows, last)
    assert method.memory.seen.all()


def test_the_first_epoch_is_msfs_and_the_second_is_not():
    method = build(candidates=3)
    msf = MeanShift(network(), DIM, k=3, bank_size=BANK, hidden=9, bank_dtype=torch.float64)
    msf = msf.double()
    state = {name: value for name, value in method.state_dict().items() if name in msf.state_dict()}
    msf.load_state_dict(state)
    same = []
    for step in range(4):
        one, two, ids, labels = batch(step)
        output = method(one, two, ids=ids, labels=labels)
        expected = msf(one, two, ids=ids, labels=labels)
        same.append(bool(torch.isclose(output.loss, expected.loss, rtol=1e-9).detach()))
    assert same[:2] == [True, True] and same[3] is False


@pytest.mark.parametrize("half", ["_neighbors", "_constrained"])
def test_each_half_moves_encoder_and_predictor_downhill(half, monkeypatch):
    """One half alone: the neighbors of the other half have no length."""
    other = {"_neighbors": "_constrained", "_constrained": "_neighbors"}[half]
    search = getattr(CMSF, other)

    def nothing(self, *arguments):
        z, ids, labels = search(self, *arguments)
        return 0 * z, ids, labels

    method = build()
    for step in range(3):
        method(*batch(step)[:2], ids=batch(step)[2])
    method.eval().online.train()  # the banks stay as they are
    method.predictor.train()
    method.target.train()
    monkeypatch.setattr(CMSF, other, nothing)
    one, two, ids, _ = batch(3)
    before = method(one, two, ids=ids).loss
    before.backward()
    for module in (method.online, method.predictor):
        assert max(float(p.grad.abs().max()) for p in module.parameters()) > 1e-4
    assert all(p.grad is None for p in method.target.parameters())
    with torch.no_grad():
        for parameter in trained(method):
            parameter -= 1e-2 * parameter.grad
    after = method(one, two, ids=ids).loss
    assert float(after.detach()) < float(before.detach()) - 1e-5


@pytest.mark.parametrize("sharded", [False, True])
def test_two_processes_are_one_with_the_whole_batch(sharded):
    def steps():
        method = convert_sync_batch_norm(build(sharded=sharded), torch.device("cpu"))
        first, last = distributed.shard_range(BATCH)
        results = []
        for step in range(4):
            one, two, ids, labels = (part[first:last] for part in batch(step))
            output = method(one, two, ids=ids, labels=labels)
            gradients = torch.autograd.grad(output.loss, trained(method))
            for result in (output.loss.detach(), *gradients):
                distributed.all_mean_(result)
                results.append(result)
            with torch.no_grad():
                for parameter, gradient in zip(trained(method), gradients, strict=True):
                    parameter -= 0.3 * gradient
            method.after_update()
        return [*results, method.memory.rows]

    (whole,) = in_processes(1, steps)
    for parts in in_processes(2, steps):
        for a, b in zip(parts, whole, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-11)


def test_eval_mode_changes_nothing():
    method = build()
    for step in range(3):
        method(*batch(step)[:2], ids=batch(step)[2])
    method.eval()
    before = copy.deepcopy(method.state_dict())
    output = method(*batch(3)[:2], ids=batch(3)[2], labels=batch(3)[3])
    assert_same(method.state_dict(), before)
    assert output.loss.isfinite() and output.metrics["purity_constrained"][1] == BATCH


def test_filled_only_finds_no_random_row():
    """Too few candidates: u itself replaces them."""
    method = build(candidates=BANK, search_filled_only=True)
    labels = torch.zeros(BATCH, dtype=torch.int64)
    output = method(*batch(0)[:2], ids=batch(0)[2], labels=labels)
    assert float(output.metrics["purity_constrained"][0]) == 1
    few = build(k=BATCH + 2, candidates=BATCH + 2, search_filled_only=True)
    one, two, ids, _ = batch(0)
    twin = copy.deepcopy(few)
    output = few(one, two, ids=ids)
    v = F.normalize(twin.predictor(twin.online(one)), dim=1)
    u = F.normalize(twin.target(two), dim=1)
    mean = (u.sum(0) + 2 * u) / (BATCH + 2)  # the batch, and u for the two that are missing
    torch.testing.assert_close(output.loss, (2 - 2 * (v * mean).sum(1)).mean())


def test_it_needs_ids_and_the_number_of_samples():
    with pytest.raises(ValueError, match="pass ids to the step"):
        build()(*batch(0)[:2])
    with pytest.raises(ValueError, match="number of samples"):
        CMSF(network(), DIM, samples=0, bank_size=BANK)
    with pytest.raises(ValueError, match="2 <= k <= candidates <= bank_size"):
        build(k=5, candidates=4)


# Settings


def test_the_papers_settings_are_msfs():
    config = recipe("imagenet-r50").with_overrides({"method.name": "cmsf"})
    assert method_class(config.method) is CMSF
    msf = recipe("imagenet-r50")
    assert config.optim == msf.optim and config.views == msf.views
    assert view_specs(config) == view_specs(msf)
    names = ("k", "momentum", "bank_size", "target_view", "online_view")
    assert all(getattr(config.method, name) == getattr(msf.method, name) for name in names)
    assert config.method.candidates == 5


def test_the_small_settings():
    config = recipe("cifar10-r18").with_overrides({"method.name": "cmsf"})
    msf = recipe("cifar10-r18")
    assert config.optim == msf.optim and config.views == msf.views
    assert config.method.bank_size == 16_384 and config.method.search_filled_only


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"k": 1}, "method.k: got 1, need 2 or more"),
        ({"k": 6}, r"method.candidates: got 5, need at least k \(6\)"),
        ({"bank_size": 4}, "method.candidates: got 5, need at most the bank's 4 rows"),
        ({"bank_size": 100}, "method.bank_size: got 100, need at least the 256 rows"),
        ({"momentum": 1.1}, "method.momentum: got 1.1, need between 0 and 1"),
    ],
)
def test_bad_settings_are_refused(flags, message):
    overrides = {f"method.{name}": value for name, value in flags.items()}
    with pytest.raises(ValueError, match=message):
        Config().with_overrides({"method.name": "cmsf", **overrides})


def test_it_is_built_from_its_settings():
    class Tiny(nn.Linear):
        dim, hidden = DIM, 9

    overrides = {"method.name": "cmsf", "method.candidates": 8, "method.bank_dtype": "bfloat16"}
    settings = Config().with_overrides({**overrides, "method.bank_size": 300}).method
    context = BuildContext(encoder=lambda **_: Tiny(7, DIM), dataset_size=SAMPLES)
    method = CMSF.build(settings, context)
    assert (method.k, method.candidates, method.bank.size, method.previous_bank.size) == (
        *(5, 8),
        *(300, 300),
    )
    assert method.bank.rows.dtype == method.previous_bank.rows.dtype == torch.bfloat16
    assert len(method.memory.rows) == SAMPLES and method.settings is settings
    assert set(method.process_local()) == {"bank", "previous_bank"}
    assert "method.momentum" in method.collapse_hint()
