"""A method in a file of its own: chosen by its path, trained, continued and evaluated."""

import json
import shlex

import pytest
import torch

from meanshift.cli import parse_arguments
from meanshift.cli.settings import configure
from meanshift.config.recipes import command_for, recipe
from meanshift.runtime import checkpoint
from meanshift.viz.run_reader import Run
from tests.support.commands import read_metrics, run_program
from tests.support.exact import assert_same
from tests.support.processes import outcome

SIMSIAM = '''"""SimSiam (Chen and He 2020), without a target encoder."""

from dataclasses import dataclass

from torch import nn
from torch.nn import functional as F

from meanshift.config import MethodSettings
from meanshift.methods import Method, StepOutput
from meanshift.models.heads import mlp


class SimSiam(Method):
    @dataclass(frozen=True, kw_only=True)
    class Settings(MethodSettings):
        """Two strong views that predict each other."""

        defaults = {"optim.weight_decay": 5e-4, "views.blur": 0.25}
        name: str = "simsiam"
        """name of the method"""
        hidden: int = 32
        """width of the predictor"""

    def __init__(self, encoder, hidden):
        super().__init__()
        self.online = encoder
        self.predictor = mlp(encoder.dim, hidden, encoder.dim)

    @classmethod
    def views(cls, settings, operators):
        return (operators.spec("a", "strong", index=0), operators.spec("b", "strong", index=1))

    @classmethod
    def build(cls, settings, context):
        return cls(context.encoder(dim=settings.dim), settings.hidden)

    def forward(self, a, b, *, ids=None, labels=None):
        z_a, z_b = self.online(a), self.online(b)
        similar = F.cosine_similarity(self.predictor(z_a), z_b.detach())
        similar = (similar + F.cosine_similarity(self.predictor(z_b), z_a.detach())) / 2
        agreement = similar.detach().mean()
        metrics = {"agreement": (agreement, len(z_a))}
        return StepOutput(-similar.mean(), F.normalize(z_a.detach(), dim=1), metrics)
'''
FLAGS = (
    "--data.image_size 16 --encoder.name resnet10 --encoder.stem small-stride2 "
    "--encoder.width 0.125 --train.batch_size 4 --train.device cpu --train.epochs 3 "
    "--train.snapshots 2 --data.workers 0 --train.log_every 1 --train.save_every 0.4"
).split()


@pytest.fixture
def command(tmp_path, photos, monkeypatch):
    """The arguments that train the method, typed in its folder."""
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "mine.py").write_text(SIMSIAM)
    monkeypatch.chdir(folder)
    method = ["--method.module", "mine.py:SimSiam", "--method.hidden", "16"]
    return ["pretrain", "small", "--data", str(photos), *method, *FLAGS]


def test_its_settings_are_flags_with_help(call, command):
    code, out, _ = call(*command, "--out", "run", "--help")
    flat = " ".join(out.split())
    assert code == 0
    assert "--method.hidden INT width of the predictor [32]" in flat
    assert "Two strong views that predict each other." in flat
    assert "--method.k " not in flat


@pytest.mark.slow
def test_it_is_trained_stopped_continued_and_evaluated(call, command, tmp_path, monkeypatch):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    code, _, err = call(*command, "--out", whole)
    assert code == 0, err
    assert "optim.weight_decay: 0.0005 (small: 0.0001)" in err
    assert "views.blur: 0.25 (small: 0.0)" in err
    config = json.loads((whole / "config.json").read_text())
    assert config["method"]["name"] == "simsiam" and config["method"]["hidden"] == 16
    assert config["views"]["blur"] == 0.25

    monkeypatch.setattr("meanshift.training.loop.log_metrics", _stop_at_step(5))
    assert call(*command, "--out", stopped)[0] == 1
    monkeypatch.undo()
    step = checkpoint.latest(stopped / "checkpoints")[0]["step"]
    assert 0 < step < 9
    done = run_program(*command, "--out", str(stopped), cwd=tmp_path / "code")  # a fresh process
    assert done.returncode == 0, done.stderr
    assert_same(outcome(stopped), outcome(whole))

    monkeypatch.chdir(tmp_path)  # the path of the method does not depend on the folder
    losses = [record["loss"] for record in read_metrics(whole, "train")]
    assert len(losses) == 9 and all(-1 <= loss <= 1 for loss in losses)
    code, _, err = call("evaluate", "knn", whole, "--ks", "1")
    assert code == 0, err
    result = json.loads((whole / "results" / "knn.json").read_text())
    assert 0 <= result["metrics"]["1-NN"] <= 100
    state = torch.load(max((whole / "checkpoints").glob("*.pt")), weights_only=True)
    assert any(name.startswith("predictor.") for name in state["method"])


def _stop_at_step(step):
    """A replacement of `log_metrics` that fails like a killed process, without a last save."""
    from meanshift.training import loop

    log_metrics = loop.log_metrics

    def fail(session, *arguments):
        log_metrics(session, *arguments)
        if session.state.step == step:
            raise SystemExit(1)

    return fail


def test_python_and_the_command_give_one_run(command, photos):
    """The path of the method is relative in both."""
    names = [name.removeprefix("--") for name in FLAGS[::2]]
    flags = dict(zip(names, FLAGS[1::2], strict=True))
    method = {"method.module": "mine.py:SimSiam", "method.hidden": 16}
    config = recipe("small").with_overrides({"data.source": str(photos), **method, **flags})
    assert configure(parse_arguments([*command, "--out", "run"])) == config


@pytest.mark.parametrize("value", ["", "1"])
def test_the_traceback_of_an_error_in_the_method_can_be_printed(
    call, command, tmp_path, monkeypatch, value
):
    mistaken = SIMSIAM.replace("        z_a, z_b =", "        z_a, z_b = [int('a mistake')]  #")
    (tmp_path / "code" / "mine.py").write_text(mistaken)
    monkeypatch.setenv("MEANSHIFT_TRACEBACK", value)
    code, _, err = call(*command, "--out", tmp_path / "run")
    assert code == 2 and "a mistake" in err
    assert ("mine.py" in err.partition("Traceback")[2]) == bool(value)
    assert ("set MEANSHIFT_TRACEBACK=1" in err) == (not value)


def test_the_command_that_a_run_reports_gives_the_run_again(call, command, tmp_path, monkeypatch):
    assert call(*command, "--out", tmp_path / "run", "--train.epochs", "1")[0] == 0
    monkeypatch.chdir(tmp_path)
    config = Run(tmp_path / "run").config
    words = shlex.split(command_for(config, str(tmp_path / "run")))[1:]
    assert configure(parse_arguments(words)) == config
    again = ["pretrain", "--config", str(tmp_path / "run" / "config.json"), "--out", "again"]
    assert configure(parse_arguments(again)) == config
    changed = parse_arguments([*again, "--method.hidden", "8"])
    assert configure(changed) == config.with_overrides({"method.hidden": 8})
