"""One step: accumulated gradients, clipping, scaling and the hooks of the method."""

from contextlib import suppress

import pytest
import torch
from torch import nn

from meanshift.runtime import checkpoint
from meanshift.training import loop
from meanshift.training import session as session_module
from meanshift.training.loop import pretrain
from meanshift.training.optim import trained_second
from meanshift.training.session import Session, open_session
from meanshift.training.step import TrainStep
from tests.support.exact import assert_same
from tests.support.forked import in_processes
from tests.support.toy_method import make_arrays, toy_config

CPU = torch.device("cpu")


@pytest.fixture
def arrays(tmp_path):
    return make_arrays(tmp_path)


def weights(run):
    state, unreadable = checkpoint.latest(run / "checkpoints")
    assert not unreadable
    return {name: value for name, value in state["method"].items() if name.startswith("online")}


def take_steps(session: Session, count: int):
    """The first steps of a session, with the gradients that each update applied."""
    train_step, updates = TrainStep(session), []
    step = session.state.optimizer.step

    def note(*arguments, **keywords):
        parameters = session.method.online.parameters()
        updates.append([parameter.grad.clone() for parameter in parameters])
        return step(*arguments, **keywords)

    session.state.optimizer.step = note
    for images in session.batches():
        if images.step == count:
            break
        session.schedule.set_lr(session.state.optimizer, images.step)
        train_step(images, session.schedule.progress(images.step))
    return updates


def test_accumulated_batches_are_one_large_batch(arrays, tmp_path):
    """For a method without batch norm: four batches of 2 images are one of 8."""
    large = pretrain(toy_config(arrays, train__batch_size=8), tmp_path / "large")
    small = toy_config(arrays, train__batch_size=2, optim__accumulate=4)
    accumulated = pretrain(small, tmp_path / "small")
    with open_session(small, tmp_path / "initial", CPU) as session:
        initial = session.method.state_dict()
    for name, value in weights(large).items():
        torch.testing.assert_close(weights(accumulated)[name], value, rtol=1e-5, atol=1e-6)
        assert not torch.allclose(value, initial[name], atol=1e-3)  # it was trained


def test_an_incomplete_last_update_is_the_mean_of_its_batches(arrays, tmp_path):
    """Ten batches an epoch, three per update: the last update has one batch."""
    settings = {"train__epochs": 1, "train__batch_size": 4}
    accumulated = toy_config(arrays, optim__accumulate=3, optim__lr=1e-9, **settings)
    with open_session(accumulated, tmp_path / "a", CPU) as session:
        updates = take_steps(session, 10)
    single = toy_config(arrays, optim__lr=1e-9, **settings)
    with open_session(single, tmp_path / "b", CPU) as session:
        batches = take_steps(session, 10)
    assert len(updates) == 4 and len(batches) == 10
    for update, group in zip(
        updates, (slice(0, 3), slice(3, 6), slice(6, 9), slice(9, 10)), strict=True
    ):
        for index, gradient in enumerate(update):
            mean = torch.stack([batch[index] for batch in batches[group]]).mean(0)
            torch.testing.assert_close(gradient, mean, rtol=1e-5, atol=1e-6)


def test_hooks_are_called_in_their_order(arrays, tmp_path):
    config = toy_config(arrays, train__batch_size=8, optim__accumulate=2, train__epochs=1)
    with open_session(config, tmp_path / "run", CPU) as session:
        take_steps(session, 2)
        calls = session.method.calls
    assert calls == [
        ("before_forward", 0),
        ("before_forward", 1),
        ("before_update", 1),
        ("after_update", 1),
    ]


def test_gradients_are_clipped_to_the_norm_over_all_groups(arrays, tmp_path):
    def gradients(name, **settings):
        with open_session(toy_config(arrays, **settings), tmp_path / name, CPU) as session:
            return torch.cat([gradient.flatten() for gradient in take_steps(session, 1)[0]])

    free = gradients("free")
    clipped = gradients("clipped", optim__clip_norm=0.01)
    assert free.norm() > 0.1
    torch.testing.assert_close(clipped, free * 0.01 / free.norm(), rtol=1e-4, atol=1e-8)
    assert torch.equal(gradients("loose", optim__clip_norm=1e6), free)


def test_groups_are_updated_with_their_own_learning_rate(arrays, tmp_path):
    """The toy method's projector has twice the learning rate, no schedule and no decay."""
    config = toy_config(arrays, optim__momentum=0.0, optim__weight_decay=0.1, train__epochs=2)
    with open_session(config, tmp_path / "run", CPU) as session:
        before = {n: p.detach().clone() for n, p in session.method.online.named_parameters()}
        (update,) = take_steps(session, 1)
        lr = session.schedule.lr(0)
        for (name, parameter), gradient in zip(
            session.method.online.named_parameters(), update, strict=True
        ):
            if name.startswith("projector"):
                expected = before[name] - 2 * config.optim.lr * gradient
            else:
                expected = before[name] - lr * (gradient + 0.1 * before[name])
            torch.testing.assert_close(parameter.detach(), expected)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_dropout_and_the_like_depend_on_the_step_alone(arrays, tmp_path, accumulate, monkeypatch):
    from tests.support.toy_method import ToyEncoder

    drawn = []
    forward = ToyEncoder.forward

    def draw(self, view):
        drawn.append(float(torch.rand(())))
        return forward(self, view)

    monkeypatch.setattr(ToyEncoder, "forward", draw)
    for out in ("a", "b"):
        config = toy_config(arrays, optim__accumulate=accumulate)
        with open_session(config, tmp_path / out, CPU) as session:
            torch.manual_seed(len(drawn))
            take_steps(session, 4)
    assert drawn[:4] == drawn[4:] and len(set(drawn)) == 4


