"""`evaluate`, `embed` and `export` as a user types them, on folders of tiny images."""

import argparse
import json
import re

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torchvision import models

from meanshift import load_encoder
from meanshift.models import feature_cache
from meanshift.runtime import checkpoint
from meanshift.transforms import eval
from meanshift.viz.report.tables import result_tables
from meanshift.viz.run_reader import Run

TINY = (
    "--data.image_size 16 --encoder.name resnet18 --encoder.init random --encoder.width 0.125 "
    "--train.batch_size 4 --method.bank_size 16 --method.dim 16 "
    "--train.device cpu --train.epochs 1 --optim.warmup_epochs 0 --data.workers 0 "
    "--train.snapshots 0"
).split()


@pytest.fixture
def photos(tmp_path, make_images):
    counts = {"train/a": 12, "train/b": 12, "val/a": 4, "val/b": 4}
    return make_images(tmp_path / "photos", counts, size=(20, 24))


@pytest.fixture
def run(call, photos, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = call("pretrain", "small-resnet18", "--data", photos, "--out", "run", *TINY)
    assert code == 0, err
    return tmp_path / "run"


def read_json(path):
    return json.loads(path.read_text())


@pytest.mark.slow
def test_several_protocols_share_one_extraction(call, run, monkeypatch):
    read = []
    transform = eval.eval_transform

    def counts(source, indices, *options, **more):
        read.extend(source.title(int(index)) for index in indices)
        return transform(source, indices, *options, **more)

    monkeypatch.setattr(eval, "eval_transform", counts)
    code, out, err = call("evaluate", "knn", "linear", "cluster", "semi", run, "--fractions", "0.5")
    assert code == 0, err
    assert len(read) == 32 and len(set(read)) == 24  # 24 + 8, the names of val among those of train
    for file in ("knn", "linear", "cluster", "semi-fractions-0.5"):
        name = file.partition("-")[0]
        assert read_json(run / "results" / f"{file}.json")["card"]["protocol"] == name
        assert f"\n{name} on " in out
    assert (
        len({read_json(path)["card"]["weights"] for path in (run / "results").glob("*.json")}) == 1
    )
    read.clear()
    assert call("evaluate", "knn", run)[0] == 0
    assert read == []


def test_runs_are_compared_side_by_side_on_the_same_images(call, run):
    code, out, err = call("evaluate", "knn", run, "--compare", f"untrained:{run}", "pixels")
    assert code == 0, err
    rows = re.findall(r"^  (\S+) +([\d.]+) +([\d.]+)$", out, re.MULTILINE)
    assert [name for name, *_ in rows] == [str(run), f"untrained:{run}", "pixels"]
    cards = [
        read_json(run / "results" / "knn.json"),
        read_json(run / "results" / "knn-untrained.json"),
        read_json(next((run / "results").glob("knn-photos-*.json"))),
    ]
    for (_, one, twenty), card in zip(rows, cards, strict=True):
        assert float(one) == pytest.approx(card["metrics"]["1-NN"], abs=0.01)
        assert float(twenty) == pytest.approx(card["metrics"]["20-NN"], abs=0.01)
    assert len({json.dumps([c["card"][k] for k in ("data", "split", "sizes")]) for c in cards}) == 1
    assert len({card["card"]["weights"] for card in cards}) == 3
    (table,) = result_tables([Run(run)])
    names = ["run", "raw pixels", "the untrained encoder"]
    assert [row["name"] for row in table["rows"]] == names


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ("--encoder.init random", ["random start"]),
        ("--encoder.init pca", ["random start", "PCA start"]),
        (
            "--encoder.init random --encoder.weights run",
            ["random start", "start from run"],
        ),
    ],
)
def test_a_run_is_compared_with_random_weights_and_with_its_own_start(
    call, photos, run, settings, expected
):
    code, _, err = call(
        "pretrain", "small-resnet18", "--data", photos, "--out", "other", *TINY, *settings.split()
    )
    assert code == 0, err
    code, out, err = call("evaluate", "knn", "other", "--compare", "untrained:", "pixels")
    assert code == 0, err
    rows = re.findall(r"^  (\S.*?) +([\d.]+) +([\d.]+)$", out, re.MULTILINE)
    assert [name for name, *_ in rows] == ["other", *expected, "pixels"]
    results = run.parent / "other" / "results"
    assert read_json(results / "knn-random.json")["card"]["encoder"].startswith("random:other: ")
    assert (results / "knn-untrained.json").exists() == (len(expected) == 2)
    if "weights" in settings:
        start = read_json(results / "knn-untrained.json")["metrics"]
        assert call("evaluate", "knn", "run")[0] == 0
        assert start == read_json(run / "results" / "knn.json")["metrics"]
    checkpoint = max((run.parent / "other" / "checkpoints").iterdir())
    _, out, _ = call("evaluate", "knn", checkpoint, "--compare", "untrained:")
    assert all(re.search(rf"^  {title} +\d", out, re.MULTILINE) for title in expected)


