"""Runs on samples that are not 8-bit RGB images: what they learn of them, and exact resume."""

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from meanshift.config import Config, SampleSpec
from meanshift.config.recipes import recipe
from meanshift.data import open_source
from meanshift.evaluation import knn
from meanshift.evaluation.context import EvaluationContext
from meanshift.evaluation.embed import embed
from meanshift.models.features import extract_features
from meanshift.models.weights import export, load_weights
from meanshift.runtime import checkpoint
from meanshift.training.loop import pretrain
from meanshift.training.step import TrainStep
from tests.support.exact import assert_same

RANDOM = np.random.default_rng(0)
CPU = torch.device("cpu")


def configure(source, **changed):
    settings = {
        "data.source": str(source), "data.image_size": 16, "data.workers": 0,
        "data.validation": "none", "encoder.name": "resnet10", "encoder.width": 0.125,
        "encoder.stem": "small-stride2", "encoder.init": "random", "encoder.weights": "",
        "method.bank_size": 16, "train.batch_size": 8, "train.epochs": 2, "views.noise": 0.05,
        "views.channel_dropout": 0.1, "optim.warmup_epochs": 0, "train.snapshots": 0,
        "train.save_every": 1, "train.device": "cpu",
    }  # fmt: skip
    changed = {name.replace("__", "."): value for name, value in changed.items()}
    return recipe("small-resnet18").with_overrides(settings | changed)


@pytest.fixture(scope="module")
def bands(tmp_path_factory):
    """13 bands of 16 bits, three classes of different brightness."""
    path = tmp_path_factory.mktemp("bands") / "bands.npz"
    labels = np.arange(24) % 3
    pixels = 4000 * labels[:, None, None, None] + RANDOM.integers(0, 3000, (24, 16, 16, 13))
    np.savez(path, images=pixels.astype(np.uint16), labels=labels)
    return path


@pytest.fixture(scope="module")
def scans(tmp_path_factory):
    """Gray files of 12 bits, of two sizes."""
    root = tmp_path_factory.mktemp("scans") / "scans"
    root.mkdir()
    for index in range(24):
        pixels = RANDOM.integers(0, 4096, (20 + index % 2, 24)).astype(np.uint16)
        Image.fromarray(pixels).save(root / f"{index:02}.png")
    return root


@pytest.fixture(scope="module")
def run(bands, tmp_path_factory):
    return pretrain(configure(bands), tmp_path_factory.mktemp("runs") / "bands")


def final_state(run):
    state, _ = checkpoint.latest(run / "checkpoints")
    return {name: state[name] for name in ("step", "method", "optimizer", "metrics")}


class Stopped(Exception):
    pass


@pytest.fixture
def stop_in(monkeypatch):
    """Let the next run stop in a step; with -1 it does not."""
    step = TrainStep.__call__
    at = [-1]

    def stopping(self, images, now):
        if now.step == at[0]:
            raise Stopped
        return step(self, images, now)

    monkeypatch.setattr(TrainStep, "__call__", stopping)
    return lambda number: at.__setitem__(0, number)


def test_a_run_remembers_what_its_samples_are(run, bands):
    data = Config.from_json((run / "config.json").read_text()).data
    spec = open_source(str(bands))["train"].sample_spec
    assert data.sample_spec == spec
    assert (spec.channels, spec.dtype, len(spec.mean)) == (13, "int32", 13)
    first = next(iter(load_weights(run).backbone.parameters()))
    assert first.shape[1] == 13


def test_8_bit_rgb_leaves_the_settings_as_they_are(tmp_path):
    np.save(tmp_path / "rgb.npy", RANDOM.integers(0, 256, (16, 16, 16, 3)).astype(np.uint8))
    run = pretrain(configure(tmp_path / "rgb.npy", train__epochs=1), tmp_path / "run")
    data = json.loads((run / "config.json").read_text())["data"]
    unset = {"channels": 0, "dtype": "auto", "range": "auto", "mean": "auto", "std": "auto"}
    assert {name: data[name] for name in unset} == unset


def test_a_stopped_run_keeps_its_samples_and_ends_in_the_same_bits(scans, tmp_path, stop_in):
    whole = pretrain(configure(scans, data__range="minmax"), tmp_path / "whole")
    parts = tmp_path / "parts"
    stop_in(2)
    with pytest.raises(Stopped):
        pretrain(configure(scans, data__range="minmax"), parts)
    spec = Config.from_json((parts / "config.json").read_text()).data.sample_spec
    stop_in(4)
    with pytest.raises(Stopped):
        pretrain(configure(scans, data__workers=2), parts)
    stop_in(-1)
    pretrain(configure(scans, data__workers=2), parts)
    assert spec.range == (0, 4095) and spec.channels == 1
    assert_same(final_state(parts), final_state(whole))


