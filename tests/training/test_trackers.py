"""Trackers get every line once, only from rank 0; one that fails does not stop a run."""

import json
import signal
import sys
from types import ModuleType

import pytest

from meanshift.config import RESUME_SAFE, Config
from meanshift.runtime import checkpoint, distributed
from meanshift.runtime.run_directory import RunDirectory
from meanshift.training import trackers
from meanshift.training.loop import pretrain
from meanshift.training.trackers import Trackers
from meanshift.training.trackers.base import Tracker, scalars
from tests.support.processes import kill_in, read_lines, run_processes
from tests.support.toy_method import make_arrays, toy_config


class FileTracker(Tracker):
    """A tracker whose log is a file: written anew by each start, one for each process."""

    def start(self, lines):
        self.path = self.run_directory.folder / f"log-{distributed.rank()}.jsonl"
        self.path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        self.event("start", len(lines))

    def log(self, line):
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def saved(self):
        self.event("saved", len(read_log(self.run_directory.folder)))

    def close(self, *, finished):
        self.event("close", finished)

    def event(self, *what):
        with (self.run_directory.folder / "events.jsonl").open("a") as file:
            file.write(json.dumps(what) + "\n")


def read_log(run):
    return read_lines(run, "log-0.jsonl")


def events(run):
    return [tuple(json.loads(line)) for line in (run / "events.jsonl").read_text().splitlines()]


@pytest.fixture
def file_tracker(monkeypatch):
    monkeypatch.setitem(trackers._TRACKERS, "wandb", FileTracker)
    return {"train__trackers": "wandb"}


def test_a_tracker_gets_every_line_and_hears_of_checkpoints(tmp_path, file_tracker):
    config = toy_config(make_arrays(tmp_path), train__epochs=1, **file_tracker)
    run = pretrain(config, tmp_path / "run")
    lines = read_lines(run)
    assert read_log(run) == lines
    assert events(run)[0] == ("start", 0)
    assert events(run)[1:] == [
        ("saved", 4),
        ("saved", 7),
        ("saved", 10),
        ("saved", 12),
        ("close", True),
    ]
    assert {line["kind"] for line in lines} == {"train", "snapshot"}


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_killed_run_continues_with_each_line_once_from_rank_0(tmp_path, file_tracker, world):
    run = tmp_path / "run"
    config = toy_config(make_arrays(tmp_path), train__epochs=2, **file_tracker)
    (tmp_path / "config.json").write_text(config.to_json())
    command = ["pretrain", "--config", str(tmp_path / "config.json"), "--out", str(run)]
    kills = dict.fromkeys(range(world), kill_in(14))
    codes, group = run_processes(world, command, tmp_path / "killed", before=kills)
    assert codes == [-signal.SIGKILL] * world, group.output
    assert read_log(run)[-1]["step"] == 14
    state, _ = checkpoint.latest(run / "checkpoints")
    assert 10 < state["step"] < 14
    codes, group = run_processes(world, command, tmp_path / "continued")
    assert codes == [0] * world, group.output
    lines = read_lines(run)
    repeated = len([line for line in lines if line["step"] <= state["step"]])
    starts = [event for event in events(run) if event[0] == "start"]
    assert starts == [("start", 0), ("start", repeated)]
    assert read_log(run) == lines
    assert len({(line["kind"], line["step"]) for line in lines}) == len(lines)
    assert not (run / "log-1.jsonl").exists()


def test_a_tracker_may_be_added_when_a_run_continues(tmp_path, file_tracker):
    arrays = make_arrays(tmp_path)
    run = pretrain(toy_config(arrays, train__epochs=1), tmp_path / "run")
    assert not (run / "log-0.jsonl").exists()
    pretrain(toy_config(arrays, train__epochs=1, **file_tracker), run)
    assert read_log(run) == read_lines(run)
    assert RunDirectory(run).config.train.trackers == ("wandb",)
    assert "train.trackers" in RESUME_SAFE


