"""The start of a run: principal components of its images, or given weights."""

import json
import shutil

import numpy as np
import pytest
import torch
from torchvision import models

from meanshift.config import Config
from meanshift.config.recipes import recipe
from meanshift.models.encoder import Encoder
from meanshift.models.weights import (
    export,
    fingerprint,
    load_weights,
    starts,
)
from meanshift.runtime import checkpoint
from meanshift.runtime.run_directory import RunDirectory
from meanshift.training import start as start_module
from meanshift.training.loop import pretrain, train
from meanshift.training.session import build_method, open_session
from meanshift.training.start import Start
from tests.support.exact import assert_same
from tests.support.forked import in_processes
from tests.support.sources import open_one
from tests.support.toy_method import make_arrays, toy_config

CPU = torch.device("cpu")


@pytest.fixture
def source(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (24, 16, 16, 3), dtype=np.uint8)
    np.save(tmp_path / "images.npy", pixels)
    return tmp_path / "images.npy"


@pytest.fixture
def configure(source):
    def of(**changed):
        settings = {
            "data.source": str(source), "data.image_size": 16, "data.workers": 0,
            "data.validation": "none", "encoder.name": "resnet10", "encoder.width": 0.125,
            "encoder.stem": "small-stride2", "encoder.init": "random", "encoder.weights": "",
            "method.bank_size": 16, "train.batch_size": 8, "train.epochs": 2,
            "optim.warmup_epochs": 0, "train.snapshots": 0, "train.device": "cpu",
        }  # fmt: skip
        changed = {name.replace("__", "."): value for name, value in changed.items()}
        return recipe("small-resnet18").with_overrides(settings | changed)

    return of


def backbone_of(config, run):
    """The online and the target backbone of a session before its first step."""
    with open_session(config, run, CPU) as session:
        return [
            {k: v.clone() for k, v in encoder.backbone.state_dict().items()}
            for encoder in (session.method.online, session.method.target)
        ]


def state(spec):
    return load_weights(spec).backbone.state_dict()


def recorded(run):
    return json.loads((run / "environment.json").read_text())["start"]


def refuse_images(*_, **__):
    raise AssertionError("the images were read again")


# Principal components


def test_online_and_target_start_from_components_and_the_run_keeps_them(
    configure, source, tmp_path
):
    run = tmp_path / "run"
    online, target = backbone_of(configure(encoder__init="pca"), run)
    assert_same(online, target)
    random = build_method(configure()).online.backbone.state_dict()
    assert not torch.equal(online["conv1.weight"], random["conv1.weight"])
    source.unlink()
    assert_same(state(f"untrained:{run}"), online)
    assert_same(state(run / "start.safetensors"), online)
    assert_same(state(f"random:{run}"), random)
    assert load_weights(f"untrained:{run}").title == (
        "our msf, resnet10, small-stride2 stem, width 0.125, PCA start, before its first step"
    )
    assert starts(run) == {"random start": f"random:{run}", "PCA start": f"untrained:{run}"}
    card = recorded(run)
    assert (card["init"], card["images"], card["statistics_images"]) == ("pca", 12, 12)
    assert len(card["layers"]) == 12 and card["random_layers"] == []
    (warning,) = RunDirectory(run).read("warnings.jsonl")
    assert warning["kind"] == "initialization" and "only 12 images" in warning["message"]


def test_the_heads_are_those_of_a_random_start(configure, tmp_path):
    """So that only the backbone differs between two runs of one seed."""
    random = build_method(configure()).state_dict()
    with open_session(configure(encoder__init="pca"), tmp_path / "run", CPU) as session:
        ours = session.method.state_dict()
    heads = [name for name in random if "projector" in name or "predictor" in name]
    assert heads and all(torch.equal(ours[name], random[name]) for name in heads)


def test_a_run_that_continues_is_not_initialized_again(configure, tmp_path, monkeypatch):
    config = configure(encoder__init="pca")
    run = pretrain(config, tmp_path / "run")
    card = recorded(run)
    begun = (run / "start.safetensors").read_bytes()
    monkeypatch.setattr(start_module, "initialize_from_images", refuse_images)
    pretrain(config, run)
    assert recorded(run) == card
    (run / "start.safetensors").unlink()
    online, _ = backbone_of(config, run)
    assert_same(online, state(run))  # the checkpoint is enough
    with pytest.raises(ValueError, match=r"no start\.safetensors.*random:"):
        load_weights(f"untrained:{run}")
    for path in (run / "checkpoints").iterdir():
        path.unlink()
    with pytest.raises(AssertionError, match="read again"):
        pretrain(config, run)
    monkeypatch.undo()
    backbone_of(config, run)
    assert (run / "start.safetensors").read_bytes() == begun