def test_another_range_is_refused_when_a_run_continues(bands, run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    with pytest.raises(ValueError, match=r"data\.range"):
        pretrain(configure(bands, data__range=(0.0, 4095.0), train__epochs=3), tmp_path / "run")


def test_a_typed_type_alone_still_measures_the_rest(scans, tmp_path):
    config = configure(scans, data__dtype="int32", data__range=(0.0, 4095.0), train__epochs=1)
    run = pretrain(config, tmp_path / "run")
    spec = Config.from_json((run / "config.json").read_text()).data.sample_spec
    assert spec.channels == 1 and spec.range == (0, 4095) and 0.4 < spec.mean[0] < 0.6


@pytest.mark.parametrize("spec", ["", "random:", "untrained:"])
def test_the_weights_of_13_channels_are_evaluated(run, spec):
    result = knn.evaluate(EvaluationContext(load_weights(f"{spec}{run}")))
    assert result.metrics["1-NN"] >= 50  # brightness alone separates the classes


def test_exported_weights_give_the_same_embeddings(run, bands, tmp_path):
    own = load_weights(run)
    exported = load_weights(export(own, tmp_path / "encoder.safetensors"))
    assert exported.sample_spec == own.sample_spec
    features = []
    for weights in (exported, own):
        source = weights.adapted(open_source(str(bands))["train"])
        options = {"image_size": 16, "device": CPU}
        features.append(extract_features(weights.backbone, source, **options))
    assert torch.equal(*features)


def test_weights_for_other_channels_are_refused(run, scans, bands, tmp_path):
    gray = open_source(str(scans))["train"]
    with pytest.raises(ValueError, match=r"takes images of 13 channels, and .*scans has images of"):
        load_weights(run).adapted(gray)
    config = configure(bands, encoder__weights="meanshift:cifar10-small")
    with pytest.raises(ValueError, match=r"samples of 13 channels.*--encoder\.weights"):
        pretrain(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_weights_of_8_bits_and_of_16_take_one_another(scans, tmp_path):
    deep = open_source(str(scans))["train"]
    rgb = load_weights("meanshift:cifar10-small")
    adapted = rgb.adapted(deep).sample_spec
    assert adapted.channels == 3 and adapted.range == deep.sample_spec.range
    assert (adapted.mean, adapted.std) == (SampleSpec().mean, SampleSpec().std)
    assert rgb.adapted(deep).sample(0).max() > 0.9  # and not 4095 / 65535
    run = pretrain(configure(scans, train__epochs=1), tmp_path / "run")
    np.save(tmp_path / "8.npy", RANDOM.integers(0, 256, (9, 16, 16)).astype(np.uint8))
    shallow = load_weights(run).adapted(open_source(str(tmp_path / "8.npy"))["train"])
    assert shallow.sample_spec.is_bytes and shallow.sample(0).dtype == torch.uint8


def test_given_rgb_weights_get_gray_images_repeated(tmp_path):
    np.save(tmp_path / "gray.npy", RANDOM.integers(0, 256, (16, 16, 16)).astype(np.uint8))
    config = configure(
        tmp_path / "gray.npy", train__epochs=1, encoder__weights="meanshift:cifar10-small"
    )
    run = pretrain(config, tmp_path / "run")
    spec = Config.from_json((run / "config.json").read_text()).data.sample_spec
    assert spec == SampleSpec()
    assert next(iter(load_weights(run).backbone.parameters())).shape[1] == 3


def test_what_is_left_out_is_said(scans, tmp_path, capsys):
    pretrain(configure(scans, train__epochs=1, views__gray=0.2), tmp_path / "run")
    printed = "".join(capsys.readouterr())
    assert "data: images of 1 channel, 16 bits or more, " in printed
    assert "saturation, hue and grayscale are for RGB images, so they are left out" in printed


def test_embeddings_are_written_for_13_channels(run, bands, tmp_path):
    embed(load_weights(run), str(bands), tmp_path / "e.npz")
    with np.load(tmp_path / "e.npz") as stored:
        assert all(np.isfinite(a).all() for a in stored.values() if a.dtype.kind == "f")
        assert any(len(array) == 24 for array in stored.values())
