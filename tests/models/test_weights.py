"""Weights of runs and of other programs: recognized by their keys or refused, never executed."""

import argparse
import copy
import hashlib
import json
import math
import os
import pickle
import re
import shutil
import urllib.error
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save, save_file
from torch import nn
from torchvision import models

from meanshift import config, load_encoder
from meanshift.config.recipes import recipe
from meanshift.models import third_party
from meanshift.models import weights as weights_module
from meanshift.models.encoder import Encoder, build_backbone
from meanshift.models.weights import (
    EXPORT_FORMAT,
    Weights,
    export,
    fingerprint,
    load_snapshot,
    load_weights,
)
from meanshift.runtime import checkpoint, checksum
from meanshift.training.loop import pretrain
from meanshift.training.session import build_method

SLIM = config.Encoder(name="resnet10", width=0.125)
TITLE = "ResNet-10 of width 0.125"
SLIM_FEATURES = 64


def trained(network, seed=0):
    """The network in evaluation mode, with batch statistics unlike those of a new network."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.uniform_(-0.1, 0.1, generator=generator)
                module.running_var.uniform_(0.5, 1.5, generator=generator)
                module.num_batches_tracked.fill_(7)
    return network.eval()


def slim(seed, settings=SLIM):
    torch.manual_seed(seed)
    return trained(build_backbone(settings)[0], seed)


@pytest.fixture(scope="module")
def online():
    return slim(1)


@pytest.fixture(scope="module")
def target():
    return slim(2)


@pytest.fixture(scope="module")
def resnet18():
    torch.manual_seed(3)
    return trained(models.resnet18())


def behind(prefix, state):
    return {prefix + key: tensor for key, tensor in state.items()}


def head(prefix, *kinds):
    """The state of a head as the programs number it: Linear, BatchNorm1d, ReLU, ..."""
    return behind(prefix, nn.Sequential(*kinds).state_dict())


def two_layers(prefix, inputs, outputs):
    kinds = nn.Linear(inputs, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, outputs)
    return head(prefix, *kinds)


def numbered(network):
    """As `nn.Sequential(*network.children())` names the same weights, the classifier left out."""
    return nn.Sequential(*list(network.children())[:-1]).state_dict()


def saved(tmp_path, contents, name="weights.pth", **options):
    torch.save(contents, tmp_path / name, **options)
    return tmp_path / name


@torch.no_grad()
def features(network, size=64):
    images = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))
    return network(images)


def without_classifier(network, layer="fc"):
    """The original network without its classifier, without the code of the package."""
    network = copy.deepcopy(network)
    parent, _, child = layer.rpartition(".")
    setattr(network.get_submodule(parent), child, nn.Identity())
    return network.eval()


def rewrite(path, contents):
    """Write the contents of an exported file again, with a checksum."""
    if path.suffix == ".safetensors":
        tensors = {key: value for key, value in contents.items() if key != "meanshift"}
        metadata = re.sub("(?<=crc32:)[0-9a-f]{8}", "00000000", contents["meanshift"])
        path.unlink()  # the tensors may be mapped
        path.write_bytes(checksum.fill(save(tensors, {"meanshift": metadata})))
    else:
        checkpoint.write(path, contents)


def assert_loaded(weights, original):
    """The weights and the output are those of the original, in evaluation mode."""
    expected, state = original.state_dict(), weights.backbone.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[key], expected[key]) for key in expected)
    assert not any(module.training for module in weights.backbone.modules())
    assert torch.equal(features(weights.backbone), features(original))


def error_of(spec):
    """The error message of weights that are refused."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        load_weights(spec)
    assert type(caught.value) in (ValueError, checkpoint.FormatError, checksum.DamagedFile)
    return str(caught.value)


# Recognized by their keys


def authors(q, t):
    q, t = (
        behind(f"encoder_{name}.module.", state | two_layers("fc.", SLIM_FEATURES, 16))
        for name, state in (("q", q), ("t", t))
    )
    state = q | t | two_layers("predict_q.module.", 16, 16)
    state |= {"queue": torch.randn(8, 16), "labels": torch.zeros(8), "queue_ptr": torch.zeros(1)}
    momenta = {0: {"momentum_buffer": torch.randn(3)}}
    opt = argparse.Namespace(arch="resnet10", lr=0.05, augs=["weak", "strong"], resume=None)
    optimizer = {"state": momenta, "param_groups": [{"lr": 0.05, "params": [0]}]}
    return {"opt": opt, "state_dict": state, "optimizer": optimizer, "epoch": 200}


def moco(q, k, *, layers):
    heads = {1: [nn.Linear(64, 16)], 2: [nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16)]}[layers]
    tail = head("fc.", *heads) if layers == 2 else behind("fc.", heads[0].state_dict())
    state = behind("module.encoder_q.", q | tail) | behind("module.encoder_k.", k | tail)
    state |= {"module.queue": torch.randn(16, 8), "module.queue_ptr": torch.zeros(1)}
    return {"epoch": 200, "arch": "resnet10", "state_dict": state, "optimizer": {"state": {}}}


def simsiam(q, _):
    state = behind("module.encoder.", q | two_layers("fc.", SLIM_FEATURES, 16))
    state |= two_layers("module.predictor.", 16, 16)
    return {"epoch": 100, "arch": "resnet10", "state_dict": state}


def lucidrains(q, t, *, outer=False):
    """As `BYOL(net).state_dict()`; `outer` with the network's own name for the same weights."""
    state = behind("net.", q) if outer else {}
    for name, inner in (("online_encoder", q), ("target_encoder", t)):
        state |= behind(f"{name}.net.", inner | behind("fc.", nn.Linear(64, 10).state_dict()))
        state |= two_layers(f"{name}.projector.", SLIM_FEATURES, 16)
    return state | two_layers("online_predictor.", 16, 16)


def sthalles(q, t, *, encoder=False):
    """Networks as a Sequential; `encoder` with the second copy of an older version."""
    contents = {
        f"{name}_network_state_dict": behind("encoder.", state)
        | two_layers("projetion.net.", SLIM_FEATURES, 16)
        for name, state in (("online", q), ("target", t))
    }
    again = {"encoder_state_dict": q} if encoder else {}
    return {**again, **contents, "optimizer_state_dict": {"state": {0: {"m": torch.zeros(3)}}}}


