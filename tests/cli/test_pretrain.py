"""`meanshift pretrain` on folders of tiny images: what a run contains, and what is refused."""

import json
import re
import shutil

import pytest
import torch

from meanshift import load_encoder
from meanshift.cli.pretrain import describe_few_epochs
from meanshift.config.recipes import recipe
from tests.support.commands import TINY, read_jsonl, read_metrics, read_run

GRAY = pytest.mark.filterwarnings("ignore:.*replaced by gray ones:UserWarning")  # of the monitor


def damage(folder, count):
    for image in sorted(folder.iterdir())[:count]:
        image.write_bytes(b"not an image")


def test_an_empty_folder_is_refused(call, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    code, _, err = call("pretrain", "small", "--data", empty, "--out", tmp_path / "run")
    assert code == 2
    assert f"{empty}: no image found" in err and ".jpg" in err


def test_class_folders_give_purity_and_knn(trained):
    train = read_metrics(trained, "train")
    assert {"loss", "agreement", "effective_rank", "spread", "same_image", "lr"} <= set(train[-1])
    assert [record["k"] for record in train] == [1, 5]
    assert "purity" in train[-1]
    monitored = read_metrics(trained, "monitor")
    assert monitored and 0 <= monitored[-1]["1-NN"] <= 100


def test_a_finished_run_contains_its_files(trained):
    names = {path.name for path in trained.iterdir()}
    files = {"config.json", "environment.json", "metrics.jsonl", "checkpoints", "snapshots"}
    assert files <= names
    config = json.loads((trained / "config.json").read_text())
    assert config["encoder"]["width"] == 0.125 and config["train"]["epochs"] == 2
    snapshots = [path.name for path in sorted((trained / "snapshots").iterdir())]
    assert snapshots == ["epoch-0000.pt", "epoch-0002.pt"]
    assert (trained / "checkpoints" / "step-000000006.pt").is_file()


def test_a_flat_folder_has_everything_but_purity_and_knn(call, tmp_path, make_images):
    flat = make_images(tmp_path / "flat", {"": 12}, size=(20, 24))
    run = tmp_path / "run"
    code, out, err = call("pretrain", "small", "--data", flat, "--out", run, *TINY)
    assert code == 0 and f"finished: {run}" in out
    assert "no labels" in err and "epoch 2/2" in err and "images/s" in err
    last = read_metrics(run, "train")[-1]
    assert {"loss", "agreement", "effective_rank", "spread", "same_image"} <= set(last)
    assert "purity" not in last and read_metrics(run, "monitor") == []
    assert len(read_metrics(run, "snapshot")) == 2


@pytest.mark.parametrize("command", ["pretrain", "demo"])
def test_the_data_is_opened_once(call, tmp_path, photos, monkeypatch, command):
    """On the way to the first step; a demo that cannot be evaluated is refused there."""
    from meanshift.training import session

    opened = []
    train_and_validation = session.train_and_validation

    def watched(*arguments, **options):
        opened.append(arguments)
        return train_and_validation(*arguments, **options)

    monkeypatch.setattr(session, "train_and_validation", watched)
    monkeypatch.setattr("meanshift.data.open_source", None)
    run = tmp_path / "run"
    recipe = ["small", "--data", photos] if command == "pretrain" else ["--data.source", photos]
    code, _, err = call(command, *recipe, "--out", run, *TINY)
    assert len(opened) == 1
    if command == "demo":
        assert code == 2 and "the demo needs labeled arrays" in err and not run.exists()
    else:
        assert code == 0


def test_it_ends_with_a_verdict_also_without_labels_or_validation_images(
    call, tmp_path, make_images
):
    photos = make_images(tmp_path / "photos", {"a": 8, "b": 8}, size=(20, 24))
    flat = make_images(tmp_path / "flat", {"": 16}, size=(20, 24))
    for name, source, words, next_step in (
        ("plain", flat, "no labels to evaluate with", "--labels FILE.csv"),
        ("all", photos, "it was not evaluated yet", "--compare untrained: pixels"),
    ):
        flags = ["--out", tmp_path / name, *TINY, "--data.validation", "none"]
        code, out, err = call("pretrain", "small", "--data", source, *flags)
        assert code == 0, err
        verdict = out.partition("verdict: ")[2].splitlines()
        assert 2 <= len(verdict) <= 4 and words in verdict[0]
        assert f"meanshift evaluate knn {tmp_path / name}" in verdict[-1]
        assert next_step in verdict[-1]


def test_the_same_command_again_changes_nothing(call, trained, photos):
    before = read_run(trained)
    code, out, _ = call("pretrain", "small", "--data", photos, "--out", trained, *TINY)
    assert code == 0 and f"finished: {trained}" in out
    assert read_run(trained) == before


def test_few_epochs_are_told_what_a_growing_k_will_be():
    for epochs, expected in {1: "5", 3: "1, 3, 5", 4: "1, 2, 4, 5"}.items():
        config = recipe("small").with_overrides({"train.epochs": epochs})
        assert describe_few_epochs(config).endswith(f"epochs {epochs} it will be {expected}")
    assert not describe_few_epochs(recipe("small").with_overrides({"train.epochs": 5}))
    assert not describe_few_epochs(recipe("cifar10-r18").with_overrides({"train.epochs": 2}))
    assert not describe_few_epochs(recipe("small").with_overrides({"method.name": "byol"}))


def test_a_file_of_settings_continues_a_run(call, trained):
    before = read_run(trained)
    code, out, _ = call("pretrain", "--config", trained / "config.json", "--out", trained)
    assert code == 0 and f"finished: {trained}" in out
    assert read_run(trained) == before


def test_a_changed_setting_is_refused(call, trained, photos):
    before = read_run(trained)
    changed = [*TINY, "--method.k", "4", "--train.log_every", "3"]
    code, _, err = call("pretrain", "small", "--data", photos, "--out", trained, *changed)
    assert code == 2
    assert "method.k: 5 there, 4 now" in err and "log_every" not in err
    assert read_run(trained) == before


@pytest.mark.parametrize("other", ["images", "settings"])
def test_a_refused_continuation_leaves_every_byte(call, trained, photos, other):
    before = {path: path.read_bytes() for path in trained.rglob("*") if path.is_file()}
    changed = [*TINY, "--train.log_every", "3"]  # resume-safe, but the run is refused
    if other == "images":
        shutil.copy(photos / "train/a/000.jpg", photos / "train/a/more.jpg")
    else:
        changed += ["--train.seed", "1"]
    code, _, err = call("pretrain", "small", "--data", photos, "--out", trained, *changed)
    assert code == 2 and f"other {other}" in err
    assert before == {path: path.read_bytes() for path in trained.rglob("*") if path.is_file()}


def test_load_encoder_gives_the_backbone_in_eval_mode(trained):
    backbone = load_encoder(trained)
    assert not any(module.training for module in backbone.modules())
    with torch.no_grad():
        assert backbone(torch.zeros(3, 3, 16, 16)).shape == (3, 256)
    newest = max((trained / "checkpoints").iterdir())
    saved = torch.load(newest, weights_only=True)["method"]
    for name, weights in backbone.state_dict().items():
        assert torch.equal(weights, saved[f"online.backbone.{name}"])


def test_load_encoder_refuses_what_contains_no_model(trained, tmp_path):
    with pytest.raises(ValueError, match=r"epoch-0000\.pt"):
        load_encoder(trained / "snapshots" / "epoch-0000.pt")
    with pytest.raises(ValueError, match=r"nothing\.pt: not found"):
        load_encoder(tmp_path / "nothing.pt")


@GRAY
def test_few_bad_images_are_named_and_counted(call, photos, tmp_path):
    damage(photos / "train" / "a", 1)
    run = tmp_path / "run"
    limit = ["--data.max_bad_fraction", "0.5"]
    code, _, err = call("pretrain", "small", "--data", photos, "--out", run, *TINY, *limit)
    assert code == 0
    assert "1 of 12 images could not be read" in err
    warnings = read_jsonl(run / "warnings.jsonl")
    (warning,) = [warning for warning in warnings if warning["kind"] == "bad image"]
    assert warning["file"].endswith("a/000.jpg") and warning["message"]


@GRAY
def test_too_many_bad_images_stop_the_run_with_the_list(call, photos, tmp_path):
    damage(photos / "train" / "b", 2)
    run = tmp_path / "run"
    limit = ["--data.max_bad_fraction", "0.1"]
    code, _, err = call("pretrain", "small", "--data", photos, "--out", run, *TINY, *limit)
    assert code == 2
    message = err.partition("meanshift: ")[2]
    assert "2 of 12 images" in message and "--data.max_bad_fraction" in message
    assert "b/000.jpg" in message and "b/001.jpg" in message


def test_the_advice_for_a_batch_that_is_too_large_can_be_followed(call, photos, tmp_path):
    command = ["pretrain", "small", "--data", photos, "--out", tmp_path / "run", *TINY]
    code, _, err = call(*command, "--train.batch_size", "16")
    assert code == 2 and "12 images" in err
    advice = re.search(r"--train\.batch_size (\d+)", err)
    code, _, err = call(*command, *advice[0].split())
    assert code == 0, err