def test_weights_without_a_run_have_no_start(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = call("evaluate", "knn", "torchvision:resnet18", "--compare", "untrained:")
    assert (
        code == 2 and "needs a run, got torchvision:resnet18; type --compare untrained:RUN" in err
    )


def test_compared_results_do_not_overwrite_each_other_in_one_place(call, run, tmp_path):
    place = tmp_path / "place"
    assert (
        call("evaluate", "knn", run, "--compare", "pixels", f"untrained:{run}", "--out", place)[0]
        == 0
    )
    assert len(list(place.rglob("knn*.json"))) == 3


def test_a_changed_weight_never_meets_old_features(call, run):
    assert call("evaluate", "knn", run)[0] == 0
    before = read_json(run / "results" / "knn.json")["card"]["weights"]
    files = set((run / "features").glob("*.npy"))
    newest = max((run / "checkpoints").iterdir())
    state = torch.load(newest, weights_only=True)
    state["method"]["online.backbone.conv1.weight"][0, 0, 0, 0] += 1
    checkpoint.write(newest, state)
    assert call("evaluate", "knn", run)[0] == 0
    assert read_json(run / "results" / "knn.json")["card"]["weights"] != before
    assert set((run / "features").glob("*.npy")) > files


def test_the_authors_checkpoint_is_announced_and_evaluated(call, photos, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    state = models.resnet18(num_classes=3).state_dict()
    body = {key: value for key, value in state.items() if not key.startswith("fc.")}
    keys = {f"encoder_{which}.module.{key}": v for which in "qt" for key, v in body.items()}
    for index, shape in ((0, (8, 512)), (1, (8,)), (3, (4, 8))):
        keys[f"encoder_q.module.fc.{index}.weight"] = torch.zeros(shape)
    whole = {"opt": argparse.Namespace(arch="resnet18"), "state_dict": keys, "epoch": 200}
    torch.save(whole, "authors.pth")
    code, out, err = call("evaluate", "knn", "authors.pth", "--data", photos, "--image-size", "32")
    assert code == 0, err
    assert "authors.pth: authors' MSF, ResNet-18, epoch 200" in err
    (path,) = (tmp_path / "evaluations").glob("authors-*/results/knn-photos-*.json")
    card = read_json(path)["card"]
    assert card["encoder"] == "authors.pth: authors' MSF, ResNet-18, epoch 200"
    assert card["image_size"] == 32 and "1-NN" in out


def test_a_network_with_random_weights_is_named_so(call, photos, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    spec = "torchvision:resnet18:random"
    code, _, err = call("evaluate", "knn", spec, "--data", photos, "--image-size", "32")
    assert code == 0 and "ResNet-18, random weights" in err


def test_a_flat_folder_is_evaluated_with_a_csv(call, run, tmp_path, make_images):
    flat = make_images(tmp_path / "flat", {"": 20}, size=(20, 24))
    code, _, err = call("evaluate", "knn", run, "--data", flat)
    assert code == 2 and "--labels" in err
    rows = "".join(f"{i:03d}.jpg,{'cat' if i % 2 else 'dog'}\n" for i in range(20))
    (tmp_path / "labels.csv").write_text("file,label\n" + rows)
    code, out, err = call(
        "evaluate", "knn", run, "--data", flat, "--labels", tmp_path / "labels.csv", "--ks", "3"
    )
    assert code == 0 and "3-NN" in out and "25% split off" in err
    (tmp_path / "labels.csv").write_text("file,label\n000.jpg,cat;dog\n")
    code, _, err = call("evaluate", "knn", run, "--data", flat, "--labels", tmp_path / "labels.csv")
    assert code == 2 and "several labels" in err


def test_the_counts_of_the_splits_are_printed_once(call, run):
    code, _, err = call("evaluate", "knn", "cluster", run, "--compare", "pixels")
    assert code == 0, err
    counts = "train 24 images of 2 classes (12 each); test 8 images of 2 classes (4 each)"
    assert err.count(counts) == 1


@pytest.mark.filterwarnings("default")
def test_groups_stay_whole_from_training_to_evaluation(call, tmp_path, make_images, monkeypatch):
    monkeypatch.chdir(tmp_path)
    layout = {f"{'ab'[patient % 2]}/p{patient}": 4 for patient in range(10)}
    make_images(tmp_path / "scans", layout, size=(20, 24))
    options = ["--data", "scans", "--out", "run", "--data.group", "folder:2"]
    code, _, err = call("pretrain", "small-resnet18", *options, "--data.validation", "0.4", *TINY)
    assert code == 0, err
    assert "train 24 images of 2 classes (12 each), 6 groups; validation 16 images" in err
    assert read_json(tmp_path / "run/config.json")["data"]["group"] == "folder:2"
    code, _, err = call("evaluate", "knn", "run")
    assert code == 0 and "(8 each), 4 groups" in err and "validation images of the run" in err
    assert read_json(tmp_path / "run/results/knn.json")["card"]["group"] == "folder:2"
    code, _, err = call("evaluate", "knn", "run", "--group", "none")
    assert code == 0 and "25% split off" in err and "groups" not in err
    assert read_json(tmp_path / "run/results/knn-group-none.json")["card"]["group"] == "none"
    code, _, err = call("evaluate", "knn", "run", "--group", "folder")
    assert code == 2 and "data.group: got 'folder', need a CSV" in err


@pytest.mark.filterwarnings("default")
def test_folders_that_are_taken_as_splits_are_named(call, run, tmp_path, make_images):
    layout = {"Training/a": 3, "Training/b": 2, "Testing/a": 1, "Testing/b": 1}
    brain = make_images(tmp_path / "brain", layout, size=(20, 24))
    options = ["--data", brain, "--ks", "1", "--compare", "pixels"]
    code, _, err = call("evaluate", "knn", run, *options)
    note = (
        f"{brain}: its folders are taken as splits, not as classes: Training/ is train (5 images)"
    )
    assert code == 0 and len([line for line in err.splitlines() if line.startswith(note)]) == 1
    assert "train 5 images of 2 classes (a: 3, b: 2); test 2 images of 2 classes (1 each)" in err


def test_embed_writes_the_backbones_output(call, run, photos, tmp_path):
    for name in ("out.npz", "out.parquet"):
        code, out, err = call("embed", run, photos, "--out", tmp_path / name)
        assert code == 0, err
        assert out == f"{tmp_path / name}: 32 samples, 64 dimensions\n"
    arrays, table = np.load(tmp_path / "out.npz"), pq.read_table(tmp_path / "out.parquet")
    assert np.array_equal(np.stack(table["embedding"].to_numpy()), arrays["embedding"])
    for column in ("file", "id", "split", "label"):
        assert table[column].to_pylist() == arrays[column].tolist()
    code, out, _ = call("embed", run, photos, "--out", tmp_path / "p.npz", "--output", "projector")
    assert code == 0 and "16 dimensions" in out
    code, _, err = call("embed", run, photos, "--out", tmp_path / "out.csv")
    assert code == 2 and ".npz or .parquet" in err


@pytest.mark.parametrize("name", ["backbone.safetensors", "backbone.pth"])
def test_an_exported_backbone_is_evaluated_like_its_run(call, run, photos, tmp_path, name):
    code, out, err = call("export", run, "--out", tmp_path / name)
    assert code == 0 and name in out, err
    x = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        assert torch.equal(load_encoder(tmp_path / name)(x), load_encoder(run)(x))
    code, _, err = call("evaluate", "knn", tmp_path / name, "--data", photos)
    assert code == 0 and "exported by meanshift" in err
    code, _, err = call("export", "torchvision:resnet18:random", "--out", tmp_path / "again.pth")
    assert code == 2 and "need a run directory" in err


def test_files_of_one_name_have_results_of_their_own(call, photos, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        torch.save(models.resnet18().state_dict(), f"{folder}/checkpoint.pth")
    given = ["a/checkpoint.pth", "--compare", "b/checkpoint.pth", "--data", photos]
    assert call("evaluate", "knn", *given, "--image-size", "32", "--ks", "1")[0] == 0
    assert len(list((tmp_path / "evaluations").rglob("knn-photos-*.json"))) == 2


def test_a_typo_in_compare_is_found_before_any_work(call, run, monkeypatch):
    monkeypatch.setattr(eval, "eval_transform", None)  # nobody may ask for images
    code, _, err = call("evaluate", "knn", run, "--compare", "runs/typo")
    assert code == 2 and "runs/typo: not found" in err


def test_counts_take_the_place_of_the_usual_fractions(call, run):
    code, out, err = call("evaluate", "semi", run, "--counts", "8", "--cached")
    assert code == 0 and "8 top-1" in out and "%" not in out, err
    code, _, err = call("evaluate", "knn", run, "--sweep")
    assert code == 2 and "--sweep" in err


def test_a_full_disk_names_the_file_and_keeps_the_old_result(call, run, monkeypatch):
    assert call("evaluate", "knn", run)[0] == 0
    before = (run / "results" / "knn.json").read_bytes()
    for file in (run / "features").iterdir():
        file.unlink()

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(feature_cache, "atomic_writer", full)
    code, _, err = call("evaluate", "knn", run)
    assert code == 2 and "No space left" in err and "features" in err and "make room" in err
    assert (run / "results" / "knn.json").read_bytes() == before