def flat_byol(q, t):
    state = behind("online_net.backbone.", q) | behind("target_net.backbone.", t)
    return {"state_dict": state | two_layers("predictor.", 16, 16), "epoch": 3}


LAYOUTS = {
    "MSF": (authors, f"authors' MSF, {TITLE}, epoch 200"),
    "MoCo v1": (lambda q, t: moco(q, t, layers=1), f"MoCo v1, {TITLE}, epoch 200"),
    "MoCo v2": (lambda q, t: moco(q, t, layers=2), f"MoCo v2, {TITLE}, epoch 200"),
    "SimSiam": (simsiam, f"SimSiam, {TITLE}, epoch 100"),
    "BYOL, lucidrains": (lucidrains, f"BYOL, {TITLE}"),
    "BYOL, lucidrains, whole": (lambda q, t: lucidrains(q, t, outer=True), f"BYOL, {TITLE}"),
    "BYOL, flat": (flat_byol, f"BYOL, {TITLE}, epoch 3"),
    "DINO": (
        lambda q, t: {"student": behind("module.backbone.", q), "teacher": behind("backbone.", t)},
        f"weights of an unknown program under 'student/module.backbone.', {TITLE}",
    ),
    "one under another name": (
        lambda q, _: {"state_dict": behind("trunk.", q)},
        f"weights of an unknown program under 'state_dict/trunk.', {TITLE}",
    ),
}


def reversed_order(contents):
    """The same with everything in the opposite order, so that target encoders come first."""
    if not isinstance(contents, dict):
        return contents
    return {key: reversed_order(contents[key]) for key in reversed(contents)}


@pytest.mark.parametrize(
    "order", [lambda contents: contents, reversed_order], ids=["as saved", "reversed"]
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_online_backbone_is_found_in_files_of(layout, order, tmp_path, online, target):
    make, title = LAYOUTS[layout]
    contents = order(make(online.state_dict(), target.state_dict()))
    weights = load_weights(saved(tmp_path, contents))
    assert weights.title == title
    assert_loaded(weights, online)
    assert not torch.equal(features(weights.backbone), features(target))
    assert (weights.image_size, weights.config) == (224, None)
    assert weights.output_dir == Path(f"evaluations/weights-{fingerprint(weights.backbone)[:6]}")


@pytest.mark.parametrize("encoder", [False, True])
def test_a_network_cut_into_a_sequence_is_found_by_its_numbers(tmp_path, online, target, encoder):
    contents = sthalles(numbered(online), numbered(target), encoder=encoder)
    assert "online_network_state_dict" in contents and "0.weight" in numbered(online)
    weights = load_weights(saved(tmp_path, contents))
    assert weights.title == f"BYOL, {TITLE}"
    assert_loaded(weights, online)


def test_the_authors_own_resnet_50_is_recognized(tmp_path):
    torch.manual_seed(0)
    network = trained(models.resnet50())
    network.fc = nn.Sequential(
        nn.Linear(2048, 4096), nn.BatchNorm1d(4096), nn.ReLU(), nn.Linear(4096, 512)
    ).eval()
    online = network.state_dict()
    follows = {key: torch.zeros(()).to(t.dtype).expand(t.shape) for key, t in online.items()}
    state = behind("encoder_q.module.", online) | behind("encoder_t.module.", follows)
    state |= {"queue": torch.randn(4, 512), "labels": torch.zeros(4), "queue_ptr": torch.zeros(1)}
    opt = argparse.Namespace(arch="resnet50", epochs=200, topk=10)
    contents = {"opt": opt, "state_dict": state, "optimizer": {"state": {}}, "epoch": 200}
    weights = load_weights(saved(tmp_path, contents))
    assert weights.title == "authors' MSF, ResNet-50, epoch 200"
    assert_loaded(weights, without_classifier(network))
    with torch.no_grad():
        embeddings = weights.projector(features(weights.backbone))
    assert embeddings.shape == (2, 512)
    assert torch.equal(embeddings, features(network))


def test_the_authors_projector_is_that_of_their_online_encoder(tmp_path, online, target):
    contents = authors(online.state_dict(), target.state_dict())
    weights = load_weights(saved(tmp_path, contents))
    state, start = contents["state_dict"], "encoder_q.module.fc."
    loaded = weights.projector.state_dict()
    assert {start + key for key in loaded} == {key for key in state if key.startswith(start)}
    assert all(torch.equal(loaded[key], state[start + key]) for key in loaded)
    assert not weights.projector.training
    assert weights.projector(features(weights.backbone)).shape == (2, 16)


def test_a_head_that_is_not_the_authors_is_no_projector(tmp_path, online, target):
    contents = authors(online.state_dict(), target.state_dict())
    contents["state_dict"] |= head("encoder_q.module.fc.", *[nn.Linear(16, 16)] * 7)
    weights = load_weights(saved(tmp_path, contents))
    assert weights.projector is None
    assert_loaded(weights, online)


WRAPPED = {
    "bare": lambda state: state,
    "module.": lambda state: behind("module.", state),
    "state_dict": lambda state: {"state_dict": state},
    "model": lambda state: {"model": state, "best_acc": 0.5},
    "model, module.": lambda state: {"model": behind("module.", state)},
    "state_dict, model.": lambda state: {"state_dict": behind("model.", state)},
}


@pytest.mark.parametrize("wrapped", WRAPPED)
def test_a_bare_network_is_recognized_under(wrapped, tmp_path, online):
    state = online.state_dict() | behind("fc.", nn.Linear(SLIM_FEATURES, 10).state_dict())
    weights = load_weights(saved(tmp_path, WRAPPED[wrapped](state)))
    assert weights.title == f"torchvision or timm, {TITLE}"
    assert_loaded(weights, online)


def test_torchvisions_resnet_is_recognized(tmp_path, resnet18):
    """timm's ResNets of the plain stem have the same keys and shapes."""
    weights = load_weights(saved(tmp_path, resnet18.state_dict()))
    assert weights.title == "torchvision or timm, ResNet-18"
    assert_loaded(weights, without_classifier(resnet18))


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_a_safetensors_file_is_recognized(tmp_path, resnet18, metadata):
    """With the note that timm and others put into it, too."""
    path = tmp_path / "model.safetensors"
    save_file(resnet18.state_dict(), path, metadata)
    weights = load_weights(path)
    assert weights.title == "torchvision or timm, ResNet-18"
    assert_loaded(weights, without_classifier(resnet18))


def test_a_legacy_file_is_recognized(tmp_path, online):
    path = saved(tmp_path, online.state_dict(), _use_new_zipfile_serialization=False)
    assert_loaded(load_weights(path), online)


def test_old_weights_without_counters_of_batches_are_whole(tmp_path, online):
    state = {k: v for k, v in online.state_dict().items() if "num_batches" not in k}
    weights = load_weights(saved(tmp_path, state))
    assert torch.equal(features(weights.backbone), features(online))


def test_weights_in_half_precision_become_float32(tmp_path, online):
    state = {k: v.half() if v.is_floating_point() else v for k, v in online.state_dict().items()}
    backbone = load_weights(saved(tmp_path, state)).backbone
    loaded = backbone.state_dict()
    assert loaded["conv1.weight"].dtype == torch.float32
    assert all(torch.equal(loaded[key].to(state[key].dtype), state[key]) for key in state)


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("mobilenet_v3_small", "classifier.3"),
        ("mnasnet0_5", "classifier.1"),  # reads a version beside its weights
        ("shufflenet_v2_x0_5", "fc"),  # after the regnets, which compute while they are built
        pytest.param("regnet_x_400mf", "fc", marks=pytest.mark.slow),
    ],
)
def test_other_networks_of_torchvision_are_recognized(tmp_path, name, layer):
    torch.manual_seed(0)
    network = trained(models.get_model(name, weights=None))
    weights = load_weights(saved(tmp_path, {"state_dict": network.state_dict()}))
    assert weights.title == f"torchvision or timm, {name}"
    assert_loaded(weights, without_classifier(network, layer))


