"""timm's networks and weights, against timm itself; without timm, an error that names the extra."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import meanshift as ms
from meanshift import config
from meanshift.config import SampleSpec
from meanshift.config.recipes import recipe
from meanshift.data.open import open_source
from meanshift.evaluation import knn
from meanshift.evaluation.context import EvaluationContext
from meanshift.methods.teacher import Teacher
from meanshift.models.encoder import Encoder, build_backbone, memory_format
from meanshift.models.initialization import initialize_from_images
from meanshift.models.input_check import InputRefused, check_image_size, count_features
from meanshift.models.split_batch_norm import SplitBatchNorm2d
from meanshift.models.sync_batch_norm import convert_sync_batch_norm
from meanshift.models.weights import export, load_weights
from meanshift.runtime import distributed, rng
from meanshift.training.loop import pretrain
from tests.support.commands import run_program

CPU = torch.device("cpu")
FAMILIES = [
    "test_byobnet", "test_convnext", "test_efficientnet", "test_maxvit", "test_nfnet",
    "test_resnet", "test_vit", "test_vit_relpos", "mixer_s32_224",
]  # fmt: skip


@pytest.fixture(scope="session")
def timm():
    return pytest.importorskip("timm")


def images(channels=3, size=64, count=2):
    return torch.randn(count, channels, size, size, generator=torch.Generator().manual_seed(0))


def build(name, *, size=64, channels=3, **settings):
    samples = SampleSpec(channels=channels, mean=(0.5,) * channels, std=(0.25,) * channels)
    return build_backbone(
        config.Encoder(name=f"timm:{name}", **settings), image_size=size, samples=samples
    )


@torch.no_grad()
def features(network, batch):
    return network.eval()(batch)


def write_images(folder, size=64, count=24):
    pixels = np.random.default_rng(0).integers(0, 256, (count, size, size, 3), dtype=np.uint8)
    path = folder / "images.npz"
    labels = np.arange(count) % 3
    np.savez(path, x_train=pixels, y_train=labels, x_test=pixels[:9], y_test=labels[:9])
    return path


def configure(source, **changed):
    settings = {
        "data.source": str(source), "data.image_size": 64, "data.workers": 0,
        "encoder.name": "timm:test_convnext", "encoder.init": "random", "encoder.output": "plain",
        "method.bank_size": 16, "train.batch_size": 8, "train.epochs": 2,
        "train.snapshots": 0, "train.device": "cpu", "train.precision": "float32",
    }  # fmt: skip
    changed = {name.replace("__", "."): value for name, value in changed.items()}
    return recipe("small").with_overrides(settings | changed)


# Without timm


def test_a_missing_timm_is_named_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    needed = r"encoders named timm:NAME need timm; type: pip install 'meanshift\[timm\]'"
    with pytest.raises(ValueError, match=needed):
        pretrain(configure(write_images(tmp_path)), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    for spec in ("timm:resnet18", "timm:resnet18=weights.pth"):
        with pytest.raises(ValueError, match=needed):
            load_weights(spec)


@pytest.mark.parametrize("settings", [{"stem": "small"}, {"width": 0.5}])
def test_stem_and_width_do_not_apply(settings):
    with pytest.raises(ValueError, match=r"type --encoder\.stem imagenet --encoder\.width 1"):
        build("resnet18", **settings)


def test_the_help_of_the_encoder_names_timm():
    texts = {name: text for name, *_, text in config.settings()}
    assert "timm:NAME" in texts["encoder.name"]
    assert "timm:NAME" in texts["encoder.weights"]


def test_an_image_size_is_tried_in_evaluation_mode():
    """With the reason of the network; modes and statistics are as before."""
    norm = nn.BatchNorm2d(3)
    network = nn.Sequential(norm, nn.Flatten(), nn.Linear(3 * 8 * 8, 5))
    options = {"channels": 3, "error": "--image-size: got 9"}
    check_image_size(network, image_size=8, **options)
    assert count_features(network, (3, 8, 8)) == 5
    with pytest.raises(ValueError, match=r"^--image-size: got 9 \(RuntimeError: .*mat1"):
        check_image_size(network, image_size=9, **options)
    assert all(module.training for module in network.modules())
    assert norm.num_batches_tracked == 0
    with pytest.raises(InputRefused, match="need one row each"):
        count_features(norm, (3, 8, 8))


# Networks


@pytest.mark.extras
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("channels", [3, 5])
def test_a_network_is_timms_own_for_any_number_of_channels(timm, name, channels):
    torch.manual_seed(0)
    ours, width = build(name, channels=channels)
    assert all(module.training for module in ours.modules())
    torch.manual_seed(0)
    fixed = timm.models.get_pretrained_cfg(name).fixed_input_size
    options = {"img_size": 64} if fixed else {}
    theirs = timm.create_model(name, num_classes=0, in_chans=channels, **options)
    batch = images(channels)
    assert torch.equal(features(ours, batch), features(theirs, batch))
    assert features(ours, batch).shape == (2, width)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert memory_format(ours) == torch.channels_last


@pytest.mark.extras
@pytest.mark.parametrize(
    ("name", "size", "channels", "message"),
    [
        ("resnet81", 64, 3, r"timm:resnet81: timm has no such network; need .*timm:resnet18"),
        ("qqqq", 64, 3, r"need one of its names, such as timm:resnet18"),
        ("", 64, 3, r"need one of its names, such as timm:resnet18"),
        ("resnet18.a1_in1k", 64, 3, r"names weights; type --encoder\.weights timm:resnet18\.a1"),
        ("test_vit", 70, 3, r"got 70, .*patches of 16 pixels\); type --data\.image_size 64"),
        ("crossvit_tiny_240", 64, 3, r"got 64, .*type --data\.image_size 240"),
        ("csatv2", 64, 5, r"data\.channels: got 5, .*type --data\.channels 3"),
    ],
)
@pytest.mark.filterwarnings("ignore:CSATv2")
def test_what_a_network_does_not_take_is_refused(name, size, channels, message):
    with pytest.raises(ValueError, match=message):
        build(name, size=size, channels=channels)


@pytest.mark.extras
@pytest.mark.parametrize("method", ["swav", "pirl"])
def test_views_of_another_size_are_refused_before_anything_is_written(tmp_path, method):
    """The small crops of SwAV, the patches of PIRL."""
    settings = recipe("small").with_overrides(
        {
            "data.source": str(write_images(tmp_path)), "data.image_size": 64, "data.workers": 0,
            "encoder.name": "timm:test_vit", "encoder.init": "random", "method.name": method,
            "train.batch_size": 8, "train.device": "cpu",
        }
    )  # fmt: skip
    with pytest.raises(ValueError, match=rf"{method} also has views of \d+ pixels, which timm:t"):
        pretrain(settings, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.extras
def test_batch_norm_with_an_activation_is_split_and_synchronized(monkeypatch):
    """timm's has the activation inside: a plain batch norm in its place would lose it."""
    settings = config.Encoder(name="timm:test_efficientnet", batch_groups=2)
    torch.manual_seed(0)
    split = Encoder(settings, image_size=64).backbone
    torch.manual_seed(0)
    plain, _ = build("test_efficientnet")
    assert any(isinstance(m, SplitBatchNorm2d) for m in split.modules())
    assert list(split.state_dict()) == list(plain.state_dict())
    batch = images(count=4)
    with torch.no_grad():
        halves = torch.cat([plain.train()(part) for part in batch.split(2)])
        torch.testing.assert_close(split.train()(batch), halves)
    torch.manual_seed(0)
    synced, _ = build("test_efficientnet")
    whole, _ = build("test_efficientnet")
    whole.load_state_dict(synced.state_dict())
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    convert_sync_batch_norm(synced, CPU)
    monkeypatch.undo()
    with torch.no_grad():
        torch.testing.assert_close(
            synced.train()(batch), whole.train()(batch), rtol=1e-4, atol=1e-4
        )


