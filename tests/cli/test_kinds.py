"""Vectors and signals through the same commands as images, and pairs that do not fit."""

import re

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from meanshift.config.recipes import recipe
from meanshift.data import open_source
from meanshift.evaluation.context import EvaluationContext
from meanshift.models.weights import load_weights
from meanshift.runtime import checkpoint
from meanshift.training.loop import pretrain
from meanshift.training.step import TrainStep
from tests.support.exact import assert_same
from tests.support.signals import write_tones

TINY = (
    "--encoder.width 0.125 --train.batch_size 16 --method.bank_size 32 --train.device cpu "
    "--train.epochs 1 --data.workers 0 --train.snapshots 2 --train.precision float32"
).split()


@pytest.fixture
def digits(tmp_path):
    """Scikit-learn's digits as vectors of 64 columns."""
    x, y = load_digits(return_X_y=True)
    x = x.astype("float32")
    np.savez(
        tmp_path / "digits.npz",
        x_train=x[:160],
        y_train=y[:160],
        x_test=x[160:240],
        y_test=y[160:240],
    )
    return tmp_path / "digits.npz"


@pytest.fixture
def tones(tmp_path):
    return write_tones(tmp_path / "tones")


@pytest.fixture
def command(call):
    """Run a command that must succeed; return what it printed."""

    def run(*arguments):
        code, out, err = call(*arguments)
        assert code == 0, err
        return out + err

    return run


def check_pages_and_files(command, run, data, kind, tmp_path):
    """Evaluate, embed, export and report a run."""
    printed = command("evaluate", "knn", run, "--compare", "pixels", f"random:{run}")
    assert "pixels: raw values;" in printed and "image" not in printed
    command("embed", run, data, "--out", tmp_path / "e.npz")
    exported = tmp_path / "encoder.safetensors"
    command("export", run, "--out", exported)
    page = command("report", run, "--out", tmp_path / "page.html")
    assert "page.html" in page and f"Training {kind}s" in (tmp_path / "page.html").read_text()
    ours, theirs = load_weights(run), load_weights(exported)
    assert theirs.sample_spec == ours.sample_spec and ours.sample_spec.kind == kind
    features = [EvaluationContext(w, str(data)).train.features for w in (ours, theirs)]
    assert torch.equal(*features)
    written = open_source(str(tmp_path / "e.npz"))["train"]
    assert written.labeled and written.kind == "vector"
    return features[0]


def test_vectors_end_to_end(command, digits, tmp_path):
    run = tmp_path / "run"
    printed = command("pretrain", "vector", "--data", digits, "--out", run, *TINY)
    assert "train 160 vectors of 10 classes" in printed and "vectors/s" in printed
    features = check_pages_and_files(command, run, digits, "vector", tmp_path)
    assert features.shape == (160, 64)
    command("evaluate", "linear", "cluster", run)
    again = command(
        "pretrain", "vector", "--data", tmp_path / "e.npz", "--out", tmp_path / "b", *TINY
    )
    assert "validation 80 vectors" in again


def test_signals_end_to_end(command, tones, tmp_path):
    run = tmp_path / "run"
    flags = [*TINY, "--data.image_size", "1024", "--train.batch_size", "4"]
    printed = command("pretrain", "signal", "--data", tones, "--out", run, *flags)
    assert (
        "train 12 signals of 2 classes (6 each)" in printed and "no validation signals" in printed
    )
    assert check_pages_and_files(command, run, tones, "signal", tmp_path).shape == (8, 64)


@pytest.mark.parametrize(
    ("name", "data", "flags", "message"),
    [
        ("small", "tones", "", "conv4 does not take signals; .*choose the recipe signal"),
        ("small", "digits", "", "conv4 does not take vectors; .*choose the recipe vector"),
        ("vector", "sample", "", "mlp does not take images; .*choose the recipe small"),
        ("vector", "tones", "", "mlp does not take signals; .*choose the recipe signal"),
        ("signal", "digits", "", "conv1d does not take vectors; type --encoder.name mlp"),
        ("vector", "digits", "--encoder.name resnet18", "resnet18 does not take vectors"),
        ("vector", "digits", "--method.name pirl", "needs patches of images.*--method.name msf"),
        ("signal", "tones", "--data.image_size 512", "got 512, need at least 1024 values"),
        ("vector", "digits", "--data.kind signal", "got signal, and .* holds vectors"),
    ],
)
def test_pairs_that_do_not_fit_write_nothing(
    call, digits, tones, tmp_path, name, data, flags, message
):
    place = {"tones": tones, "digits": digits}.get(data, data)
    run = tmp_path / "run"
    code, _, err = call("pretrain", name, "--data", place, "--out", run, *flags.split())
    last = err.strip().splitlines()[-1]
    assert code != 0 and last.startswith("meanshift: ")
    assert re.search(message, last), last
    assert not run.exists()


def test_weights_of_another_kind_are_refused(command, call, digits, tones, tmp_path):
    run = tmp_path / "run"
    command("pretrain", "vector", "--data", digits, "--out", run, *TINY)
    code, _, err = call("evaluate", "knn", run, "--data", tones)
    assert code != 0 and "takes vectors of 64" in err and "has signals of 1" in err


def interrupted(monkeypatch, config, out, step):
    """Train until a step, and then again to the end."""
    take = TrainStep.__call__

    def stop(self, images, now):
        if now.step == step:
            raise KeyboardInterrupt
        return take(self, images, now)

    with monkeypatch.context() as patch:
        patch.setattr(TrainStep, "__call__", stop)
        with pytest.raises(KeyboardInterrupt):
            pretrain(config, out)
    pretrain(config, out)


def final_state(out):
    state, errors = checkpoint.latest(out / "checkpoints")
    assert not errors
    return state


@pytest.mark.parametrize(
    ("name", "workers"),
    [("vector", 0), ("signal", 0), pytest.param("signal", 2, marks=pytest.mark.slow)],
)
def test_a_run_that_was_stopped_ends_in_the_same_bits(
    monkeypatch, digits, tones, tmp_path, name, workers
):
    config = recipe(name).with_overrides(
        {
            "data.source": str(digits if name == "vector" else tones),
            "data.image_size": 1024,
            "encoder.width": 0.125,
            "method.bank_size": 32,
            "train.batch_size": 4,
            "train.epochs": 2,
            "train.save_every": 0.4,
            "train.snapshots": 0,
            "train.device": "cpu",
            "train.precision": "float32",
        }
    )
    pretrain(config, tmp_path / "whole")
    changed = config.with_overrides({"data.workers": workers})
    interrupted(monkeypatch, changed, tmp_path / "stopped", 5)
    whole, stopped = (final_state(tmp_path / run) for run in ("whole", "stopped"))
    assert whole["step"] == stopped["step"] > 5
    assert_same(whole["method"], stopped["method"])
    assert_same(whole["optimizer"], stopped["optimizer"])
