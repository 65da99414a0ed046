"""Every method in the training loop: exact resume, several processes, evaluation, the report."""

import numpy as np
import pytest
import torch

from meanshift.cli import main
from meanshift.config import METHODS
from meanshift.config.recipes import recipe
from meanshift.data.loader import Batch
from meanshift.methods.base import Progress
from meanshift.models.weights import export, load_weights
from meanshift.runtime import checkpoint
from meanshift.training import loop
from meanshift.training.loop import pretrain
from meanshift.training.session import open_session
from meanshift.training.step import TrainStep
from tests.support.exact import assert_same
from tests.support.forked import in_processes

CPU = torch.device("cpu")
QUICK = ("swav", "deepcluster-v2")
"""multi-crop, and a pass over the data before an epoch"""
NAMES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in METHODS]


class Interrupted(Exception):
    pass


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    rng = np.random.default_rng(0)
    labels = np.arange(48) % 3
    pixels = rng.integers(0, 60, (48, 16, 16, 3))
    pixels[np.arange(48), :, :, labels] += 180
    path = tmp_path_factory.mktemp("images") / "images.npz"
    np.savez(path, x_train=pixels.astype(np.uint8), y_train=labels)
    return path


@pytest.fixture(scope="module")
def teacher(source, tmp_path_factory):
    """Weights for CompRess."""
    folder = tmp_path_factory.mktemp("teacher")
    run = pretrain(configure("byol-asym", source, epochs=1), folder / "run")
    return export(load_weights(run), folder / "teacher.safetensors")


def configure(name, source, teacher=None, epochs=3):
    settings = {
        "data.source": str(source), "data.image_size": 16, "data.validation": "none",
        "encoder.name": "conv3", "encoder.stem": "imagenet", "encoder.width": 0.125,
        "train.batch_size": 12, "train.epochs": epochs, "train.device": "cpu",
        "train.precision": "float32", "train.snapshots": 2, "train.snapshot_images": 12,
        "train.save_every": 0.5, "train.log_every": 1, "train.monitor_every": 0,
        "method.name": name, "encoder.batch_groups": 2 if name in ("moco", "co2") else 1,
    }  # fmt: skip
    config = recipe("cifar10-r18").with_overrides(settings)
    more = {"method.bank_size": 24, "method.queue_size": 0, "method.positives": 4}
    more |= {"method.small_crops": 2, "method.negatives": 16, "method.background": 16}
    if name == "compress":
        more["method.teacher"] = str(teacher)
    known = config.to_dict()["method"]
    return config.with_overrides(
        {path: value for path, value in more.items() if path.partition(".")[2] in known}
    )


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
