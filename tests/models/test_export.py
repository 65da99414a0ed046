"""Exports: what each format contains, what is refused, and proof that other programs read it."""

import json
import math
import re
import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torchvision import models

import meanshift as ms
from meanshift.models.export import FORMATS, export_weights
from meanshift.models.export.card import own_results
from meanshift.models.export.counterparts import literal
from meanshift.models.export.huggingface import crop_fraction
from meanshift.models.export.job import Job
from meanshift.models.export.reference import Reference
from meanshift.models.export.verify import verify
from meanshift.models.weights import fingerprint, load_weights
from meanshift.transforms.eval import short_side
from tests.support.packages import hide_packages
from tests.support.runs import write_checkpoint, write_run, write_solid_images

RESNET18 = {"encoder__name": "resnet18", "encoder__stem": "imagenet", "encoder__width": 1.0}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_solid_images(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def resnet18(source, tmp_path_factory):
    """A run of torchvision's and timm's ResNet-18."""
    folder = tmp_path_factory.mktemp("runs") / "resnet18"
    return write_checkpoint(write_run(folder, source, data__image_size=32, **RESNET18))


@pytest.fixture
def own(source, tmp_path):
    """A run of a network that only this program has."""
    return write_checkpoint(write_run(tmp_path / "own", source, encoder__output="whitened"))


def change_a_weight(path):
    """Change one weight of a safetensors file, which then has no checksum of ours."""
    state = load_file(path)
    state["conv1.weight"][0, 0, 0, 0] += 1
    save_file(state, path)


# Paths and formats


@pytest.mark.parametrize("name", ["safetensors", "torch"])
def test_the_default_path_is_in_the_run(own, call, name):
    code, out, err = call("export", own, "--format", name)
    path = own / "export" / ("model.safetensors" if name == "safetensors" else "model.pt")
    assert code == 0 and f"exported: {path}" in out
    assert f"load_encoder({literal(path)})" in err
    assert fingerprint(ms.load_encoder(path)) == fingerprint(ms.load_encoder(own))


def test_a_checkpoint_has_a_default_path_of_its_own(own, call):
    (newest,) = (own / "checkpoints").glob("*.pt")
    assert call("export", newest, "--format", "safetensors")[0] == 0
    assert (own / f"export/model-{newest.stem}.safetensors").is_file()


def test_missing_folders_are_created_and_files_are_replaced(own, call, tmp_path):
    path = tmp_path / "a/b/model.safetensors"
    path.parent.mkdir(parents=True)
    path.write_text("other")
    shutil.rmtree(tmp_path / "a")
    assert call("export", own, "--out", path)[0] == 0
    first = path.read_bytes()
    path.write_text("other")
    assert call("export", own, "--out", path)[0] == 0
    assert path.read_bytes() == first
    assert [each.name for each in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "got neither --format nor --out"),
        (["--out", "x.bin"], "x.bin without --format"),
        (["--format", "onxx"], "unknown format 'onxx'; did you mean onnx"),
        (["--format", "onnx", "--out", "x.safetensors"], "a name that ends in .onnx for onnx"),
        (["--format", "safetensors", "--out", "x.pt"], "ends in .safetensors for safetensors"),
        (["--format", "huggingface", "--out", "x.onnx"], "need the name of a folder"),
        (["--format", "huggingface", "--license", "a: b"], "need a name such as mit"),
        (["--format", "torchvision"], "torchvision does not have resnet10 with the stem small"),
        (["--format", "timm"], "of width 0.125 with whitened output; type --format onnx"),
    ],
)
def test_what_cannot_be_exported_is_refused_and_leaves_nothing(
    own, call, tmp_path, monkeypatch, arguments, expected
):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    code, _, err = call("export", own, *arguments)
    assert code == 2 and expected in err
    assert err.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_is_no_file_and_a_file_is_no_folder(own, call, tmp_path):
    (tmp_path / "x.onnx").mkdir()
    (tmp_path / "y").write_text("")
    code, _, err = call("export", own, "--out", tmp_path / "x.onnx")
    assert code == 2 and "is a folder, need a file for onnx" in err
    code, _, err = call("export", own, "--format", "huggingface", "--out", tmp_path / "y")
    assert code == 2 and "is a file, need a folder for huggingface" in err