@pytest.mark.extras
def test_principal_components_of_convolutions_and_the_names_of_what_stays_random(tmp_path):
    source = open_source(str(write_images(tmp_path)))["train"]
    options = {"image_size": 64, "seed": 0, "device": CPU}
    for name, norms in (("test_resnet", True), ("test_convnext", False), ("test_vit", False)):
        network, _ = build(name)
        before = next(m for m in network.modules() if isinstance(m, nn.Conv2d)).weight.clone()
        result = initialize_from_images(network, source, **options)
        assert result.layers
        assert (result.statistics_images is not None) == norms
        assert not torch.equal(before, network.get_submodule(result.layers[0]).weight)
        assert ("blocks.0.attn.qkv" in result.random_layers) == (name == "test_vit")
        assert torch.isfinite(features(network, images())).all()


# Runs


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    pytest.importorskip("timm")
    folder = tmp_path_factory.mktemp("timm")
    return pretrain(configure(write_images(folder)), folder / "run")


@pytest.mark.extras
def test_a_run_is_evaluated_compared_and_continued(timm, run):
    weights = load_weights(run)
    result = knn.evaluate(EvaluationContext(weights, device="cpu"), ks=[1])
    assert 0 <= result.metrics["1-NN"] <= 100
    torch.manual_seed(rng.derive_seed(0, 0, rng.INITIAL))
    start = timm.create_model("test_convnext", num_classes=0)
    batch = images()
    for spec in (f"untrained:{run}", f"random:{run}"):
        assert torch.equal(features(load_weights(spec).backbone, batch), features(start, batch))
    assert not torch.equal(features(weights.backbone, batch), features(start, batch))
    assert ms.load(run).embed(np.zeros((2, 64, 64, 3), np.uint8)).shape == (2, 64)
    source = json.loads((run / "config.json").read_text())["data"]["source"]
    pretrain(configure(source, train__epochs=3), run)
    assert load_weights(run).title.endswith("step 9")


