"""TensorBoard gets the same metrics; without it the error says what to install."""

import sys

import pytest

from meanshift.config import Config
from meanshift.runtime.run_directory import RunDirectory
from meanshift.training.loop import pretrain
from meanshift.training.trackers import Trackers
from tests.support.processes import read_lines
from tests.support.toy_method import make_arrays, toy_config

ENABLED = Config().with_overrides({"train.tensorboard": True})


def test_without_tensorboard_the_extra_is_named_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ValueError, match=r"pip install 'meanshift\[tensorboard\]'"):
        pretrain(toy_config(make_arrays(tmp_path), train__tensorboard=True), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_without_the_setting_nothing_is_written(tmp_path):
    trackers = Trackers(Config(), RunDirectory(tmp_path))
    trackers.start(0)
    trackers.log("train", 1, {"loss": 1.0})
    trackers.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.extras
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_has_the_lines_of_the_metrics(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = toy_config(make_arrays(tmp_path), train__tensorboard=True, train__epochs=1)
    run = pretrain(config, tmp_path / "run")
    events = EventAccumulator(str(run / "tensorboard")).Reload()
    lines = [line for line in read_lines(run) if line["kind"] == "train"]
    logged = events.Scalars("train/loss")
    assert [event.step for event in logged] == [line["step"] for line in lines]
    assert [event.value for event in logged] == pytest.approx([line["loss"] for line in lines])


@pytest.mark.extras
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_events_after_the_step_that_a_run_continues_from_are_hidden(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for start, value in ((0, 1.0), (2, 2.0)):
        trackers = Trackers(ENABLED, RunDirectory(tmp_path))
        trackers.start(start)
        for step in range(start + 1, 5):
            trackers.log("train", step, {"loss": value})
        trackers.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.value for event in events.Scalars("train/loss")] == [1.0, 1.0, 2.0, 2.0]