def test_a_run_without_a_checkpoint_is_refused(source, call, tmp_path):
    run = write_run(tmp_path / "empty", source)
    code, _, err = call("export", run, "--format", "onnx")
    assert code == 2 and f"{run}: no checkpoint yet" in err
    code, _, err = call("export", "torchvision:resnet18:random", "--format", "onnx")
    assert code == 2 and "need a run directory" in err


def test_the_help_lists_every_format(call):
    _, out, _ = call("export", "--help")
    assert all(name in out for name in FORMATS)


# torchvision


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_torchvision_takes_the_state_dict_but_for_its_classifier(resnet18, tmp_path, suffix):
    path = export_weights(load_weights(resnet18), tmp_path / f"x{suffix}", format="torchvision").out
    state = load_file(path) if suffix == ".safetensors" else torch.load(path)
    network = models.resnet18()
    wrong = network.load_state_dict(state, strict=False)
    assert (wrong.missing_keys, wrong.unexpected_keys) == (["fc.weight", "fc.bias"], [])


def test_verify_reads_the_file_in_a_fresh_process_and_sees_one_changed_weight(resnet18, tmp_path):
    job = export_weights(load_weights(resnet18), tmp_path / "x.safetensors", format="torchvision")
    change_a_weight(job.out)
    with pytest.raises(ValueError, match=r"read by torchvision: .* is not that of"):
        verify("torchvision", job.programs["torchvision"], job)


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_a_whitened_output_is_the_classifier_of_torchvisions_network(source, tmp_path, suffix):
    settings = {**RESNET18, "encoder__output": "whitened", "data__image_size": 32}
    run = write_checkpoint(write_run(tmp_path / "run", source, **settings))
    job = export_weights(load_weights(run), tmp_path / f"x{suffix}", format="torchvision")
    scope = {"images": job.reference.samples.numpy()}
    exec(job.programs["torchvision"], scope)
    job.reference.compare(scope["features"].numpy(), "torchvision")
    if suffix == ".safetensors":  # this program gets the mean of the whitening bit for bit
        assert fingerprint(ms.load_encoder(job.out)) == fingerprint(ms.load_encoder(run))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["torchvision", "safetensors", "torch"])
def test_verify_gives_the_same_bits(resnet18, call, name):
    code, out, err = call("export", resnet18, "--format", name, "--verify")
    assert code == 0, err
    assert re.search(r"read by \w+: largest difference 0, largest feature .*16 samples of", out)


def test_the_code_for_torchvision_names_the_layer_that_is_missing(source, tmp_path):
    settings = {**RESNET18, "encoder__name": "mobilenet_v3_small"}
    run = write_checkpoint(write_run(tmp_path / "run", source, data__image_size=32, **settings))
    job = export_weights(load_weights(run), format="torchvision")
    scope = {"images": job.reference.samples.numpy()}
    exec(job.programs["torchvision"], scope)
    assert 'set_submodule("classifier.3"' in job.programs["torchvision"]
    assert torch.equal(scope["features"], job.reference.features)


def test_verify_reports_why_a_program_cannot_read_a_file(plain, tmp_path):
    weights = load_weights(plain)
    job = Job(weights, tmp_path / "x", Reference(weights))
    with pytest.raises(ValueError, match=r"some program cannot read .*: FileNotFoundError: .*gone"):
        verify("some program", "numpy.load('gone')", job)


@pytest.mark.parametrize("change", [float("nan"), 1e-3])
def test_a_difference_is_an_error_and_so_is_nan(own, change):
    reference = Reference(load_weights(own))
    features = reference.features.numpy().copy()
    assert "largest difference 0," in reference.compare(features, "same")
    features[0, 0] += change * abs(features).max()
    with pytest.raises(ValueError, match=r"largest difference .* is allowed"):
        reference.compare(features, "other")
    with pytest.raises(ValueError, match="the shape"):
        reference.compare(features[:1], "other")


# Samples that features are compared on


def test_samples_are_those_of_the_run_or_given_or_shipped(own, source, tmp_path):
    weights = load_weights(own)
    assert Reference(weights).source.name == str(source)
    other = shutil.copy(source, tmp_path / "other.npz")
    assert Reference(weights, str(other)).source.name == str(other)
    gone = weights.config.with_overrides({"data.source": str(tmp_path / "gone.npz")})
    reference = Reference(replace(weights, config=gone))
    with pytest.warns(UserWarning, match=r"images of `sample`, .*gone.npz"):
        assert reference.source.name == "sample"
    assert reference.samples.shape == (16, 3, 16, 16)


