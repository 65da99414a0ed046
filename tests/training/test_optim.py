"""Parameter groups and the learning rate against their definitions, and when something happens."""

import itertools
import math

import pytest
import torch
from torch import nn

from meanshift.config import Config, Optim
from meanshift.methods import MeanShift, Method
from meanshift.training.muon import Muon
from meanshift.training.optim import Schedule, build_optimizer
from tests.support.exact import assert_same

STEPS = 7


def make_schedule(**settings):
    overrides = {name.replace("__", "."): value for name, value in settings.items()}
    return Schedule(Config().with_overrides(overrides), steps_per_epoch=STEPS)


def lrs(schedule):
    return [schedule.lr(step) for step in range(schedule.total)]


def small_method():
    return MeanShift(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)), 4, k=2, bank_size=8)


class Grouped(Method):
    """Two linear layers, each a group of parameters of its own."""

    def __init__(self, **options):
        super().__init__()
        self.online = nn.Linear(3, 2)
        self.head = nn.Linear(2, 2)
        self.options = options

    @classmethod
    def views(cls, settings, operators):
        return ()

    @classmethod
    def build(cls, settings, context):
        return cls()

    def parameter_groups(self):
        head = {"params": list(self.head.parameters()), **self.options}
        return [{"params": list(self.online.parameters())}, head]


def test_total_steps():
    assert make_schedule(train__epochs=3).total == 3 * STEPS


def test_lr_by_epoch_is_the_authors_rule():
    schedule = make_schedule(train__epochs=10, optim__lr=0.05)
    authors = [0.05 / 2 * (1 + math.cos(math.pi * (e - 1) / 10)) for e in range(1, 11)]
    by_hand = [lr for lr in authors for _ in range(STEPS)]
    assert lrs(schedule) == pytest.approx(by_hand, rel=1e-12)


def test_lr_by_step_is_a_cosine_over_all_steps():
    schedule = make_schedule(train__epochs=5, optim__lr=0.3, optim__schedule="step")
    by_hand = [0.3 / 2 * (1 + math.cos(math.pi * s / (5 * STEPS))) for s in range(5 * STEPS)]
    assert lrs(schedule) == pytest.approx(by_hand, rel=1e-12)


@pytest.mark.parametrize(("kind", "stride"), [("epoch", STEPS), ("step", 1)])
@pytest.mark.parametrize("warmup", [1, 3])
def test_warm_up_rises_linearly_to_lr_and_the_cosine_falls_from_it(kind, stride, warmup):
    schedule = make_schedule(
        train__epochs=8, optim__lr=0.2, optim__warmup_epochs=warmup, optim__schedule=kind
    )
    values, top = lrs(schedule), warmup * STEPS
    rises = [b - a for a, b in itertools.pairwise(values[: top + 1 : stride])]
    assert rises == pytest.approx([rises[0]] * len(rises)) and rises[0] > 0
    assert values[top] == max(values) == pytest.approx(0.2)
    assert values[top:] == sorted(values[top:], reverse=True)
    assert 0 <= values[0] < 0.2 and 0 < values[-1] < 0.05


def test_the_last_epoch_of_a_short_run_has_no_warm_up():
    schedule = make_schedule(train__epochs=2, optim__warmup_epochs=5, optim__lr=0.2)
    assert lrs(schedule) == pytest.approx([0.1] * STEPS + [0.2] * STEPS)


def test_warm_up_may_take_a_fraction_of_an_epoch():
    schedule = make_schedule(
        train__epochs=2, optim__lr=0.4, optim__warmup_epochs=3 / 7, optim__schedule="step"
    )
    assert lrs(schedule)[:4] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert lrs(schedule)[-1] == pytest.approx(0.2 * (1 + math.cos(math.pi * 10 / 11)))


@pytest.mark.parametrize(
    ("heads_first", "accumulate", "expected"),
    [(0.0, 1, 0), (0.5, 1, 10), (0.05, 1, 1), (0.05, 3, 3), (0.3, 3, 6), (0.34, 3, 7), (0.4, 2, 9)],
)
def test_heads_are_trained_alone_for_whole_updates(heads_first, accumulate, expected):
    """Of 21 steps, rounded; with 3 batches each, updates end after steps 3, 6, 7, 10 and so on."""
    schedule = make_schedule(
        train__epochs=3, optim__heads_first=heads_first, optim__accumulate=accumulate
    )
    assert schedule.heads_steps == expected
    assert expected == 0 or schedule.updates_after(expected - 1)


@pytest.mark.parametrize("warmup", [0, 2])
def test_the_schedule_by_step_follows_the_heads(warmup):
    """Constant for 14 steps of the heads, then what a run of the remaining 6 epochs has."""
    options = {"optim__lr": 0.2, "optim__warmup_epochs": warmup, "optim__schedule": "step"}
    schedule = make_schedule(train__epochs=8, optim__heads_first=0.25, **options)
    rest = make_schedule(train__epochs=6, **options)
    assert lrs(schedule) == [0.2] * 14 + lrs(rest)