@pytest.mark.parametrize(
    "name", ["resnext50_32x4d", pytest.param("wide_resnet50_2", marks=pytest.mark.slow)]
)
def test_networks_with_the_keys_of_a_resnet_50_are_distinguished(tmp_path, name):
    with torch.device("meta"):
        network = models.get_model(name, weights=None)
        plain = models.resnet50(weights=None)
    assert network.state_dict().keys() == plain.state_dict().keys()
    state = {k: torch.rand(()).to(t.dtype).expand(t.shape) for k, t in network.state_dict().items()}
    weights = load_weights(saved(tmp_path, state))
    assert weights.title == f"torchvision or timm, {name}"
    assert (
        str(weights.backbone) == str(without_classifier(network)) != str(without_classifier(plain))
    )
    loaded = weights.backbone.state_dict()
    assert all(torch.equal(loaded[key], state[key]) for key in loaded)


def test_the_title_names_what_is_assumed_of_a_small_stem(tmp_path):
    network = slim(0, config.Encoder(name="resnet10", stem="small", width=0.25))
    weights = load_weights(saved(tmp_path, network.state_dict()))
    title = "torchvision or timm, ResNet-10 of width 0.25, 3x3 stem of stride 1 assumed"
    assert (weights.title, weights.image_size) == (title, 32)
    assert_loaded(weights, network)


def test_numbers_of_numpy_are_accepted(tmp_path, online):
    contents = {
        "state_dict": online.state_dict(),
        "best_acc": np.float64(1.0),
        "others": [np.float32(2.5), np.float16(1), np.int64(3), np.int32(4), np.bool_(True)],
        "opt": argparse.Namespace(lr=np.float64(0.05)),
    }
    for legacy in (False, True):
        path = saved(tmp_path, contents, _use_new_zipfile_serialization=not legacy)
        read = third_party.read_file(path)
        assert (read["best_acc"], read["others"]) == (1.0, [2.5, 1, 3, 4, True])
        assert read["opt"].lr == 0.05
        assert_loaded(load_weights(path), online)


# Refused, with the reason


def test_a_renamed_key_is_refused_with_the_nearest(tmp_path, online):
    state = online.state_dict()
    state["layer3.0.conv2.wieght"] = state.pop("layer3.0.conv2.weight")
    message = error_of(saved(tmp_path, {"state_dict": state}))
    assert f"is {TITLE} behind 'state_dict/' only in part, 2 keys do not fit its 72" in message
    missing, unknown = message.splitlines()[1:]
    assert "layer3.0.conv2.weight is missing; nearest there: " in missing
    assert missing.endswith("layer3.0.conv2.wieght")
    assert "layer3.0.conv2.wieght is unknown; nearest known: layer3.0.conv2.weight" in unknown


@pytest.mark.parametrize("key", ["conv1.weight", "layer1.0.bn2.weight", "bn1.running_var"])
def test_a_missing_key_is_refused(tmp_path, resnet18, key):
    state = resnet18.state_dict()
    del state[key]
    message = error_of(saved(tmp_path, state))
    assert "is ResNet-18 behind '' only in part, 1 keys do not fit its 120" in message
    assert f"{key} is missing; nearest there: " in message


def test_a_wrong_shape_is_refused(tmp_path, online):
    state = online.state_dict() | {"layer4.0.conv1.weight": torch.zeros(64, 32, 1, 1)}
    message = error_of(saved(tmp_path, state))
    assert "layer4.0.conv1.weight has the shape (64, 32, 1, 1), need (64, 32, 3, 3)" in message


def test_layers_that_no_known_network_has_are_refused(tmp_path, online):
    squeeze = {f"layer{i}.0.se.fc1.weight": torch.zeros(2, 8, 1, 1) for i in (1, 2)}
    message = error_of(saved(tmp_path, online.state_dict() | squeeze))
    assert "2 keys do not fit" in message
    assert "layer1.0.se.fc1.weight is unknown; nearest known: layer1.0." in message


