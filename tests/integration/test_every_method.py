"""Every method in the training loop: exact resume, several processes, evaluation, the report."""

import pytest
import torch

from meanshift.cli import main
from meanshift.config import METHODS
from meanshift.data.loader import Batch
from meanshift.methods.base import Progress
from meanshift.runtime import checkpoint
from meanshift.training import loop
from meanshift.training.loop import pretrain
from meanshift.training.session import open_session
from meanshift.training.step import TrainStep
from tests.support.every_method import configure
from tests.support.exact import assert_same
from tests.support.forked import in_processes

CPU = torch.device("cpu")
QUICK = ("swav", "deepcluster-v2")
"""multi-crop, and a pass over the data before an epoch"""
NAMES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in METHODS]


class Interrupted(Exception):
    pass


def train_until(config, out, stop):
    """Train or continue a run up to a step, and leave without a save; the whole run with -1."""
    step = TrainStep.__call__

    def interrupted(self: TrainStep, images: Batch, now: Progress):
        if now.step == stop:
            raise Interrupted
        return step(self, images, now)

    TrainStep.__call__ = interrupted
    try:
        with open_session(config, out, CPU) as session:
            loop.train(session)
    except Interrupted:
        pass
    finally:
        TrainStep.__call__ = step


def final_state(run):
    state, _ = checkpoint.latest(run / "checkpoints")
    assert state["step"] == 12
    return {name: state[name] for name in ("method", "optimizer", "metrics")}


@pytest.mark.parametrize("name", NAMES)
def test_interrupted_in_an_epoch_it_ends_in_the_same_bits(name, source, teacher, tmp_path):
    config = configure(name, source, teacher)
    train_until(config, tmp_path / "whole", -1)
    for step in (3, 7, -1):  # after the saves at 2 and 6
        train_until(config, tmp_path / "parts", step)
    assert_same(final_state(tmp_path / "parts"), final_state(tmp_path / "whole"))


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_a_run_of_two_processes_is_continued_by_one(name, source, teacher, tmp_path):
    """Within a tolerance: sums over processes have another order, batch norm sees half a batch."""
    config = configure(name, source, teacher)
    in_processes(2, train_until, config, tmp_path / "run", 7)
    train_until(config, tmp_path / "run", -1)
    state = final_state(tmp_path / "run")["method"]
    assert all(t.isfinite().all() for t in state.values() if isinstance(t, torch.Tensor))


@pytest.mark.parametrize("name", NAMES)
def test_it_is_evaluated_and_reported(name, source, teacher, tmp_path, capsys):
    run = pretrain(configure(name, source, teacher, epochs=1), tmp_path / "run")
    assert main(["evaluate", "knn", str(run), "--data", str(source), "--device", "cpu"]) == 0
    assert main(["report", str(run)]) == 0
    assert name in (run / "report.html").read_text()
    assert main(["figures", str(run), "--only", "views", "--out", str(tmp_path / "figures")]) == 0
    assert list((tmp_path / "figures").iterdir())
    capsys.readouterr()