@pytest.mark.extras
def test_a_run_that_is_continued_equals_one_that_was_not_stopped(run, tmp_path):
    source = json.loads((run / "config.json").read_text())["data"]["source"]
    changed = {"encoder__name": "timm:test_vit", "train__save_every": 0.34}
    whole = pretrain(configure(source, **changed), tmp_path / "whole")
    stopped = pretrain(configure(source, **changed), tmp_path / "stopped")
    steps = sorted((stopped / "checkpoints").glob("*.pt"))
    assert len(steps) == 2
    steps[-1].unlink()  # as after a kill: the newest one is that of an earlier step
    pretrain(configure(source, **changed), stopped)
    one, two = (load_weights(each).backbone.state_dict() for each in (whole, stopped))
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.extras
@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_timm_loads_an_exported_file_strictly(timm, run, tmp_path, suffix):
    weights = load_weights(run)
    path = export(weights, tmp_path / f"encoder{suffix}")
    if suffix == ".pth":
        state = torch.load(path, weights_only=True)["state_dict"]
    else:
        state = load_file(path)
    theirs = timm.create_model("test_convnext", num_classes=0)
    theirs.load_state_dict(state, strict=True)
    batch = images()
    assert torch.equal(features(theirs, batch), features(weights.backbone, batch))
    with pytest.raises(ValueError, match=r"exported by meanshift.*type .*encoder.* alone"):
        load_weights(f"timm:test_convnext={path}")


# Weights


@pytest.fixture
def trained(timm):
    """A classifier of timm whose weights are not those of any seed that is used elsewhere."""

    def of(name):
        torch.manual_seed(7)
        network = timm.create_model(name)
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        return network

    return of


def without_classifier(network):
    network.reset_classifier(0)
    return network


@pytest.mark.extras
@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
@pytest.mark.parametrize("name", ["test_resnet", "test_vit", "deit_tiny_distilled_patch16_224"])
def test_a_file_of_timm_is_loaded_with_its_size_and_normalization(
    timm, trained, tmp_path, name, suffix
):
    network = trained(name)
    path = tmp_path / f"weights{suffix}"
    save = save_file if suffix == ".safetensors" else torch.save
    save(network.state_dict(), path)
    weights = load_weights(f"timm:{name}={path}")
    known = timm.models.get_pretrained_cfg(name)
    assert weights.image_size == known.input_size[-1]
    assert weights.sample_spec == SampleSpec(mean=known.mean, std=known.std)
    batch = images(size=weights.image_size)
    expected = features(without_classifier(network), batch)
    torch.testing.assert_close(features(weights.backbone, batch), expected)


@pytest.mark.extras
def test_features_are_those_of_timm_with_its_normalization(trained, tmp_path):
    """Mean and std of test_vit are 0.5, not ImageNet's."""
    network = trained("test_vit")
    path = tmp_path / "weights.pth"
    torch.save(network.state_dict(), path)
    pixels = np.random.default_rng(1).integers(0, 256, (4, 160, 160, 3), dtype=np.uint8)
    normalized = (torch.from_numpy(pixels).permute(0, 3, 1, 2) / 255 - 0.5) / 0.5
    model = ms.load(f"timm:test_vit={path}")
    expected = features(without_classifier(network), normalized)
    torch.testing.assert_close(
        torch.from_numpy(model.embed(pixels)), expected, rtol=1e-3, atol=1e-4
    )
    assert "mean 0.5,0.5,0.5" in model.weights.title
    with pytest.raises(ValueError, match="needs another normalization"):
        Teacher.load(f"timm:test_vit={path}")
    with pytest.raises(ValueError, match=r"--image-size: got 70, .*for its own 160 pixels"):
        EvaluationContext(
            load_weights(f"timm:test_vit={path}"), str(write_images(tmp_path)), image_size=70
        )


