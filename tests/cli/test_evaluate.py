"""`meanshift evaluate`: the table and the card of a run, and what is refused."""

import json
import re

import pytest

from meanshift.data import train_and_validation
from meanshift.evaluation import context
from tests.support.commands import TINY


def test_a_table_is_printed_and_a_card_is_written(call, trained, photos):
    code, out, _ = call("evaluate", "knn", trained, "--ks", "1", "3")
    assert code == 0
    printed = dict(re.findall(r"^ *(\d+-NN) +([\d.]+)$", out, re.MULTILINE))
    result = json.loads((trained / "results" / "knn-ks-1-3.json").read_text())
    metrics = result["metrics"]
    assert set(printed) == set(metrics) == {"1-NN", "3-NN"}
    assert {name: float(text) for name, text in printed.items()} == pytest.approx(metrics, abs=0.01)
    card = result["card"]
    assert (card["protocol"], card["data"]) == ("knn", str(photos))
    assert card["sizes"] == {"train": 12, "test": 4}
    assert {"weights", "encoder", "seed", "versions", "date"} <= set(card)


def test_several_weights_are_compared_side_by_side(call, trained):
    code, out, _ = call("evaluate", "knn", trained, "--compare", f"untrained:{trained}", "pixels")
    assert code == 0
    for spec in (str(trained), f"untrained:{trained}", "pixels"):
        assert spec in out


def test_fine_tuning_has_a_row_per_encoder_and_a_column_per_subset(call, trained):
    words = "--fractions 0.5 1 --epochs 1 --backbone-lr 0.01 --seeds 2".split()
    others = [f"random:{trained}", f"untrained:{trained}", "pixels"]
    code, out, err = call("evaluate", "finetune", trained, *words, "--compare", *others)
    assert code == 0, err
    header, *rows = out.split("\nfinetune on ")[1].splitlines()[1:]
    assert header.split() == ["50%", "top-1", "100%", "top-1"]
    assert [row.split()[0] for row in rows] == [str(trained), *others]
    name = "finetune-fractions-0.5-1.0-seeds-2-backbone-lrs-0.01-epochs-1"
    result = json.loads((trained / "results" / f"{name}.json").read_text())
    assert rows[0].split()[1:4] == [
        f"{result['metrics']['50% top-1']:.2f}",
        "±",
        f"{result['metrics']['50% top-1 std']:.2f}",
    ]
    assert result["card"]["settings"]["subsets"] == {"50%": 6, "100%": 12}


def test_weights_that_are_named_twice_leave_no_other_out(call, trained):
    code, out, _ = call("evaluate", "knn", "cluster", trained, "--compare", "pixels", trained)
    assert code == 0
    knn, cluster = out.partition("\nverdict: ")[0].split("\ncluster on ")
    assert knn.count("pixels") == cluster.count("pixels") == 1


def test_it_ends_with_a_verdict(call, trained):
    code, out, _ = call("evaluate", "knn", trained, "--compare", "untrained:", "pixels")
    assert code == 0
    verdict = out.partition("\nverdict: ")[2].splitlines()
    assert 2 <= len(verdict) <= 4 and "not distinguishable from" in verdict[0]  # of four images
    assert " on 4 test images; " in verdict[1] and "unpaired" not in verdict[1]
    code, out, _ = call("evaluate", "knn", trained)
    assert code == 0 and "verdict: not compared with a baseline yet" in out
    assert "next: the same command with --compare untrained: pixels" in out


def test_a_wrong_device_names_the_flag_that_was_typed(call, tmp_path):
    code, _, err = call("evaluate", "knn", tmp_path, "--device", "toaster")
    assert code == 2 and "--device: got 'toaster'" in err


def test_a_checkpoint_file_can_be_evaluated(call, trained):
    first, last = sorted((trained / "checkpoints").iterdir())
    fingerprints = []
    for path in (first, last):
        assert call("evaluate", "knn", path)[0] == 0
        result = json.loads((trained / "results" / f"knn-{path.stem}.json").read_text())
        fingerprints.append(result["card"]["weights"])
    assert fingerprints[0] != fingerprints[1]


def test_a_run_is_evaluated_on_its_validation_images(call, tmp_path, make_images, monkeypatch):
    source = make_images(tmp_path / "all", {"a": 10, "b": 10}, size=(20, 24))
    run = tmp_path / "run"
    settings = ["--data.validation", "0.4", "--train.seed", "3", *TINY]
    assert call("pretrain", "small", "--data", source, "--out", run, *settings)[0] == 0
    evaluated = []
    cached_features = context.cached_features

    def watched(network, part, **options):
        evaluated.append([part.title(index) for index in range(len(part))])
        return cached_features(network, part, **options)

    monkeypatch.setattr(context, "cached_features", watched)
    assert call("evaluate", "knn", run, "--ks", "1")[0] == 0
    splits = train_and_validation(str(source), 0.4, seed=3)
    expected = [[split.title(index) for index in range(len(split))] for split in splits]
    assert sorted(evaluated) == sorted(expected)


@pytest.mark.parametrize("words", [["knn"], ["magic", "run"], ["run"]])
def test_the_error_says_what_is_needed(call, words):
    code, _, err = call("evaluate", *words)
    assert code == 2 and "need one or more of knn, linear, semi, finetune, cluster" in err


def test_a_run_that_does_not_exist_is_named(call, tmp_path):
    missing = tmp_path / "a" / "b" / "run"
    code, _, err = call("evaluate", "knn", missing)
    assert code == 2 and f"{missing}: " in err


@pytest.mark.parametrize("k", ["0", "-1", "1000"])
def test_a_wrong_k_is_refused(call, trained, k):
    code, _, err = call("evaluate", "knn", trained, "--ks", k)
    assert code == 2 and k in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("knn RUN --epochs 3", "--epochs: is for linear, semi, finetune; got knn"),
        ("knn RUN --sweep", "--sweep: is for linear; got knn"),
        ("semi RUN --backbone-lr 1", "--backbone-lr: is for finetune; got semi"),
        ("linear cluster RUN --temperature 0.1", "--temperature: is for knn"),
        ("transfer RUN --split val", "--split: is for knn"),
        ("knn RUN --batch-size 3", "--batch-size: is for finetune, detect"),
        ("transfer detect RUN --root x", "type two commands"),
        ("transfer RUN", "--root FOLDER"),
        ("transfer RUN --root nowhere", "nowhere is no folder"),
        ("transfer RUN --root . --only flowers", "need some of food101"),
        ("transfer RUN --add pollen", "need NAME=SOURCE"),
        ("detect RUN", "--root VOCDEVKIT"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(call, tmp_path, words, message):
    arguments = [str(tmp_path) if word == "RUN" else word for word in words.split()]
    code, _, err = call("evaluate", *arguments)
    assert code == 2 and message in err


@pytest.mark.filterwarnings("always:.*not a complete meanshift file")
def test_a_truncated_newest_checkpoint_is_reported(call, trained):
    newest = max((trained / "checkpoints").iterdir())
    newest.write_bytes(newest.read_bytes()[:100])
    code, _, err = call("evaluate", "knn", trained)
    assert code == 0 and newest.name in err
