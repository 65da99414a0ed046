"""The loop: hooks of the method, log lines, monitor, kept checkpoints, errors."""

import json
import signal

import pytest
import torch

from meanshift.methods import StepOutput
from meanshift.methods.finite import FiniteCheck
from meanshift.runtime import checkpoint, signals
from meanshift.runtime.errors import SharedError
from meanshift.training import loop
from meanshift.training.loop import pretrain
from meanshift.training.session import open_session
from tests.support.processes import read_lines
from tests.support.toy_method import Toy, make_arrays, toy_config

CPU = torch.device("cpu")


@pytest.fixture
def arrays(tmp_path):
    return make_arrays(tmp_path)


def train(config, out, monitor=None):
    """The session after all its steps."""
    with open_session(config, out, CPU, monitor) as session:
        loop.train(session)
        return session


def of_kind(run, kind):
    return [line for line in read_lines(run) if line["kind"] == kind]


def test_begin_epoch_sees_all_training_images_in_evaluation_views(arrays, tmp_path):
    session = train(toy_config(arrays, train__epochs=2), tmp_path / "run")
    assert [call for call in session.method.calls if call[0] == "begin_epoch"] == [
        ("begin_epoch", 0),
        ("begin_epoch", 10),
    ]
    batches = list(loop.training_data(session))
    ids = torch.cat([batch.ids for batch in batches])
    assert torch.equal(ids, torch.arange(40))
    assert torch.equal(torch.cat([batch.labels for batch in batches]), session.source.labels)
    views = torch.cat([batch.views[0] for batch in batches])
    assert views.shape == (40, 3, 8, 8)
    expected = views.mean((1, 2, 3))[:, None] + 1  # in the second epoch
    torch.testing.assert_close(session.method.assignments, expected.expand(40, 4))


def test_a_run_that_continues_within_an_epoch_does_not_begin_it_again(arrays, tmp_path):
    config = toy_config(arrays)
    with open_session(config, tmp_path / "run", CPU) as session:
        session.state.step = 13
        session.save()
    session = train(config, tmp_path / "run")
    begun = [step for name, step in session.method.calls if name == "begin_epoch"]
    assert begun == [20]


def test_begin_session_is_announced_and_has_precision_and_signals_of_a_step(
    arrays, tmp_path, monkeypatch, capsys
):
    seen = []

    def begin_session(self, batches):
        signal.raise_signal(signal.SIGTERM)  # does not end it
        for batch in batches():
            seen.append((len(batch.ids), self.online.projector(torch.zeros(1, 8)).dtype))

    monkeypatch.setattr(Toy, "begin_session", begin_session)
    config = toy_config(arrays, train__precision="bfloat16")
    with pytest.raises(signals.Stopped, match="saved at step 1;"):
        train(config, tmp_path / "run")
    assert seen == [(40, torch.bfloat16)]
    assert "toy: one pass over the 40 training images" in capsys.readouterr().err


def test_a_stop_request_saves_the_run_which_then_continues(arrays, tmp_path, monkeypatch, capfd):
    request = tmp_path / "run" / "stop-requested"
    watch = signals.watch_stop_request
    monkeypatch.setattr(signals, "watch_stop_request", lambda path: watch(path, every=0.0))
    after_update = Toy.after_update

    def ask_in_step_three(self, now=None):
        after_update(self, now)
        if now is not None and now.step == 3:
            request.touch()

    monkeypatch.setattr(Toy, "after_update", ask_in_step_three)
    request.parent.mkdir()
    request.touch()  # of an earlier session: ignored
    (request.parent / "config.json").write_text(toy_config(arrays).to_json())
    with pytest.raises(signals.Stopped, match="saved at step 4; the same command") as stopped:
        train(toy_config(arrays), tmp_path / "run")
    assert stopped.value.code == 130 and not request.exists()
    assert "asked to stop" in capfd.readouterr().err
    state, _ = checkpoint.latest(tmp_path / "run" / "checkpoints")
    assert state["step"] == 4
    assert train(toy_config(arrays), tmp_path / "run").state.step == 30


def test_hooks_of_each_step_come_in_their_order(arrays, tmp_path):
    session = train(toy_config(arrays, train__epochs=1, train__batch_size=8), tmp_path / "run")
    hooks = ["set_progress", "before_forward", "before_update", "after_update"]
    expected = [("begin_epoch", 0)] + [(hook, step) for step in range(5) for hook in hooks]
    assert session.method.calls == expected


def test_each_line_has_the_schedules_the_metrics_and_the_signs_of_a_collapse(arrays, tmp_path):
    run = pretrain(toy_config(arrays, train__log_every=4, train__epochs=2), tmp_path / "run")
    lines = of_kind(run, "train")
    assert [line["step"] for line in lines] == [4, 8, 10, 12, 16, 20]
    assert [line["epoch"] for line in lines] == [1, 1, 1, 2, 2, 2]
    for line in lines:
        signs = {"effective_rank", "rankme", "spread"}
        assert signs | {"lr", "progress", "loss", "distance"} < line.keys()
        assert line["progress"] == pytest.approx((line["step"] - 1) / 20)
        assert line["loss"] == pytest.approx(line["distance"])


def test_the_monitor_is_made_of_the_images_and_asked_when_it_is_due(arrays, tmp_path):
    seen = []

    def make_monitor(_, train_source, validation_source):
        assert (len(train_source), len(validation_source)) == (40, 8)

        def monitor(backbone):
            seen.append(backbone)
            return {"20-NN": float(len(seen))}

        return monitor

    config = toy_config(arrays, train__epochs=5, train__monitor_every=2)
    session = train(config, tmp_path / "run", make_monitor)
    lines = of_kind(tmp_path / "run", "monitor")
    assert [(line["epoch"], line["20-NN"]) for line in lines] == [(0, 1), (2, 2), (4, 3), (5, 4)]
    assert all(backbone is session.method.online.backbone for backbone in seen)