@pytest.mark.extras
def test_a_file_that_does_not_fit_is_refused(trained, tmp_path):
    network = trained("test_resnet")
    state = network.state_dict()
    path = tmp_path / "weights.pth"
    torch.save(state, path)
    with pytest.raises(ValueError, match="no known network"):
        load_weights(f"timm:test_vit={path}")
    torch.save({k: v for k, v in state.items() if k != "layer2.0.conv1.weight"}, path)
    with pytest.raises(ValueError, match=r"layer2\.0\.conv1\.weight is missing"):
        load_weights(f"timm:test_resnet={path}")
    torch.save({**state, "layer9.weight": torch.zeros(2)}, path)
    with pytest.raises(ValueError, match=r"layer9\.weight is unknown"):
        load_weights(f"timm:test_resnet={path}")
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match="no weights that can be read"):
        load_weights(f"timm:test_resnet={path}")
    with pytest.raises(ValueError, match=r"nowhere\.safetensors: not a complete"):
        load_weights(f"timm:test_resnet={tmp_path / 'nowhere.safetensors'}")


HUB = """
import torch
from meanshift.models.weights import load_weights
for spec in ("timm:test_vit", "timm:test_vit.r160_in1k", "timm:test_resnet", "timm:test_maxvit"):
    try:
        weights = load_weights(spec)
        print(weights.title, weights.image_size, float(weights.backbone.cls_token.sum()))
    except ValueError as error:
        print(error)
"""


@pytest.mark.extras
def test_pretrained_weights_come_from_the_cache_of_the_hub(trained, tmp_path):
    """Through timm's own loading, offline; what is not in the cache is one line."""
    network = trained("test_vit")
    folder = tmp_path / "models--timm--test_vit.r160_in1k"
    snapshot = folder / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0" * 40)
    save_file(network.state_dict(), snapshot / "model.safetensors")
    environment = os.environ | {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    process = subprocess.run(
        [sys.executable, "-c", HUB], env=environment, capture_output=True, text=True, check=True
    )
    lines = process.stdout.splitlines()
    token = float(network.cls_token.detach().sum())
    for line in lines[:2]:
        title, _, rest = line.partition(" (mean 0.5,0.5,0.5, std 0.5,0.5,0.5) ")
        assert title == "timm's test_vit.r160_in1k"
        assert rest == f"160 {token}"
    assert lines[2].startswith("timm:test_resnet.r160_in1k: the download failed (")
    assert lines[2].endswith("type timm:test_resnet.r160_in1k=FILE for a file that is here")
    assert lines[3].startswith("timm:test_maxvit: timm has no weights for it; type")
    assert len(lines) == 4


@pytest.mark.extras
def test_unknown_weights_name_those_that_there_are():
    with pytest.raises(ValueError, match=r"no such weights; it has timm:test_vit\.r160_in1k"):
        load_weights("timm:test_vit.nothing")
    with pytest.raises(ValueError, match="no such network; need timm:resnet18"):
        load_weights("timm:resnt18")


@pytest.mark.extras
@pytest.mark.parametrize("name", ["test_resnet", "test_vit"])
def test_a_run_starts_from_a_file_of_timm_with_its_normalization(trained, tmp_path, name):
    """A ViT is resized from 160 to 64 pixels by timm."""
    network = trained(name)
    path = tmp_path / "weights.safetensors"
    save_file(network.state_dict(), path)
    source = write_images(tmp_path)
    settings = configure(source, encoder__weights=f"timm:{name}={path}", train__epochs=1)
    run = pretrain(settings, tmp_path / "run")
    path.unlink()  # the run needs it no more
    start = load_weights(f"untrained:{run}")
    assert start.config.encoder.name == f"timm:{name}"
    assert start.config.data.mean == (0.5, 0.5, 0.5)
    without_classifier(network)
    if name == "test_vit":
        network.set_input_size(img_size=(64, 64))
    batch = images()
    torch.testing.assert_close(features(start.backbone, batch), features(network, batch))
    pretrain(settings.with_overrides({"train.epochs": 2}), run)


@pytest.mark.extras
def test_the_program_evaluates_a_file_of_timm(trained, tmp_path):
    torch.save({"state_dict": trained("test_resnet").state_dict()}, tmp_path / "weights.pth")
    source = write_images(tmp_path)
    spec = f"timm:test_resnet={tmp_path / 'weights.pth'}"
    process = run_program(
        "evaluate", "knn", spec, "--data", str(source), "--device", "cpu", cwd=tmp_path
    )
    assert process.returncode == 0, process.stderr
    (card,) = (tmp_path / "evaluations").rglob("knn*.json")
    assert (
        "timm's test_resnet.r160_in1k (mean 0.5" in json.loads(card.read_text())["card"]["encoder"]
    )
    process = run_program("evaluate", "knn", "timm:resnt18", "--data", str(source), cwd=tmp_path)
    assert process.returncode == 2 and "Traceback" not in process.stderr
    assert not any(isinstance(m, nn.Linear) for m in load_weights(spec).backbone.modules())