# Heads first


class Interrupted(Exception):
    pass


def train_until(config, out, stop):
    """Train or continue a run up to a step, and leave without a save; the whole run with -1."""
    step = TrainStep.__call__

    def interrupted(self, images, now):
        if now.step == stop:
            raise Interrupted
        return step(self, images, now)

    TrainStep.__call__ = interrupted
    try:
        with suppress(Interrupted), open_session(config, out, CPU) as session:
            loop.train(session)
    finally:
        TrainStep.__call__ = step


def final_state(run):
    state, unreadable = checkpoint.latest(run / "checkpoints")
    assert state["step"] == 30 and not unreadable
    return {name: state[name] for name in ("method", "optimizer", "metrics")}


def test_heads_first_leaves_the_backbone_alone(arrays, tmp_path):
    """12 of 30 steps: no gradient, no weight decay, no state of the optimizer, then all of them."""
    config = toy_config(
        arrays, optim__heads_first=0.4, optim__weight_decay=0.1, train__batch_size=4
    )
    with open_session(config, tmp_path / "run", CPU) as session:
        train_step = TrainStep(session)
        online, state = session.method.online, session.state.optimizer.state
        before = {name: p.detach().clone() for name, p in online.named_parameters()}
        seen = []
        online.projector.register_forward_pre_hook(
            lambda _, inputs: seen.append(inputs[0].requires_grad)
        )
        for images in session.batches():
            if images.step == 13:
                break
            assert session.schedule.set_lr(session.state.optimizer, images.step) > 0
            train_step(images, session.schedule.progress(images.step))
            changed = {n for n, p in online.named_parameters() if not torch.equal(p, before[n])}
            stateful = {n for n, p in online.named_parameters() if p in state}
            heads = {"projector.weight", "projector.bias"}
            expected = heads if images.step < 12 else set(before)
            assert changed == stateful == expected
    assert seen == [False] * 12 + [True]


@pytest.fixture
def change_method(monkeypatch):
    """Apply a function to each method that is built from now on."""

    def start(change):
        def build(*arguments):
            method = build_method(*arguments)
            change(method)
            return method

        build_method = session_module.build_method
        monkeypatch.setattr(session_module, "build_method", build)

    return start


def test_a_backbone_that_is_frozen_in_part_stays_so(arrays, tmp_path, change_method):
    change_method(lambda method: method.online.backbone[2].bias.requires_grad_(False))
    with open_session(toy_config(arrays, optim__heads_first=0.1), tmp_path / "run", CPU) as session:
        layer = session.method.online.backbone[2]
        before = layer.bias.detach().clone()
        loop.train(session)
        assert torch.equal(layer.bias, before) and layer.weight.requires_grad


@pytest.mark.parametrize(("name", "world"), [("muon", 1), ("sgd", 2)])
@pytest.mark.slow
def test_a_run_interrupted_in_both_phases_ends_in_the_same_bits(arrays, tmp_path, name, world):
    """In step 8, when the heads are trained alone, and in 12, when that has just ended."""
    config = toy_config(
        arrays,
        optim__name=name,
        optim__lr=0.01,
        optim__heads_first=0.38,
        optim__accumulate=2,
        train__log_every=10,
    )
    in_processes(world, train_until, config, tmp_path / "whole", -1)
    for step in (8, 12, -1):
        in_processes(world, train_until, config, tmp_path / "parts", step)
    whole = final_state(tmp_path / "whole")
    assert_same(final_state(tmp_path / "parts"), whole)
    if world == 2:  # the toy method has no batch norm: the mean of two parts is the whole batch
        train_until(config, tmp_path / "alone", -1)
        alone = final_state(tmp_path / "alone")["method"]
        for weight in ("online.backbone.2.weight", "online.projector.weight"):
            torch.testing.assert_close(whole["method"][weight], alone[weight], rtol=1e-4, atol=1e-5)


def test_heads_first_needs_trained_heads(arrays, tmp_path, change_method):
    change_method(lambda method: method.online.projector.requires_grad_(False))
    with pytest.raises(ValueError, match=r"no trained heads.*--optim\.heads_first 0"):
        pretrain(toy_config(arrays, optim__heads_first=0.1), tmp_path / "run")
    assert not (tmp_path / "run").exists()  # it is refused before anything is written


def test_heads_first_needs_a_backbone(arrays):
    config = toy_config(arrays, optim__heads_first=0.1)
    method = session_module.build_method(config)
    method.online = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"no online\.backbone.*--optim\.heads_first 0"):
        trained_second(config.optim, method)