def test_the_schedule_by_epoch_follows_the_heads():
    """After 3 of 14 steps: a whole epoch of 7 and one of 4 steps are left."""
    schedule = make_schedule(train__epochs=2, optim__heads_first=0.2, optim__lr=0.2)
    assert lrs(schedule) == pytest.approx([0.2] * (3 + 7) + [0.1] * 4)


# Parameter groups


def test_weight_decay_applies_to_everything():
    method = small_method()
    optimizer = build_optimizer(Optim(lr=0.3, momentum=0.8, weight_decay=0.01), method)
    (group,) = optimizer.param_groups
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (0.3, 0.8, 0.01)
    trained = [*method.online.parameters(), *method.predictor.parameters()]
    assert {id(p) for p in group["params"]} == {id(p) for p in trained}
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    before = [parameter.detach().clone() for parameter in trained]
    optimizer.step()
    for old, new in zip(before, trained, strict=True):
        torch.testing.assert_close(new.detach(), old * (1 - 0.3 * 0.01))


def test_the_targets_parameters_are_not_in_the_optimizer():
    method = small_method()
    optimized = {id(p) for p in build_optimizer(Optim(), method).param_groups[0]["params"]}
    targets = {id(p) for p in method.target.parameters()}
    assert targets and optimized.isdisjoint(targets)


def test_a_group_has_a_learning_rate_and_a_weight_decay_of_its_own():
    method = Grouped(lr_scale=10.0, weight_decay=0.0)
    optimizer = build_optimizer(Optim(weight_decay=0.01), method)
    schedule = make_schedule(train__epochs=4, optim__lr=0.2)
    for step in (0, 2 * STEPS):
        assert schedule.set_lr(optimizer, step) == schedule.lr(step)
        first, head = optimizer.param_groups
        assert first["lr"] == schedule.lr(step) and head["lr"] == 10 * schedule.lr(step)
    assert (first["weight_decay"], head["weight_decay"]) == (0.01, 0.0)


def test_a_group_that_is_not_scheduled_keeps_its_learning_rate():
    optimizer = build_optimizer(Optim(), Grouped(scheduled=False, lr_scale=0.5))
    schedule = make_schedule(train__epochs=4, optim__lr=0.2, optim__warmup_epochs=1)
    for step in range(0, schedule.total, 5):
        schedule.set_lr(optimizer, step)
        first, head = optimizer.param_groups
        assert first["lr"] == schedule.lr(step) and head["lr"] == pytest.approx(0.1)


# Optimizers by name

NAMES = ("sgd", "adamw", "lars", "muon")


class Layers(Method):
    """A layer of each kind: convolution, batch norm, linear layer, and a class token."""

    def __init__(self):
        super().__init__()
        self.online = nn.Sequential(nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4), nn.Linear(4, 2))
        self.token = nn.Parameter(torch.ones(1, 1, 4))
        self.to(memory_format=torch.channels_last)

    views = build = None

    def parameter_groups(self):
        (*layers, linear) = self.online
        head = {"params": list(linear.parameters()), "lr_scale": 2.0, "weight_decay": 0.5}
        return [{"params": [self.token, *nn.Sequential(*layers).parameters()]}, head]


Layers.__abstractmethods__ = frozenset()


def options_by_name(method, optimizer):
    """The group of each parameter, which must have one."""
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    return {name: groups.pop(id(p)) for name, p in method.named_parameters()}


def random_step(optimizer, generator):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.grad = noise.contiguous(
                memory_format=torch.channels_last if noise.ndim == 4 else torch.contiguous_format
            )
    optimizer.step()


def make_optim(name, **settings):
    return Optim(name=name, lr=0.01, weight_decay=0.1, **settings)


@pytest.mark.parametrize("name", NAMES)
def test_the_name_chooses_the_optimizer(name):
    optimizer = build_optimizer(make_optim(name, momentum=0.7), Layers())
    assert type(optimizer).__name__.lower() == name
    for group in optimizer.param_groups:
        assert group["lr"] == 0.01 and group["scheduled"] is True
        assert group.get("betas", (group.get("momentum"),))[0] == 0.7