@pytest.mark.usefixtures("file_tracker")
def test_a_run_goes_on_without_a_tracker_that_fails(tmp_path, monkeypatch, capsys):
    class Broken(FileTracker):
        def log(self, line):
            raise OSError("No space left\non device")

        def start(self, lines):
            """Leave the file to the other one."""

    monkeypatch.setitem(trackers._TRACKERS, "mlflow", Broken)
    config = toy_config(make_arrays(tmp_path), train__epochs=1, train__trackers="mlflow,wandb")
    run = pretrain(config, tmp_path / "run")
    (warning,) = read_lines(run, "warnings.jsonl")
    assert warning["kind"] == "tracker"
    assert warning["message"].startswith("mlflow failed (OSError: No space left on device)")
    assert capsys.readouterr().err.count("warning: mlflow failed") == 1
    assert read_lines(run)[-1]["step"] == 10
    assert read_log(run) == read_lines(run)
    assert events(run)[-1] == ("close", True)


@pytest.mark.parametrize("broken", ["start", "log", "saved", "close"])
def test_a_failure_is_reported_once_wherever_it_is(tmp_path, monkeypatch, broken):
    calls = []

    class Broken(Tracker):
        def start(self, lines):
            self.record("start")

        def log(self, line):
            self.record("log")

        def saved(self):
            self.record("saved")

        def close(self, *, finished):
            self.record("close")

        def record(self, method):
            calls.append(method)
            if method == broken:
                raise RuntimeError(method)

    monkeypatch.setitem(trackers._TRACKERS, "wandb", Broken)
    both = Trackers(Config().with_overrides({"train.trackers": "wandb"}), RunDirectory(tmp_path))
    reported = []
    both.start(lambda kind, message: reported.append((kind, message)))
    both.log({"kind": "train", "step": 1, "epoch": 1, "loss": 1.0})
    both.saved()
    both.close(finished=True)
    assert calls[-1] == broken
    ((kind, message),) = reported
    assert kind == "tracker" and f"wandb failed (RuntimeError: {broken}) and is off" in message


def test_a_run_that_stops_early_is_not_finished(tmp_path, file_tracker):
    def fail(_):
        raise RuntimeError("stopped")

    config = toy_config(make_arrays(tmp_path), train__epochs=1, **file_tracker)
    with pytest.raises(RuntimeError, match="stopped"):
        pretrain(config, tmp_path / "run", make_monitor=lambda *_: fail)
    assert events(tmp_path / "run")[-1] == ("close", False)


@pytest.mark.usefixtures("file_tracker")
def test_only_the_process_that_writes_has_trackers(tmp_path):
    config = Config().with_overrides({"train.trackers": "wandb"})
    assert Trackers(config, RunDirectory(tmp_path)).active
    assert not Trackers(config, RunDirectory(tmp_path, writes=False)).active


def test_without_the_setting_nothing_is_written(tmp_path):
    none = Trackers(Config(), RunDirectory(tmp_path))
    none.start(lambda kind, message: None)
    none.log({"kind": "train", "step": 1, "epoch": 1, "loss": 1.0})
    none.saved()
    none.close(finished=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("tensorboard", "tensorboard"),
        ("wandb", "wandb"),
        ("mlflow", "mlflow"),
        ("mlflow", "sqlalchemy"),
        ("mlflow", "alembic"),
    ],
)
def test_a_missing_library_is_named_before_anything_is_written(tmp_path, monkeypatch, name, module):
    for present in ("tensorboard", "wandb", "mlflow", "sqlalchemy", "alembic"):
        monkeypatch.setitem(sys.modules, present, ModuleType(present))
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        ValueError, match=rf"need {module}; type: pip install 'meanshift\[{name}\]'"
    ):
        pretrain(toy_config(make_arrays(tmp_path), train__trackers=name), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_names_of_a_line_have_its_kind():
    line = {"kind": "train", "step": 3, "epoch": 1, "loss": 0.5}
    assert scalars(line) == {"train/epoch": 1, "train/loss": 0.5}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("tensorbord", "got 'tensorbord', need one of tensorboard, wandb, mlflow"),
        ("wandb,wandb", "got 'wandb,wandb', need each name once"),
        (True, "got True, need values with commas between them"),
    ],
)
def test_other_names_are_refused(value, message):
    with pytest.raises(ValueError, match=rf"train\.trackers: {message}"):
        Config().with_overrides({"train.trackers": value})


def test_several_are_typed_with_commas():
    config = Config().with_overrides({"train.trackers": "tensorboard,mlflow"})
    assert config.train.trackers == ("tensorboard", "mlflow")
    assert Config.from_json(config.to_json()) == config
    assert config.with_overrides({"train.trackers": ""}).train.trackers == ()