def test_without_a_monitor_nothing_is_evaluated(arrays, tmp_path):
    run = pretrain(toy_config(arrays, train__epochs=1), tmp_path / "run")
    assert of_kind(run, "train") and not of_kind(run, "monitor")
    declined = pretrain(
        toy_config(arrays, train__epochs=1), tmp_path / "b", make_monitor=lambda *_: None
    )
    assert not of_kind(declined, "monitor")


@pytest.mark.parametrize("accumulate", [1, 4])
def test_checkpoints_are_kept_every_so_many_epochs(arrays, tmp_path, accumulate):
    config = toy_config(arrays, train__epochs=5, train__keep_every=2, optim__accumulate=accumulate)
    run = pretrain(config, tmp_path / "run")
    steps = sorted(int(path.stem[5:]) for path in (run / "checkpoints").glob("step-*.pt"))
    assert {20, 40, 50} <= set(steps) and len(steps) == 4  # those, and the last two


def test_checkpoints_that_were_kept_stay_when_a_run_continues_without_keeping(arrays, tmp_path):
    run = pretrain(toy_config(arrays, train__epochs=5, train__keep_every=1), tmp_path / "run")
    for step in (40, 50):
        (run / "checkpoints" / f"step-{step:09d}.pt").unlink()
    pretrain(toy_config(arrays, train__epochs=5, train__save_every=0.1), run)
    steps = sorted(int(path.stem[5:]) for path in (run / "checkpoints").glob("step-*.pt"))
    assert steps == [10, 20, 30, 49, 50]


@pytest.mark.parametrize("accumulate", [2, 3, 7])
def test_no_checkpoint_is_written_while_gradients_are_pending(
    arrays, tmp_path, accumulate, monkeypatch
):
    saved = []
    monkeypatch.setattr(checkpoint, "save", lambda folder, state, **_: saved.append(state["step"]))
    config = toy_config(arrays, train__save_every=0.1, optim__accumulate=accumulate)
    session = train(config, tmp_path / "run")
    assert len(saved) > 5
    assert all(session.schedule.updates_after(step - 1) for step in saved)


def test_a_loss_that_is_not_finite_ends_the_run_with_what_to_do(arrays, tmp_path, monkeypatch):
    forward = Toy.forward

    def broken(self, *views, **keywords):
        output = forward(self, *views, **keywords)
        return StepOutput(output.loss * float("nan"), output.embeddings, output.metrics)

    monkeypatch.setattr(Toy, "forward", broken)
    with pytest.raises(ValueError, match=r"NaN in the loss.*step 1 .*--optim\.lr below 0\.05"):
        pretrain(toy_config(arrays), tmp_path / "run")
    # On a GPU the step does not wait for its loss; the log line does.
    monkeypatch.setattr(FiniteCheck, "add", lambda *_: None)
    with pytest.raises(SharedError, match=r"loss is nan at step 1.*--optim\.lr below 0\.05"):
        pretrain(toy_config(arrays), tmp_path / "run")


def test_weights_with_nan_are_never_saved(arrays, tmp_path, monkeypatch):
    """The loss of the last step is finite, its update is not."""

    def diverge(self, now):
        if now.step == 29:
            self.online.projector.bias.data[0] = torch.nan

    monkeypatch.setattr(Toy, "after_update", diverge)
    with pytest.raises(SharedError, match=r"projector\.bias after step 30.*--optim\.lr below"):
        pretrain(toy_config(arrays), tmp_path / "run")
    state, _ = checkpoint.latest(tmp_path / "run/checkpoints")
    assert state["step"] < 30
    assert all(t.isfinite().all() for t in state["method"].values() if torch.is_tensor(t))


def test_a_collapse_is_reported_once_with_the_methods_hint(arrays, tmp_path, monkeypatch, capsys):
    forward = Toy.forward

    def collapsed(self, *views, **keywords):
        output = forward(self, *views, **keywords)
        one = torch.ones_like(output.embeddings) / 2  # all embeddings are the same unit vector
        return StepOutput(output.loss, one, output.metrics)

    monkeypatch.setattr(Toy, "forward", collapsed)
    monkeypatch.setattr(Toy, "collapse_hint", lambda self: "the toy is broken")
    run = pretrain(toy_config(arrays), tmp_path / "run")
    (warning,) = read_lines(run, "warnings.jsonl")
    assert warning["kind"] == "collapse"
    assert warning["message"].endswith("likely cause: the toy is broken")
    assert capsys.readouterr().err.count("warning: collapse") == 1


def test_a_collapse_is_not_reported_again_by_a_run_that_continues(arrays, tmp_path):
    with open_session(toy_config(arrays), tmp_path / "run", CPU) as session:
        session.warn("collapse", "before")
        session.state.step = 3
        session.save()
    with open_session(toy_config(arrays), tmp_path / "run", CPU) as session:
        assert session.collapsed


def test_the_environment_has_what_the_bits_depend_on(arrays, tmp_path):
    run = pretrain(toy_config(arrays, train__epochs=1), tmp_path / "run")
    environment = json.loads((run / "environment.json").read_text())
    assert environment["images"] == 40 and environment["steps"] == 10
    assert (environment["device"], environment["processes"]) == ("cpu", 1)
    assert environment["earlier"] == []