def test_vectors_that_are_gone_must_be_given(tmp_path):
    vectors = np.random.default_rng(0).normal(size=(20, 8)).astype("float32")
    np.savez(tmp_path / "vectors.npz", x_train=vectors)
    run = write_checkpoint(
        write_run(
            tmp_path / "run",
            tmp_path / "vectors.npz",
            encoder__name="mlp",
            encoder__stem="imagenet",
            data__kind="vector",
            data__channels=8,
            data__mean=(0.0,) * 8,
            data__std=(1.0,) * 8,
            data__range=(0.0, 1.0),
            data__dtype="float32",
        )
    )
    assert Reference(load_weights(run)).features.shape == (16, 64)
    (tmp_path / "vectors.npz").unlink()
    with pytest.raises(ValueError, match="give others: --data SOURCE"):
        _ = Reference(load_weights(run)).samples


# Hugging Face


@pytest.fixture(scope="module")
def plain(source, tmp_path_factory):
    """A run of a small ResNet of this program."""
    return write_checkpoint(write_run(tmp_path_factory.mktemp("runs") / "plain", source))


@pytest.fixture
def folder(plain, tmp_path):
    return export_weights(load_weights(plain), tmp_path / "hub", format="huggingface").out


def test_a_hugging_face_folder_loads_back(plain, folder, call, source, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert {path.name for path in folder.iterdir()} == {
        "README.md",
        "config.json",
        "model.safetensors",
    }
    model = ms.load(f"hf:{folder}")
    assert fingerprint(model.backbone) == fingerprint(ms.load_encoder(plain))
    assert (model.weights.spec, model.weights.image_size) == (f"hf:{folder}", 16)
    code, out, err = call("evaluate", "knn", f"hf:{folder}", "--data", source, "--ks", "1")
    assert code == 0 and "1-NN" in out + err
    results = Path("evaluations") / f"hub-{fingerprint(model.backbone)[:6]}/results"
    assert list(results.glob("knn*.json"))
    code, _, err = call("evaluate", "knn", folder, "--data", source)
    assert code == 2 and f"type hf:{folder}" in err


def test_config_says_what_timm_builds_only_if_timm_has_it(resnet18, own, tmp_path):
    folder = export_weights(load_weights(resnet18), tmp_path / "hub", format="huggingface").out
    assert 'timm.create_model("local-dir:' in (folder / "README.md").read_text()
    config = json.loads((folder / "config.json").read_text())
    assert (config["architecture"], config["num_classes"]) == ("resnet18", 0)
    assert (config["num_features"], config["model_args"]) == (512, {"in_chans": 3})
    assert config["pretrained_cfg"]["input_size"] == [3, 32, 32]
    assert config["pretrained_cfg"]["first_conv"] == "conv1"
    other = export_weights(load_weights(own), format="huggingface").out
    assert other == own / "export/huggingface"
    assert json.loads((other / "config.json").read_text()).keys() == {"meanshift"}
    card = (other / "README.md").read_text()
    assert "timm does not have this network (resnet10 with the stem small" in card
    assert "library_name: meanshift" in card and "create_model" not in card


def test_the_card_has_the_results_of_these_weights_and_no_others(own, call):
    card = {
        "protocol": "knn",
        "settings": {"ks": [1], "vote": "a|b"},
        "data": "photos",
        "split": "own",
        "sizes": {"train": 40, "test": 20},
        "weights": fingerprint(load_weights(own).backbone),
        "command": ["/usr/bin/meanshift", "evaluate", "knn", "my run"],
    }
    others = {**card, "weights": "0" * 16}
    for name, each, value in (("knn", card, 87.654), ("knn-random", others, 12.34)):
        text = json.dumps({"metrics": {"1-NN": value}, "card": each})
        (own / f"results/{name}.json").write_text(text)
    assert call("export", own, "--format", "huggingface", "--license", "mit")[0] == 0
    text = (own / "export/huggingface/README.md").read_text()
    row = r"| knn | 1-NN 87.65 | photos (40 train, 20 test) | own | ks: [1], vote: a\|b |"
    assert row in text and "12.34" not in text
    assert "    meanshift evaluate knn 'my run'" in text
    header = yaml.safe_load(text.split("---")[1])
    assert header["license"] == "mit" and "msf" in header["tags"]
    (own / "results/knn.json").write_text("[")
    code, _, err = call("export", own, "--format", "huggingface")
    assert code == 2 and "knn.json: no result that can be read" in err


def test_the_card_says_where_nothing_was_evaluated(folder):
    text = (folder / "README.md").read_text()
    assert "These weights have not been evaluated: `meanshift evaluate knn" in text


def test_the_code_of_the_card_runs(plain, folder):
    text = (folder / "README.md").read_text()
    code = text.split("With meanshift:\n\n```python\n")[1].split("```")[0]
    reference = Reference(load_weights(plain))
    scope = {"images": reference.samples.numpy()}
    exec(code, scope)
    assert torch.equal(scope["features"], reference.features)


def test_an_export_is_written_again_but_not_over_other_files(own, call, tmp_path):
    folder = tmp_path / "clone"
    (folder / ".git").mkdir(parents=True)
    for _ in range(2):
        assert call("export", own, "--format", "huggingface", "--out", folder)[0] == 0
    assert (folder / ".git").is_dir()
    other = tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").write_text("")
    code, _, err = call("export", own, "--format", "huggingface", "--out", other)
    assert code == 2 and "contains other files (notes.txt)" in err
    code, _, err = call("export", own, "--format", "huggingface", "--out", own)
    assert code == 2 and "config.json: is not of meanshift" in err
    assert [path.name for path in other.iterdir()] == ["notes.txt"]


def damage(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (lambda f: (f / "config.json").unlink(), "has no config.json, so it is no complete export"),
        (lambda f: (f / "model.safetensors").unlink(), "has no model.safetensors"),
        (lambda f: damage(f / "model.safetensors"), "damaged (its bytes differ"),
        (lambda f: (f / "config.json").write_text("{"), "config.json: is not of meanshift"),
        (lambda f: (f / "config.json").write_text('{"architecture": "x"}'), "is not of meanshift"),
        (lambda f: change_a_weight(f / "model.safetensors"), "an export was interrupted"),
        (lambda f: (f / "config.json").rename(f / "dataset_info.json"), "is a dataset; give it as"),
    ],
    ids=["no config", "no weights", "damaged", "half", "other program", "mixed", "dataset"],
)
def test_an_incomplete_or_damaged_folder_is_refused(folder, spoil, expected):
    spoil(folder)
    with pytest.raises(ValueError, match=re.escape(expected)):
        ms.load(f"hf:{folder}")