def test_a_random_start_needs_no_file(configure, tmp_path):
    run = tmp_path / "run"
    online, _ = backbone_of(configure(), run)
    assert not (run / "start.safetensors").exists()
    assert_same(state(f"untrained:{run}"), online)
    assert_same(state(f"random:{run}"), online)
    assert starts(run) == {"random start": f"random:{run}"} and recorded(run) == {"init": "random"}


def session_state(config, run):
    with open_session(config, run, CPU) as session:
        return dict(session.method.state_dict())


def test_all_processes_start_from_the_components_of_the_first(configure, tmp_path):
    config = configure(encoder__init="pca", train__batch_norm="local")
    alone = session_state(config, tmp_path / "alone")
    for result in in_processes(2, session_state, config, tmp_path / "run"):
        assert_same(result, alone)
    assert_same(state(f"untrained:{tmp_path / 'run'}"), state(f"untrained:{tmp_path / 'alone'}"))


# Given weights


@pytest.fixture
def origin(configure, tmp_path):
    """A run of another architecture than that of the configuration."""
    return pretrain(
        configure(encoder__stem="small", encoder__width=0.25, train__epochs=1), tmp_path / "origin"
    )


@pytest.mark.parametrize("kind", ["run", "checkpoint", "export"])
def test_a_run_starts_from_weights_of_ours_with_their_architecture(
    configure, origin, tmp_path, kind
):
    spec = {
        "run": origin,
        "checkpoint": next((origin / "checkpoints").iterdir()),
        "export": tmp_path / "encoder.safetensors",
    }[kind]
    export(load_weights(origin), tmp_path / "encoder.safetensors")
    run = tmp_path / "run"
    config = configure(encoder__weights=str(spec))
    with open_session(config, run, CPU) as session:
        assert (session.config.encoder.stem, session.config.encoder.width) == ("small", 0.25)
        assert_same(session.backbone.state_dict(), state(origin))
        assert_same(session.method.target.backbone.state_dict(), state(origin))
        assert all(parameter.requires_grad for parameter in session.backbone.parameters())
        assert session.config.encoder.batch_norm == "fixed"
    shutil.rmtree(origin)
    assert_same(state(f"untrained:{run}"), state(run / "start.safetensors"))
    card = recorded(run)
    assert card["weights"] == str(spec) and "small stem, width 0.25" in card["title"]
    assert card["fingerprint"] == fingerprint(load_weights(f"untrained:{run}").backbone)


def test_a_run_whose_origin_is_gone_continues_and_is_evaluated(configure, origin, tmp_path):
    run = tmp_path / "run"
    config = configure(encoder__weights=str(origin))
    online, _ = backbone_of(config, run)
    shutil.rmtree(origin)
    again, _ = backbone_of(config, run)  # before its first checkpoint: from its own copy
    assert_same(again, online)
    card = recorded(run)
    pretrain(config, run)
    assert recorded(run) == card
    assert_same(state(f"untrained:{run}"), online)
    trained = load_weights(run)
    assert trained.title.startswith("our msf, resnet10, small stem, width 0.25, start from ")
    (run / "start.safetensors").unlink()
    again, _ = backbone_of(config, run)  # after it: from the checkpoint
    assert_same(again, trained.backbone.state_dict())
    with pytest.raises(ValueError, match="origin: not found"):
        pretrain(config, tmp_path / "another")
    assert not (tmp_path / "another").exists()


def test_a_run_starts_from_a_third_party_file(configure, tmp_path):
    torch.manual_seed(0)
    network = models.mobilenet_v3_small(num_classes=5).eval().requires_grad_(False)
    torch.save(network.state_dict(), tmp_path / "theirs.pth")
    run = tmp_path / "run"
    online, _ = backbone_of(configure(encoder__weights=str(tmp_path / "theirs.pth")), run)
    assert torch.equal(online["features.0.0.weight"], network.features[0][0].weight)
    assert RunDirectory(run).config.encoder.name == "mobilenet_v3_small"
    (tmp_path / "theirs.pth").unlink()
    pretrain(configure(encoder__weights=str(tmp_path / "theirs.pth")), run)
    assert load_weights(run).backbone(torch.zeros(1, 3, 16, 16)).shape == (1, 1024)


