"""`meanshift predict`: new files into a CSV or into class folders, with nothing lost."""

import csv
import io
import shutil

import numpy as np
import pytest
from PIL import Image

from meanshift.data import open_source
from meanshift.evaluation.predict import folder_names
from meanshift.viz.explorer.model import Explorer
from meanshift.viz.run_reader import Run
from tests.support.explorer import wait_for, write_live_run, write_live_snapshot

TONES = {"red": (220, 40, 40), "green": (40, 200, 40), "blue": (40, 40, 220)}


def write_color(path, tone, seed=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(seed).integers(-30, 30, (16, 16, 3))
    Image.fromarray(np.clip(np.array(tone) + noise, 0, 255).astype(np.uint8)).save(path)


@pytest.fixture(scope="module")
def labeled_run(tmp_path_factory):
    """A run on a flat folder, half of whose images were labeled on the page."""
    root = tmp_path_factory.mktemp("predict")
    for seed in range(24):
        name, tone = list(TONES.items())[seed % 3]
        write_color(root / f"photos/{seed:02d}-{name}.png", tone, seed)
    run = write_live_run(root / "run", root / "photos", validation="none", snapshot_images=24)
    labeling = Explorer(Run(run)).labeling
    for index in range(12):
        name = labeling.log.source.title(index)[3:-4]
        labeling.log.give([index], {"red": "a/b", "green": "CON", "blue": "blue"}[name], seen=100)
    wait_for(lambda: labeling.probe("snapshot"))
    return run


@pytest.fixture
def model(labeled_run, tmp_path):
    """A copy of the run beside its images, which were moved: the folder of its labels."""
    shutil.copytree(labeled_run, tmp_path / "moved/run")
    return tmp_path / "moved/run/labels"


@pytest.fixture
def inbox(tmp_path):
    folder = tmp_path / "inbox"
    write_color(folder / "x/one.png", TONES["red"], 100)
    write_color(folder / "y/one.png", TONES["red"], 101)  # another image of the same name
    write_color(folder / "two.png", TONES["green"], 102)
    write_color(folder / "three.png", TONES["blue"], 103)
    (folder / "torn.png").write_bytes((folder / "two.png").read_bytes()[:60])
    return folder


def read_csv(text):
    return list(csv.DictReader(io.StringIO(text)))


def contents(folder):
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*.png")}


def test_predictions_as_csv(call, model, inbox, tmp_path):
    code, out, errors = call("predict", model, inbox)
    assert code == 0, errors
    rows = {row["file"]: row for row in read_csv(out)}
    assert {file: row["label"] for file, row in rows.items()} == {
        "x/one.png": "a/b",
        "y/one.png": "a/b",
        "two.png": "CON",
        "three.png": "blue",
    }
    assert all(1 / 3 < float(row["confidence"]) <= 1 for row in rows.values())
    assert "torn.png: cannot be read (" in errors and "1 of 5 cannot be read" in errors
    assert "12 labels of 3 classes" in errors

    table = tmp_path / "predictions.csv"
    assert call("predict", model, inbox, "--out", table)[:2] == (0, f"{table}: 4 predictions\n")
    assert read_csv(table.read_text()) == list(rows.values())
    code, out, _ = call("predict", model, inbox, "--min-confidence", 1)
    assert [row["label"] for row in read_csv(out)] == [""] * 4  # unknown, for --labels


def test_the_features_are_those_that_the_classifier_was_fitted_to(call, model, labeled_run):
    labeling = Explorer(Run(labeled_run)).labeling
    code, out, errors = call("predict", model, labeled_run.parent / "photos")
    assert code == 0, errors
    expected = labeling.predictions("snapshot", range(24))
    for row, one in zip(read_csv(out), expected, strict=True):
        assert row["label"] == one["predicted"]
        assert float(row["confidence"]) == pytest.approx(one["confidence"], abs=0.01)


def test_class_folders_never_lose_a_file(call, model, inbox, tmp_path):
    before = contents(inbox)
    out = tmp_path / "sorted"
    (out / "blue").mkdir(parents=True)
    (out / "blue/three.png").write_bytes(b"mine")  # another file of this name
    code, text, errors = call("predict", model, inbox, "--copy-to", out)
    assert code == 0 and "4 files copied (1 to _CON, 2 to a_b, 1 to blue)" in text, (text, errors)
    assert contents(out) == {
        "a_b/one.png": before["x/one.png"],
        "a_b/one-2.png": before["y/one.png"],
        "_CON/two.png": before["two.png"],
        "blue/three.png": b"mine",
        "blue/three-2.png": before["three.png"],
    }
    assert contents(inbox) == before
    sorted_once = contents(out)
    assert "0 files copied" in call("predict", model, inbox, "--copy-to", out)[1]
    assert contents(out) == sorted_once  # what is there already is not copied again

    unsure = tmp_path / "unsure"
    options = ["--copy-to", unsure, "--min-confidence", 1, "--out", tmp_path / "p.csv"]
    assert "4 files copied (4 to unsure)" in call("predict", model, inbox, *options)[1]
    assert {path.parent.name for path in unsure.rglob("*.png")} == {"unsure"}


def test_splits_of_a_folder_and_arrays_are_predicted_too(call, model, inbox, tmp_path):
    write_color(tmp_path / "parts/train/one.png", TONES["red"])
    write_color(tmp_path / "parts/val/one.png", TONES["blue"])
    rows = read_csv(call("predict", model, tmp_path / "parts")[1])
    assert {row["file"]: row["label"] for row in rows} == {
        "train/one.png": "a/b",
        "val/one.png": "blue",
    }
    pixels = [np.asarray(Image.open(inbox / name)) for name in ("two.png", "three.png")]
    np.save(tmp_path / "new.npy", np.stack(pixels))
    rows = read_csv(call("predict", model, tmp_path / "new.npy")[1])
    assert [(row["file"], row["label"]) for row in rows] == [("#0", "CON"), ("#1", "blue")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--min-confidence", "1.5"], "--min-confidence: got 1.5, need 0 to 1"),
        (["--copy-to", "{inbox}/sorted"], "is inside"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_read(call, model, inbox, options, message):
    filled = [option.format(inbox=inbox) for option in options]
    code, _, errors = call("predict", model, inbox, *filled)
    assert code == 2 and message in errors
    assert not (inbox / "sorted").exists()


def test_what_is_no_classifier_or_not_its_encoder_is_refused(call, model, inbox, tmp_path):
    code, _, errors = call("predict", tmp_path, inbox)
    assert code == 2 and "need the folder of labels of a run (RUN/labels)" in errors
    code, _, errors = call("predict", model, tmp_path / "a.npz", "--copy-to", tmp_path / "out")
    assert code == 2 and "is no folder of files" in errors
    write_live_snapshot(model.parent, 2, seed=5)  # the run went on
    code, _, errors = call("predict", model, inbox)
    assert code == 2 and "has other weights than the classifier was fitted to" in errors
    file = model / "classifier.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    code, _, errors = call("predict", model, inbox)
    assert code == 2 and "differ from its checksum" in errors


@pytest.mark.filterwarnings("always:.*was fitted before")
def test_labels_that_are_newer_than_the_classifier_are_reported(call, model, inbox):
    with (model / "labels.jsonl").open("a") as log:
        log.write('{"id": 14, "undo": 12}\n{"id": 1')
    code, _, errors = call("predict", model, inbox)
    assert code == 0 and "was fitted before the last 2 changes of the labels" in errors


def test_names_of_classes_become_names_of_folders():
    labels = ["..", "a/b", "a:b", "A_b", "unsure", "", "nul.x", "é", "x" * 300, "../../etc", ". "]
    names = folder_names(labels)
    folders = list(names.values())
    assert len({name.lower() for name in folders}) == len(labels)  # also where A is a
    assert "unsure" not in folders and names["é"] == "é" and names["a/b"] == "a_b-2"
    for name in folders:
        assert name and not set(name) & set('/\\:*?"<>|') and name.strip(". ") == name
        assert len(name) < 90 and not name.lower().startswith("nul.")


@pytest.mark.filterwarnings("ignore:.*the other images are unlabeled")
def test_its_predictions_are_taken_as_labels(call, model, inbox, tmp_path):
    table = tmp_path / "p.csv"
    call("predict", model, inbox, "--out", table)
    source = open_source(str(inbox), labels=table)["train"]
    assert source.classes == ["CON", "a/b", "blue"] and int((source.labels >= 0).sum()) == 4