def test_the_hub_needs_its_library(monkeypatch, tmp_path):
    hide_packages(monkeypatch, "huggingface_hub")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"pip install 'meanshift\[huggingface\]'"):
        ms.load("hf:someone/something")


def test_optional_programs_are_named_before_anything_is_written(own, resnet18, call, monkeypatch):
    hide_packages(monkeypatch, "timm", "onnx")
    code, _, err = call("export", own, "--format", "onnx")
    assert code == 2 and "pip install 'meanshift[onnx]'" in err
    assert not (own / "export").exists()
    code, _, err = call("export", resnet18, "--format", "timm", "--verify")
    assert code == 2 and "pip install 'meanshift[timm]'" in err
    assert not (resnet18 / "export/timm.safetensors").exists()


def test_timm_computes_our_short_side_from_the_crop_fraction():
    for size in range(8, 512):
        short = short_side(size, 0)
        assert math.floor(size / crop_fraction(size, short)) == short


# Python


def test_a_model_is_exported_in_python(own, tmp_path):
    model = ms.load(own)
    assert model.export(format="huggingface") == own / "export/huggingface"
    path = model.export(tmp_path / "x.pth")
    assert fingerprint(ms.load(path).backbone) == fingerprint(model.backbone)


def test_own_results_need_no_run(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    weights = load_weights(f"hf:{folder}")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        job = export_weights(weights, tmp_path / "again", format="huggingface")
    assert list(own_results(job)) == []
    assert fingerprint(ms.load_encoder(f"hf:{job.out}")) == fingerprint(weights.backbone)