@pytest.mark.parametrize("layout", ["MSF", "MoCo v2", "BYOL, lucidrains", "BYOL, flat", "DINO"])
@pytest.mark.parametrize("key", ["layer2.0.bn1.bias", "layer1.0.conv1.weight", "conv1.weight"])
def test_a_momentum_encoder_never_replaces_a_damaged_online_backbone(
    tmp_path, online, target, layout, key
):
    damaged = online.state_dict()
    damaged[key + "_renamed"] = damaged.pop(key)
    message = error_of(saved(tmp_path, LAYOUTS[layout][0](damaged, target.state_dict())))
    assert "only in part" in message
    assert f"{key} is missing; nearest there: " in message
    assert not any(name in message.partition("\n")[0] for name in ("encoder_t", "_k.", "target"))


def test_a_complete_backbone_is_not_used_if_another_is_damaged(tmp_path, online, target):
    damaged = target.state_dict()
    del damaged["bn1.bias"]
    contents = behind("left.", online.state_dict()) | behind("right.", damaged)
    assert f"is {TITLE} behind 'right.' only in part" in error_of(saved(tmp_path, contents))


@pytest.mark.parametrize(
    ("one", "two"),
    [("a.", "b."), ("semantic.", "visual."), ("encoder_tiny.", "encoder_kind."), ("left/", "r.")],
)
@pytest.mark.parametrize("other", [SLIM, config.Encoder(name="resnet18", width=0.25)])
def test_two_backbones_under_unknown_names_are_refused(tmp_path, online, one, two, other):
    """Also of two kinds, and under names that only look as if one followed the other."""
    contents = behind(one, online.state_dict()) | behind(two, slim(5, other).state_dict())
    message = error_of(saved(tmp_path, contents))
    for part in ("contains 2 backbones, under ", "save the one to evaluate alone", one, two):
        assert part in message


def test_the_same_backbone_saved_twice_is_one(tmp_path, online):
    contents = behind("a.", online.state_dict()) | behind("b.", online.state_dict())
    assert_loaded(load_weights(saved(tmp_path, contents)), online)


def test_a_file_of_nothing_known_is_refused(tmp_path):
    message = error_of(
        saved(tmp_path, nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).state_dict())
    )
    assert "no known network in its 4 tensors (0.weight, 0.bias, 1.weight, 1.bias)" in message
    assert "layer1.0.conv1.weight" in message


def test_a_network_that_ends_in_no_linear_layer_is_refused(tmp_path):
    message = error_of(saved(tmp_path, models.squeezenet1_1().state_dict()))
    assert "no known network in its 52 tensors (features.0.weight, " in message


@pytest.mark.slow
def test_a_large_file_of_nothing_known_is_refused(tmp_path):
    """As large as any network, so that every one of torchvision is tried."""
    message = error_of(saved(tmp_path, {"blocks.0.weight": torch.zeros(()).expand(2_000, 500_000)}))
    assert "no known network in its 1 tensors (blocks.0.weight)" in message


@pytest.mark.parametrize("contents", [{}, {"epoch": 3, "state_dict": {}}, [1, 2], "words", None])
def test_a_file_without_tensors_is_refused(tmp_path, contents):
    assert "contains no tensors" in error_of(saved(tmp_path, contents))


@pytest.mark.parametrize("fraction", [0.02, 0.5, 0.999])
@pytest.mark.parametrize("suffix", ["pth", "legacy.pth", "safetensors"])
def test_a_truncated_file_is_refused(tmp_path, online, fraction, suffix):
    path = tmp_path / f"truncated.{suffix}"
    if suffix == "safetensors":
        save_file(online.state_dict(), path)
    else:
        torch.save(online.state_dict(), path, _use_new_zipfile_serialization=suffix == "pth")
    assert_loaded(load_weights(path), online)
    content = path.read_bytes()
    path.write_bytes(content[: math.floor(len(content) * fraction)])
    message = error_of(path)
    assert str(path) in message
    assert "no weights that can be read" in message or "not a complete safetensors file" in message