def test_another_origin_is_another_run(configure, origin, tmp_path):
    run = tmp_path / "run"
    backbone_of(configure(encoder__weights=str(origin)), run)
    other = next((origin / "checkpoints").iterdir())
    with pytest.raises(ValueError, match=r"encoder\.weights: .*there"):
        pretrain(configure(encoder__weights=str(other)), run)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("torchvision:resnet18", "names no trained weights.*--encoder.name resnet18 instead"),
        ("torchvision:resnet18:random", "names no trained .*--encoder.name resnet18 instead"),
        ("pixels", "is no encoder"),
        ("nowhere.pth", "nowhere.pth: not found"),
        ("meanshift:nothing", "meanshift:nothing: no such weights"),
    ],
)
def test_weights_that_cannot_be_a_start_are_refused(configure, tmp_path, spec, message):
    with pytest.raises(ValueError, match=message):
        pretrain(configure(encoder__weights=spec), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_given_weights_keep_their_batch_norm_statistics_in_both_encoders(
    configure, origin, tmp_path
):
    """The statistics do not move, the weights do; `batch` moves both."""

    def trained(batch_norm):
        config = configure(encoder__weights=str(origin), encoder__batch_norm=batch_norm)
        with open_session(config, tmp_path / batch_norm, CPU) as session:
            train(session)
        return [encoder.backbone.state_dict() for encoder in session.method.encoders()]

    given = state(origin)
    moving = [name for name in given if "running" in name]
    weights = [name for name in given if name.endswith(("conv1.weight", "bn1.bias"))]
    assert moving and weights
    for batch_norm, fixed in (("fixed", True), ("batch", False)):
        for backbone in trained(batch_norm):
            assert all(torch.equal(backbone[name], given[name]) == fixed for name in moving)
            assert not any(torch.equal(backbone[name], given[name]) for name in weights)


def test_given_weights_lower_the_learning_rate_unless_it_is_typed():
    base = Config().with_overrides({"optim.lr": 0.1})
    given = base.with_overrides({"encoder.weights": "a.pth"})
    assert (given.optim.lr, given.optim.heads_first) == (pytest.approx(0.03), 0.3)
    again = given.with_overrides({"encoder.weights": "b.pth"})
    assert again.optim == given.optim  # it is lowered once
    typed = {"encoder.weights": "a.pth", "optim.lr": 0.2, "optim.heads_first": 0}
    typed |= {"encoder.batch_norm": "batch"}
    config = base.with_overrides(typed)
    assert (config.optim.lr, config.optim.heads_first) == (0.2, 0)
    assert config.encoder.batch_norm == "batch"


def test_components_and_given_weights_exclude_each_other():
    components = Config().with_overrides({"encoder.init": "pca"})
    given = components.with_overrides({"encoder.weights": "a.pth"})  # wins over a recipe's start
    assert given.encoder.init == "random"
    with pytest.raises(ValueError, match=r"type --encoder\.init random"):
        Config().with_overrides({"encoder.init": "pca", "encoder.weights": "a.pth"})


def test_weights_for_another_image_size_are_refused_with_what_to_type(configure, origin, tmp_path):
    """As the position embeddings of a ViT, whose number depends on it."""
    config = configure()
    images = open_one(config.data.source)
    start = Start(config, RunDirectory(tmp_path / "run"), images, CPU, load_weights(origin))
    with pytest.raises(ValueError, match=r"16 pixels.*--data\.image_size 16"):
        start(Encoder(config.encoder).backbone)


def test_a_method_with_an_encoder_of_its_own_refuses_a_start(tmp_path):
    config = toy_config(make_arrays(tmp_path), encoder__init="pca")
    with pytest.raises(ValueError, match="the method toy has an encoder of its own"):
        pretrain(config, tmp_path / "run")


def test_the_first_checkpoint_of_a_start_is_named_by_its_origin(configure, tmp_path):
    run = pretrain(configure(encoder__init="pca", train__epochs=1), tmp_path / "run")
    values, _ = checkpoint.latest(run / "checkpoints")
    assert values["config"]["encoder"]["init"] == "pca"
    assert "PCA start, step 3" in load_weights(run).title