@pytest.mark.parametrize("decay_norms", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_norms_and_biases_are_decayed_if_asked(name, decay_norms):
    """LARS never decays them; a method's own decay is kept for weights alone."""
    method = Layers()
    optimizer = build_optimizer(make_optim(name, decay_norms=decay_norms), method)
    groups = options_by_name(method, optimizer)
    kept = decay_norms and name != "lars"
    decays = {parameter: group["weight_decay"] for parameter, group in groups.items()}
    assert decays == {
        "token": 0.1,
        "online.0.weight": 0.1,
        "online.0.bias": 0.1 * kept,
        "online.1.weight": 0.1 * kept,
        "online.1.bias": 0.1 * kept,
        "online.2.weight": 0.5,
        "online.2.bias": 0.5 * kept,
    }
    scales = {parameter: group["lr_scale"] for parameter, group in groups.items()}
    assert scales == {n: 2.0 if n.startswith("online.2") else 1.0 for n in decays}


def test_lars_adapts_weights_and_muon_orthogonalizes_those_of_layers():
    for name, option, not_chosen in (
        ("lars", "adapt", {"online.0.bias", "online.1.weight", "online.1.bias", "online.2.bias"}),
        ("muon", "matrices", {"token", "online.0.bias", "online.1.weight", "online.1.bias"}),
    ):
        method = Layers()
        groups = options_by_name(method, build_optimizer(make_optim(name), method))
        without = {parameter for parameter, group in groups.items() if not group[option]}
        assert without == not_chosen | {"online.2.bias"}


def test_muon_needs_a_matrix():
    method = Layers()
    method.parameter_groups = lambda: [{"params": list(method.online[1].parameters())}]
    with pytest.raises(ValueError, match=r"got muon.*no matrix.*--optim\.name adamw"):
        build_optimizer(make_optim("muon"), method)


@pytest.mark.parametrize("name", NAMES)
def test_a_restored_optimizer_continues_in_the_same_bits(name, tmp_path):
    methods = [Layers(), Layers()]
    methods[1].load_state_dict(methods[0].state_dict())
    whole, first = (build_optimizer(make_optim(name), method) for method in methods)
    generators = [torch.Generator().manual_seed(0) for _ in methods]
    for _ in range(3):
        random_step(whole, generators[0])
        random_step(first, generators[1])
    torch.save(first.state_dict(), tmp_path / "state.pt")
    second = build_optimizer(make_optim(name), methods[1])
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for optimizer, generator in zip((whole, second), generators, strict=True):
        for step in range(3):
            for group in optimizer.param_groups:
                group["lr"] = 0.01 / (step + 1)
            random_step(optimizer, generator)
    assert_same(second.state_dict(), whole.state_dict())
    assert_same(methods[1].state_dict(), methods[0].state_dict())
    assert isinstance(second, Muon) == (name == "muon")


@pytest.mark.parametrize("name", NAMES)
def test_scaled_gradients_are_unscaled_and_overflows_are_skipped(name):
    methods = [Layers(), Layers()]
    methods[1].load_state_dict(methods[0].state_dict())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    plain, scaled = (build_optimizer(make_optim(name), method) for method in methods)
    for scale in (1.0, torch.inf):
        for (_, one), (_, two) in zip(*(m.named_parameters() for m in methods), strict=True):
            one.grad = torch.randn_like(one)
            two.grad = scaler.scale(one.grad.clone() * scale)
        if scale == 1:
            plain.step()
        scaler.unscale_(scaled)
        scaler.step(scaled)
        scaler.update()
        assert_same(methods[1].state_dict(), methods[0].state_dict())


# When something happens


@pytest.mark.parametrize(
    ("accumulate", "batches"), [(1, [1] * 7), (2, [2, 2, 2, 1]), (3, [3, 3, 1]), (9, [7])]
)
def test_updates_average_so_many_batches_and_end_with_the_epoch(accumulate, batches):
    schedule = make_schedule(train__epochs=2, optim__accumulate=accumulate)
    sizes = [schedule.update_size(step) for step in range(schedule.total)]
    updates = [step for step in range(schedule.total) if schedule.updates_after(step)]
    ends = list(itertools.accumulate(batches * 2))
    assert updates == [end - 1 for end in ends]
    assert sizes == [size for size in batches * 2 for _ in range(size)]


def test_epochs_begin_and_end():
    schedule = make_schedule(train__epochs=3)
    steps = range(schedule.total)
    assert [step for step in steps if schedule.begins_epoch(step)] == [0, 7, 14]
    assert [step for step in steps if schedule.ends_epoch(step)] == [6, 13, 20]


@pytest.mark.parametrize(("every", "expected"), [(0, [5]), (2, [2, 4, 5]), (9, [5])])
def test_what_is_due_every_so_many_epochs_is_due_at_the_end(every, expected):
    schedule = make_schedule(train__epochs=5)
    assert [epoch for epoch in range(1, 6) if schedule.is_due(epoch, every)] == expected


@pytest.mark.parametrize(
    ("save_every", "expected"), [(1, [7, 14]), (0.5, [4, 7, 11, 14]), (2, [14]), (3, [])]
)
def test_a_save_is_due_when_a_multiple_of_the_epochs_has_passed(save_every, expected):
    schedule = make_schedule(train__epochs=2, train__save_every=save_every)
    assert [steps for steps in range(1, 15) if schedule.save_due(steps)] == expected