@pytest.mark.parametrize("name", ["empty.pth", "empty.safetensors"])
@pytest.mark.parametrize("content", [b"", b"no weights, but a text of several words\n" * 9])
def test_an_empty_or_unknown_file_is_refused(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    message = error_of(tmp_path / name)
    assert "no weights that can be read" in message or "not a complete safetensors file" in message


@pytest.mark.parametrize("name", ["none.pth", "none.safetensors", "none"])
def test_a_missing_path_is_refused_with_what_could_be_named(tmp_path, name):
    message = error_of(tmp_path / name)
    assert (
        f"{name}: not found; need a run directory, a file of weights, torchvision:NAME" in message
    )


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    assert "not a run directory (no config.json)" in error_of(tmp_path)
    assert "not a run directory (no config.json)" in error_of(f"untrained:{tmp_path}")


# Hostile files


class Hostile:
    """An object that creates a file when it is unpickled."""

    def __init__(self, created, how):
        self.created = str(created)
        self.how = how

    def __reduce__(self):
        if self.how == "system":
            return os.system, (f"touch '{self.created}'",)
        if self.how == "touch":
            return Path.touch, (Path(self.created),)
        return eval, (f"open({self.created!r}, 'w').close()",)


FUNCTIONS = {"system": f"{os.system.__module__}.system", "touch": "getattr", "eval": "eval"}
FORMATS = {
    "zip": lambda contents, path: torch.save(contents, path),
    "legacy": lambda contents, path: torch.save(
        contents, path, _use_new_zipfile_serialization=False
    ),
    "raw pickle": lambda contents, path: path.write_bytes(pickle.dumps(contents, protocol=2)),
    "raw pickle of today": lambda contents, path: path.write_bytes(pickle.dumps(contents)),
}
NESTED = {
    "alone": lambda hostile, _: hostile,
    "beside weights": lambda hostile, state: {"epoch": hostile, "state_dict": state},
    "among options": lambda hostile, state: {
        "opt": argparse.Namespace(lr=0.05, inner=argparse.Namespace(deep=[{"er": hostile}])),
        "state_dict": state,
    },
}


def load_unsafely(path, kind):
    """Load a file as a reader does who trusts it."""
    if kind.startswith("raw"):
        pickle.loads(path.read_bytes())
    else:
        torch.load(path, weights_only=False)


@pytest.mark.parametrize("how", FUNCTIONS)
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("nested", NESTED)
def test_a_hostile_pickle_is_refused_and_runs_nothing(tmp_path, how, kind, nested):
    created, path = tmp_path / "created", tmp_path / "hostile.pth"
    state = {"conv1.weight": torch.zeros(2)}
    FORMATS[kind](NESTED[nested](Hostile(created, how), state), path)
    message = error_of(path)
    assert not created.exists()
    if kind == "raw pickle of today":  # of a protocol that the safe reader does not know
        assert "no weights that can be read" in message
    else:
        assert f"asks for the Python object {FUNCTIONS[how]}, which is refused" in message
    assert error_of(f"torchvision:resnet18={path}") == message
    assert not created.exists()
    load_unsafely(path, kind)
    assert created.exists()  # so this could have failed


def test_reading_does_not_change_the_safe_globals(tmp_path, online):
    before = set(torch.serialization.get_safe_globals())
    contents = {"state_dict": online.state_dict(), "opt": argparse.Namespace(lr=np.float64(1))}
    path = saved(tmp_path, contents)
    load_weights(path)
    assert set(torch.serialization.get_safe_globals()) == before
    with pytest.raises(pickle.UnpicklingError, match=r"argparse\.Namespace"):
        torch.load(path, weights_only=True)


# torchvision's own


def test_a_network_of_torchvision_without_weights_is_refused_with_the_choices():
    assert error_of("torchvision:resnet18") == (
        "torchvision:resnet18: names no weights; type one of torchvision:resnet18:IMAGENET1K_V1, "
        "torchvision:resnet18:random"
    )
    assert error_of("torchvision:resnet10").endswith("type one of torchvision:resnet10:random")


def test_random_weights_of_torchvision_are_always_the_same():
    torch.manual_seed(11)
    before = torch.get_rng_state()
    one, two = (load_weights("torchvision:resnet18:random") for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert one.title == two.title == "torchvision's ResNet-18, random weights"
    assert fingerprint(one.backbone) == fingerprint(two.backbone)
    assert_loaded(one, two.backbone)
    assert features(one.backbone).shape == (2, 512)
    assert one.output_dir == Path("evaluations/resnet18-random")


def test_a_file_can_be_named_as_a_network_of_torchvision(tmp_path, resnet18):
    path = saved(tmp_path, {"state_dict": behind("strange.", resnet18.state_dict())})
    weights = load_weights(f"torchvision:resnet18={path}")
    assert weights.title == f"{path} as torchvision's ResNet-18"
    assert_loaded(weights, without_classifier(resnet18))
    assert weights.output_dir.name == f"{path.stem}-{fingerprint(weights.backbone)[:6]}"
    message = error_of(f"torchvision:resnet34={path}")
    assert "is ResNet-34 behind 'state_dict/strange.' only in part" in message
    assert "layer1.2.conv1.weight is missing" in message


def test_naming_the_network_decides_between_two_kinds_and_not_between_equals(tmp_path, online):
    named = slim(6, config.Encoder(name="resnet10"))
    state = named.state_dict()
    path = saved(tmp_path, behind("a.", online.state_dict()) | behind("b.", state))
    assert "contains 2 backbones" in error_of(path)
    assert_loaded(load_weights(f"torchvision:resnet10={path}"), named)
    same = {key: torch.zeros(()).to(t.dtype).expand(t.shape) for key, t in state.items()}
    path = saved(tmp_path, behind("a.", same) | behind("b.", state))
    assert "contains 2 backbones" in error_of(f"torchvision:resnet10={path}")
    path = saved(tmp_path, behind("target.", same) | behind("b.", state))
    assert_loaded(load_weights(f"torchvision:resnet10={path}"), named)


@pytest.mark.parametrize("name", ["none.pth", "none.safetensors"])
def test_a_missing_file_of_a_named_network_is_refused(tmp_path, name):
    assert name in error_of(f"torchvision:resnet18={tmp_path / name}")


def test_unknown_names_of_torchvision_are_refused():
    assert "got 'nonsense', need a torchvision backbone" in error_of("torchvision:nonsense")
    assert "got 'resnet81', need " in error_of("torchvision:resnet81")
    message = error_of("torchvision:resnet50:IMAGENET1K_V3")
    assert message.startswith("torchvision:resnet50:IMAGENET1K_V3: names no weights; type one of ")
    assert ":IMAGENET1K_V1, torchvision:resnet50:IMAGENET1K_V2, " in message


@pytest.fixture
def downloaded(tmp_path, monkeypatch):
    """A function that puts a file where torchvision stores downloaded weights."""
    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path / "hub"))

    def unreachable(*_, **__):
        raise urllib.error.URLError("no network in a test")

    monkeypatch.setattr(torch.hub, "download_url_to_file", unreachable)

    def put(weights, contents):
        path = tmp_path / "hub" / "checkpoints" / Path(weights.url).name
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(contents, path)

    return put


def test_weights_of_torchvision_are_those_that_it_downloads(downloaded, resnet18):
    downloaded(models.ResNet18_Weights.IMAGENET1K_V1, resnet18.state_dict())
    weights = load_weights("torchvision:resnet18:IMAGENET1K_V1")
    assert weights.title == "torchvision's ResNet-18, IMAGENET1K_V1"
    assert (weights.image_size, weights.output_dir) == (
        224,
        Path("evaluations/resnet18-IMAGENET1K_V1"),
    )
    assert_loaded(weights, without_classifier(resnet18))


@pytest.mark.slow
def test_weights_of_torchvision_see_images_of_their_own_size(downloaded):
    network = trained(models.efficientnet_b1())
    downloaded(models.EfficientNet_B1_Weights.IMAGENET1K_V1, network.state_dict())
    weights = load_weights("torchvision:efficientnet_b1:IMAGENET1K_V1")
    assert weights.image_size == 240
    assert_loaded(weights, without_classifier(network, "classifier.1"))


def test_weights_of_torchvision_see_images_as_they_were_trained(downloaded):
    network = trained(models.googlenet(init_weights=False, transform_input=True))
    downloaded(models.GoogLeNet_Weights.IMAGENET1K_V1, network.state_dict())
    weights = load_weights("torchvision:googlenet:IMAGENET1K_V1")
    assert torch.equal(features(weights.backbone), features(without_classifier(network)))


