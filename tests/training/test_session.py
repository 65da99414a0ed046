"""Opening a run: what is refused leaves every file as it was; what is restored is exact."""

import json

import pytest
import torch

from meanshift.config import FORMAT, Config
from meanshift.methods import MeanShift
from meanshift.ops import image_kernel
from meanshift.runtime import checkpoint
from meanshift.runtime.run_directory import RunDirectory
from meanshift.training import session as session_module
from meanshift.training.loop import pretrain
from meanshift.training.optim import Schedule
from meanshift.training.session import build_method, open_session
from tests.support.exact import assert_same
from tests.support.processes import read_lines
from tests.support.toy_method import Toy, make_arrays, toy_config

CPU = torch.device("cpu")


@pytest.fixture
def arrays(tmp_path):
    return make_arrays(tmp_path)


@pytest.fixture
def run(arrays, tmp_path):
    return pretrain(toy_config(arrays, train__epochs=1), tmp_path / "run")


def files(run):
    """The content of every file but the lock, which names the last process."""
    return {
        path: path.read_bytes()
        for path in run.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


def refused(config, run, message):
    before = files(run)
    with pytest.raises(ValueError, match=message):
        pretrain(config, run)
    assert files(run) == before


def test_other_settings_are_refused(arrays, run):
    other = toy_config(arrays, train__epochs=1, train__seed=1)
    refused(other, run, rf"train\.seed.*\n.*--encoder\.weights {run}")


def test_fewer_epochs_are_refused(arrays, tmp_path):
    run = pretrain(toy_config(arrays, train__epochs=2), tmp_path / "run")
    refused(toy_config(arrays, train__epochs=1), run, r"train\.epochs: 2 there, 1 now")


def test_more_epochs_of_a_run_that_is_not_finished_are_refused(arrays, tmp_path):
    with open_session(toy_config(arrays, train__epochs=2), tmp_path / "run", CPU) as session:
        session.state.step = 17
        session.save()
    more = toy_config(arrays, train__epochs=3)
    refused(more, tmp_path / "run", r"1 of 2 epochs.* finish it with --train\.epochs 2")


def test_other_images_are_refused(run, tmp_path):
    (tmp_path / "other").mkdir()
    other = make_arrays(tmp_path / "other", count=41)
    refused(toy_config(other, train__epochs=1), run, "other images")


def test_other_files_are_refused(arrays, tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").touch()
    refused(toy_config(arrays), tmp_path / "photos", "no config.json")


@pytest.mark.parametrize(
    ("version", "action"), [(FORMAT - 1, "train it again"), (FORMAT + 1, "newer meanshift")]
)
def test_a_run_of_another_format_is_refused_with_what_to_do(arrays, run, version, action):
    stored = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**stored, "format": version}))
    message = rf"config\.json: has format {version}, this version reads {FORMAT}; .*{action}"
    refused(toy_config(arrays, train__epochs=1), run, message)


def test_checkpoints_of_another_format_are_refused(arrays, run):
    for path in (run / "checkpoints").iterdir():
        state = torch.load(path, weights_only=True)
        torch.save({**state, "format": state["format"] + 1}, path)
    refused(toy_config(arrays, train__epochs=1), run, "format")


def test_a_checkpoint_of_another_version_of_the_method_is_refused(arrays, run, monkeypatch):
    build = Toy.build.__func__

    def changed(cls, settings, context):
        method = build(cls, settings, context)
        method.extra = torch.nn.Linear(2, 2)
        del method.assignments
        return method

    monkeypatch.setattr(Toy, "build", classmethod(changed))
    refused(
        toy_config(arrays, train__epochs=1),
        run,
        r"missing: extra\.weight, extra\.bias; unexpected: assignments",
    )


def test_what_is_not_saved_is_in_no_checkpoint_and_stays_as_it_was_built(arrays, run):
    state, _ = checkpoint.latest(run / "checkpoints")
    assert not [name for name in state["method"] if name.startswith("teacher")]
    assert any(name.startswith("online") for name in state["method"])
    with open_session(toy_config(arrays, train__epochs=1), run, CPU) as session:
        restored = session.method.state_dict()
        built = build_method(session.config, session.source).state_dict()
    assert torch.equal(restored["teacher.weight"], built["teacher.weight"])
    assert not torch.equal(restored["online.projector.weight"], built["online.projector.weight"])


def test_everything_else_is_restored(arrays, tmp_path):
    config = toy_config(arrays)
    with open_session(config, tmp_path / "run", CPU) as session:
        session.state.step = 7
        session.state.bad_files.reasons = {"a.jpg": "cut off"}
        session.method.second_bank.enqueue(torch.ones(3, 4), ids=torch.arange(3))
        torch.nn.init.normal_(session.method.online.projector.weight)
        session.save()
        saved = session.state.state_dict()
    with open_session(config, tmp_path / "run", CPU) as session:
        assert_same(session.state.state_dict(), saved)
        assert session.state.step == 7 and session.method.second_bank.written == 3