def test_auxiliary_classifiers_in_a_file_are_left_out(tmp_path):
    network = trained(models.googlenet(init_weights=False))
    assert "aux1.fc1.weight" in network.state_dict()
    torch.save(network.state_dict(), tmp_path / "google.pth")
    weights = load_weights(f"torchvision:googlenet={tmp_path / 'google.pth'}")
    assert torch.equal(features(weights.backbone), features(without_classifier(network)))


def test_a_failed_download_is_an_error(downloaded):  # noqa: ARG001
    message = error_of("torchvision:resnet18:IMAGENET1K_V1")
    assert "torchvision:resnet18:IMAGENET1K_V1: the download failed" in message
    assert "no network in a test" in message


def test_a_hostile_download_runs_nothing(tmp_path, downloaded):
    created = tmp_path / "created"
    downloaded(models.ResNet18_Weights.IMAGENET1K_V1, {"conv1.weight": Hostile(created, "eval")})
    assert "the download failed" in error_of("torchvision:resnet18:IMAGENET1K_V1")
    assert not created.exists()


def test_raw_pixels_are_a_baseline():
    weights = load_weights("pixels")
    assert weights.title == "raw pixels at 32x32"
    assert features(weights.backbone, 32).shape == features(weights.backbone, 40).shape == (2, 3072)