def test_the_same_seed_builds_the_same_weights_whatever_was_drawn_before(arrays):
    config = toy_config(arrays)
    torch.manual_seed(1)
    first = build_method(config)
    state = torch.random.get_rng_state()
    second = build_method(config)
    assert torch.equal(first.teacher.weight, second.teacher.weight)
    assert torch.equal(torch.random.get_rng_state(), state)  # and leaves the generator alone
    other = build_method(config.with_overrides({"train.seed": 1}))
    assert not torch.equal(first.teacher.weight, other.teacher.weight)


def test_the_encoder_has_the_same_weights_whatever_a_method_builds_before_it(monkeypatch):
    overrides = {"encoder.name": "resnet10", "encoder.width": 0.125, "method.bank_size": 300}
    config = Config().with_overrides(overrides)
    expected = build_method(config).online.backbone.state_dict()
    build = MeanShift.build.__func__

    def draw_first(cls, settings, context):
        torch.randn(7)
        return build(cls, settings, context)

    monkeypatch.setattr(MeanShift, "build", classmethod(draw_first))
    assert_same(build_method(config).online.backbone.state_dict(), expected)


@pytest.mark.parametrize(
    ("precision", "image_size", "expected"),
    [
        ("auto", 16, torch.float32),  # where oneDNN's gradients of bfloat16 are wrong
        ("auto", 48, torch.bfloat16),
        ("bfloat16", 16, torch.bfloat16),
    ],
)
def test_auto_avoids_bfloat16_where_its_gradients_are_wrong(
    arrays, tmp_path, monkeypatch, precision, image_size, expected
):
    monkeypatch.setattr(session_module, "pick_precision", lambda *_: torch.bfloat16)
    overrides = {
        "data.source": str(arrays), "data.image_size": image_size, "encoder.name": "resnet10",
        "encoder.width": 0.125, "method.bank_size": 40, "train.batch_size": 8,
        "train.precision": precision,
    }  # fmt: skip
    config = Config().with_overrides(overrides)
    with open_session(config, tmp_path / "run", CPU) as session:
        assert session.precision == expected


def test_a_finished_run_is_extended_by_the_schedule_of_its_new_length(arrays, run, capsys):
    first = read_lines(run)
    config = toy_config(arrays, train__epochs=4)
    for _ in range(2):  # it ends before its first step, as if it were killed
        with open_session(config, run, CPU) as session:
            assert session.state.step == 10
    assert "continues after step 10 of 40" in capsys.readouterr().err
    pretrain(config, run)
    lines = read_lines(run)
    assert lines[: len(first)] == first
    more = [line for line in lines[len(first) :] if line["kind"] == "train"]
    schedule = Schedule(config, 10)
    assert [line["step"] for line in more] == list(range(11, 41))
    assert [line["lr"] for line in more] == [schedule.lr(step) for step in range(10, 40)]
    assert [line["progress"] for line in more] == [step / 40 for step in range(10, 40)]
    (mark,) = read_lines(run, "warnings.jsonl")
    assert (mark["kind"], mark["step"]) == ("extended", 10)
    assert mark["message"].startswith("extended from 1 to 4 epochs: after step 10 the learning")
    assert RunDirectory.open(run).config.train.epochs == 4
    assert (run / "checkpoints" / "step-000000010.pt").is_file()  # of the run as it was finished


def test_an_extended_run_goes_on_without_its_newest_checkpoints(arrays, run):
    with open_session(toy_config(arrays, train__epochs=2), run, CPU):
        pass
    max((run / "checkpoints").iterdir()).unlink()
    pretrain(toy_config(arrays, train__epochs=2), run)
    (mark,) = read_lines(run, "warnings.jsonl")
    assert mark["kind"] == "extended" and mark["step"] < 10


def test_a_run_that_continues_with_other_arithmetic_says_so(arrays, tmp_path, capsys, monkeypatch):
    config = toy_config(arrays)
    with open_session(config, tmp_path / "run", CPU) as session:
        session.state.step = 7
        session.save()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    with open_session(config, tmp_path / "run", CPU):
        pass
    (warning,) = map(json.loads, (tmp_path / "run" / "warnings.jsonl").read_text().splitlines())
    assert warning["kind"] == "machine" and "with threads 7 after threads 1:" in warning["message"]
    assert "not bit for bit the same" in capsys.readouterr().err


def test_a_run_that_continues_without_the_c_kernel_says_so(arrays, tmp_path, monkeypatch):
    config = toy_config(arrays)
    monkeypatch.setattr(image_kernel, "description", lambda: "C 0123abcd")
    with open_session(config, tmp_path / "run", CPU) as session:
        session.state.step = 7
        session.save()
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert environment["image operators"] == "C 0123abcd"
    monkeypatch.setattr(image_kernel, "description", lambda: "torch")
    with open_session(config, tmp_path / "run", CPU):
        pass
    (warning,) = map(json.loads, (tmp_path / "run" / "warnings.jsonl").read_text().splitlines())
    expected = "continues with image operators torch after image operators C 0123abcd"
    assert warning["kind"] == "machine" and expected in warning["message"]