# Our own


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run of two epochs on random arrays."""
    root = tmp_path_factory.mktemp("run")
    random = np.random.default_rng(0)
    np.save(root / "images.npy", random.integers(0, 256, (24, 16, 16, 3), dtype=np.uint8))
    settings = {
        "data.source": str(root / "images.npy"), "data.image_size": 16, "data.workers": 0,
        "data.validation": "none", "encoder.name": "resnet10", "encoder.width": 0.125,
        "encoder.stem": "small-stride2", "encoder.init": "random", "method.bank_size": 16,
        "method.dim": 16, "method.hidden": 0, "train.batch_size": 8,
        "train.epochs": 2, "optim.warmup_epochs": 0, "train.snapshots": 2, "train.device": "cpu",
    }  # fmt: skip
    return pretrain(recipe("small-resnet18").with_overrides(settings), root / "run")


@pytest.fixture
def own(run, tmp_path):
    """A copy of the run that a test may change."""
    return Path(shutil.copytree(run, tmp_path / "own"))


def checkpoints(run):
    return sorted((run / "checkpoints").glob("step-*.pt"))


def test_a_run_is_its_newest_checkpoint(run):
    weights = load_weights(run)
    newest = checkpoints(run)[-1]
    method = checkpoint.read(newest)["method"]
    state = weights.backbone.state_dict()
    assert all(torch.equal(state[key], method[f"online.backbone.{key}"]) for key in state)
    assert any(not torch.equal(state[key], method[f"target.backbone.{key}"]) for key in state)
    assert weights.title == "our msf, resnet10, small-stride2 stem, width 0.125, step 6"
    assert (weights.output_dir, weights.name, weights.image_size) == (run, "", 16)
    assert not any(module.training for module in weights.backbone.modules())
    assert weights.projector(features(weights.backbone, 16)).shape == (2, 16)
    assert fingerprint(load_encoder(run)) == fingerprint(weights.backbone)
    alone = load_weights(newest)
    assert fingerprint(alone.backbone) == fingerprint(weights.backbone)
    assert (alone.output_dir, alone.name) == (run, newest.stem)


def test_each_checkpoint_of_a_run_has_its_own_weights(run, tmp_path):
    first, last = checkpoints(run)
    one, two = load_weights(first), load_weights(last)
    assert one.title.endswith("step 3") and two.title.endswith("step 6")
    assert fingerprint(one.backbone) != fingerprint(two.backbone)
    away = load_weights(shutil.copy(first, tmp_path / "mine.pt"))
    assert fingerprint(away.backbone) == fingerprint(one.backbone)
    word = fingerprint(away.backbone)[:6]
    assert (away.output_dir, away.name) == (Path(f"evaluations/mine-{word}"), "")


def test_checkpoints_of_one_name_have_results_of_their_own(own, tmp_path):
    first, _ = checkpoints(own)
    state = checkpoint.read(first)
    places = [tmp_path / "a" / first.name, tmp_path / "b" / first.name, own / "kept" / first.name]
    for place in places:
        place.parent.mkdir()
        state["method"]["online.backbone.conv1.weight"] += 1
        checkpoint.write(place, state)
    loaded = [load_weights(path) for path in (first, *places)]
    assert len({(weights.output_dir, weights.name) for weights in loaded}) == 4
    assert loaded[0].name == first.stem and loaded[3].name == f"kept-{first.stem}"


def test_weights_know_the_images_and_the_place_of_their_training(own, tmp_path):
    weights = load_weights(own)
    environment = json.loads((own / "environment.json").read_text())
    assert weights.trained_on == environment["source"]
    assert weights.directory == Path(environment["directory"])
    exported = load_weights(export(weights, tmp_path / "exported.safetensors"))
    assert exported.trained_on == weights.trained_on
    (own / "environment.json").write_text("")
    assert load_weights(own).directory == Path()


def test_a_damaged_newest_checkpoint_is_reported_and_the_one_before_is_used(own):
    first, last = checkpoints(own)
    last.write_bytes(last.read_bytes()[:1000])
    with pytest.warns(UserWarning, match=rf"{last.name}.*step 3 is used instead"):
        weights = load_weights(own)
    assert fingerprint(weights.backbone) == fingerprint(load_weights(first).backbone)


def test_a_run_without_checkpoints_is_refused(own):
    for path in checkpoints(own):
        path.unlink()
    assert "no checkpoint yet" in error_of(own)


def test_a_hostile_checkpoint_in_a_run_runs_nothing(own, tmp_path):
    for path in checkpoints(own):
        torch.save({"format": 1, "step": Hostile(tmp_path / "created", "eval")}, path)
    assert "none of its checkpoints can be read" in error_of(own)
    assert "asks for the Python object eval" in error_of(checkpoints(own)[0])
    assert not (tmp_path / "created").exists()


def test_a_snapshot_is_loaded_by_its_epoch(run):
    weights = load_snapshot(run, 2)
    path = run / "snapshots/epoch-0002.pt"
    stored = checkpoint.read(path)["weights"]
    state = weights.backbone.state_dict()
    assert all(torch.equal(state[key], stored[key].to(state[key].dtype)) for key in state)
    assert (weights.spec, weights.image_size) == (str(path), 16)
    assert not any(module.training for module in weights.backbone.modules())
    with pytest.raises(ValueError, match=r"epoch-0099\.pt"):
        load_snapshot(run, 99)


def test_a_snapshot_is_refused(run):
    snapshot = min((run / "snapshots").glob("*.pt"))
    message = error_of(snapshot)
    assert (
        message
        == f"{snapshot}: contains no complete model; need a run directory or its checkpoints/*.pt"
    )


@pytest.mark.parametrize("suffix", ["safetensors", "pth", "pt"])
def test_an_exported_encoder_comes_back_bit_for_bit(run, tmp_path, suffix):
    weights = load_weights(run)
    path = export(weights, tmp_path / f"encoder.{suffix}")
    back = load_weights(path)
    assert fingerprint(back.backbone) == fingerprint(weights.backbone)
    assert back.title == f"exported by meanshift, {weights.title}"
    output_dir = Path(f"evaluations/encoder-{fingerprint(back.backbone)[:6]}")
    assert (back.image_size, back.output_dir) == (16, output_dir)
    assert_loaded(back, weights.backbone)


def test_torchvision_can_load_what_is_exported(tmp_path, resnet18):
    settings = config.Config(encoder=config.Encoder(name="resnet18"))
    given = {"title": "ours", "image_size": 224, "output_dir": tmp_path, "config": settings}
    weights = Weights("ours", without_classifier(resnet18), **given)
    path = export(weights, tmp_path / "encoder.safetensors")
    network = models.resnet18()
    wrong = network.load_state_dict(load_file(path), strict=False)
    assert (wrong.missing_keys, wrong.unexpected_keys) == (["fc.weight", "fc.bias"], [])
    assert torch.equal(features(without_classifier(network)), features(weights.backbone))


@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
def test_a_spoilt_export_is_refused(run, tmp_path, suffix):
    path = export(load_weights(run), tmp_path / f"encoder.{suffix}")
    contents = third_party.read_file(path)
    del contents.get("state_dict", contents)["conv1.weight"]
    rewrite(path, contents)
    message = error_of(path)
    assert "not the complete encoder" in message
    assert "conv1.weight" in message


@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"format": EXPORT_FORMAT + 1}, "install a newer meanshift"),
        ({"format": checkpoint.FORMAT_WITHOUT_CHECKSUM - 1}, "install the version that wrote it"),
        ({"format": None}, "has format None"),
        ({"config": None}, "contains no settings"),
        ({"config": {"encoder": {"name": "resnet10", "unknown": 1}}}, "encoder.unknown"),
    ],
    ids=["newer", "older", "no format", "no config", "unknown setting"],
)
def test_an_export_of_another_version_is_refused(run, tmp_path, suffix, change, expected):
    path = export(load_weights(run), tmp_path / f"encoder.{suffix}")
    contents = third_party.read_file(path)
    metadata = {**json.loads(contents["meanshift"]), **change}
    rewrite(path, {**contents, "meanshift": json.dumps(metadata)})
    message = error_of(path)
    assert message.startswith(f"{path}: ")
    assert expected in message


@pytest.mark.parametrize("metadata", ["", "{", "[1]", "3"])
def test_an_export_with_damaged_metadata_is_refused(run, tmp_path, metadata):
    path = export(load_weights(run), tmp_path / "encoder.safetensors")
    rewrite(path, {**third_party.read_file(path), "meanshift": metadata})
    assert error_of(path) == f"{path}: the metadata of the exported file cannot be read"


@pytest.mark.parametrize(
    ("version", "action"),
    [
        (checkpoint.FORMAT + 1, "install a newer"),
        (checkpoint.FORMAT_WITHOUT_CHECKSUM - 1, "move it away"),
    ],
)
def test_a_checkpoint_of_another_format_is_refused(own, version, action):
    newest = checkpoints(own)[-1]
    checkpoint.write(newest, {**checkpoint.read(newest), "format": version})
    for spec in (own, newest):
        message = error_of(spec)
        assert message.startswith(f"{newest}: has format {version}, this version reads")
        assert action in message


def flip_the_middle(path):
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    for index in range(middle, middle + 64):
        content[index] ^= 0xFF
    path.write_bytes(content)


def test_a_damaged_checkpoint_is_named_and_not_used(own, tmp_path, call):
    first, newest = checkpoints(own)
    flip_the_middle(newest)
    assert error_of(newest).startswith(f"{newest}: damaged (its bytes differ from its checksum)")
    code, _, errors = call("export", newest, "--out", tmp_path / "x.safetensors")
    assert code == 2 and f"{newest}: damaged" in errors
    assert not (tmp_path / "x.safetensors").exists()
    with pytest.warns(UserWarning, match=rf"{newest}: damaged .* step 3 is used instead"):
        weights = load_weights(own)
    assert fingerprint(weights.backbone) == fingerprint(load_weights(first).backbone)
    shutil.copy(first, newest)
    assert f"{newest}: damaged (it contains step 3)" in error_of(newest)


@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
def test_a_damaged_export_is_refused(run, tmp_path, suffix):
    path = export(load_weights(run), tmp_path / f"encoder.{suffix}")
    flip_the_middle(path)
    assert error_of(path).startswith(f"{path}: damaged (its bytes differ from its checksum)")


@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
def test_an_export_without_a_checksum_is_damaged_unless_it_is_of_the_format_without(
    run, tmp_path, suffix
):
    path = export(load_weights(run), tmp_path / f"encoder.{suffix}")
    contents = third_party.read_file(path)
    metadata = json.loads(contents["meanshift"])
    metadata.pop("checksum", None)

    def write(version):
        text = json.dumps({**metadata, "format": version})
        if suffix == "pth":
            torch.save({**contents, "meanshift": text}, path)
        else:
            rewrite(path, {**contents, "meanshift": text})

    write(EXPORT_FORMAT)
    assert error_of(path).startswith(f"{path}: damaged (its checksum is missing)")
    write(checkpoint.FORMAT_WITHOUT_CHECKSUM)
    assert fingerprint(load_encoder(path)) == fingerprint(load_encoder(run))


def test_a_damaged_start_is_named(own):
    config_file = own / "config.json"
    settings = json.loads(config_file.read_text())
    settings["encoder"]["init"] = "pca"  # whose start is kept in a file
    config_file.write_text(json.dumps(settings))
    export(load_weights(own), own / "start.safetensors")
    flip_the_middle(own / "start.safetensors")
    assert f"{own / 'start.safetensors'}: damaged" in error_of(f"untrained:{own}")


def test_a_checkpoint_whose_settings_do_not_fit_is_refused(own):
    newest = checkpoints(own)[-1]
    state = checkpoint.read(newest)
    settings = {**state["config"], "encoder": {**state["config"]["encoder"], "width": 0.25}}
    checkpoint.write(newest, {**state, "config": settings})
    assert "not the complete encoder of its settings" in error_of(newest)
    checkpoint.write(newest, {**state, "config": {"unknown": {}}})
    assert error_of(newest).startswith(f"{newest}: unknown group 'unknown'")


class OtherMethod(nn.Module):
    """A method with an encoder and nothing else: no target, no bank, no predictor."""

    def __init__(self, encoder, projector):
        super().__init__()
        encoder.projector = projector
        self.online = encoder


@pytest.mark.parametrize(
    ("projector", "readable"),
    [
        (nn.Identity(), False),
        (nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 4)), True),
        (nn.ModuleDict({"own": nn.Linear(64, 4)}), False),
    ],
    ids=["none", "MLP", "something else"],
)
def test_a_checkpoint_of_any_method_is_read_by_its_online_encoder(own, projector, readable):
    newest = checkpoints(own)[-1]
    state = checkpoint.read(newest)
    settings = load_weights(own).config
    encoder = Encoder(settings.encoder, image_size=16)
    method = OtherMethod(encoder, projector)
    checkpoint.write(newest, {**state, "method": method.state_dict()})
    weights = load_weights(own)
    assert fingerprint(weights.backbone) == fingerprint(encoder.backbone)
    assert (weights.projector is not None) == readable
    if readable:
        assert fingerprint(weights.projector) == fingerprint(projector)


def test_only_our_own_weights_are_exported_and_only_to_known_formats(run, tmp_path):
    with pytest.raises(ValueError, match=r"ends in \.safetensors, \.pt or \.pth"):
        export(load_weights(run), tmp_path / "encoder.onnx")
    with pytest.raises(ValueError, match="need a run directory or one of its checkpoints"):
        export(load_weights("torchvision:resnet18:random"), tmp_path / "encoder.pth")
    assert not list(tmp_path.iterdir())


def test_the_untrained_encoder_is_the_initial_one_of_the_run(run):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    weights = load_weights(f"untrained:{run}")
    assert torch.equal(torch.get_rng_state(), before)
    method = build_method(load_weights(run).config)
    assert fingerprint(weights.backbone) == fingerprint(method.online.backbone)
    assert fingerprint(weights.projector) == fingerprint(method.online.projector)
    assert fingerprint(weights.backbone) != fingerprint(load_weights(run).backbone)
    assert_loaded(weights, method.online.backbone.eval())
    assert weights.title.endswith("before its first step")
    assert (weights.spec, weights.output_dir, weights.name) == (
        f"untrained:{run}",
        run,
        "untrained",
    )
    snapshot = checkpoint.read(min((run / "snapshots").glob("*.pt")))  # of epoch 0, float16
    state = weights.backbone.state_dict()
    assert all(torch.equal(state[k].to(v.dtype), v) for k, v in snapshot["weights"].items())


@pytest.mark.parametrize(
    "key", ["conv1.weight", "layer4.0.bn2.bias", "bn1.running_var", "bn1.num_batches_tracked"]
)
def test_a_fingerprint_sees_a_single_bit(key):
    network = slim(0, config.Encoder(name="resnet10", width=0.125))
    before = fingerprint(network)
    assert fingerprint(copy.deepcopy(network)) == before
    octets = network.state_dict()[key].reshape(-1).view(torch.uint8)
    octets[-1] ^= 1
    assert fingerprint(network) != before
    octets[-1] ^= 1
    assert fingerprint(network) == before


def test_other_strides_have_another_fingerprint():
    """They leave no trace in the weights."""
    one, other = (
        slim(0, config.Encoder(name="resnet10", stem=stem, width=0.125))
        for stem in ("small", "small-stride2")
    )
    other.load_state_dict(one.state_dict())
    assert fingerprint(other) != fingerprint(one)


# Weights that are part of the package


@pytest.fixture
def shipped(run, tmp_path, monkeypatch):
    """A folder of the package with the weights `tiny`, in half precision."""
    monkeypatch.setattr(weights_module, "SHIPPED_DIR", tmp_path)
    path = export(load_weights(run), tmp_path / "tiny.safetensors", half=True)
    card = {"title": "16 px", "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    path.with_suffix(".json").write_text(json.dumps(card))
    return path


def test_weights_of_the_package_are_loaded_by_name(run, shipped):
    weights = load_weights("meanshift:tiny")
    assert (weights.spec, weights.title) == ("meanshift:tiny", "meanshift:tiny, 16 px")
    assert weights.output_dir == Path("evaluations/tiny")
    assert weights.encoder == weights.config.encoder
    stored = load_file(shipped)
    for name, value in load_weights(run).backbone.state_dict().items():
        loaded = weights.backbone.state_dict()[name]
        assert loaded.dtype == value.dtype
        assert torch.equal(loaded, value.half().float() if value.ndim > 1 else value)
        assert (stored[name].dtype == torch.float16) == (value.ndim > 1)


def test_damaged_weights_of_the_package_are_refused(shipped):
    content = bytearray(shipped.read_bytes())
    content[-1] ^= 1
    shipped.write_bytes(content)
    assert "tiny.safetensors: differs from the checksum" in error_of("meanshift:tiny")


@pytest.mark.usefixtures("shipped")
def test_an_unknown_name_lists_those_of_the_package():
    message = error_of("meanshift:large")
    assert "meanshift:large: no such weights in this package; there are meanshift:tiny" in message
