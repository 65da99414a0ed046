"""Linear transfer: chosen on validation, refit on both, the test images used once."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, balanced_accuracy_score

import meanshift
from meanshift.data.arrays import ArraySource
from meanshift.data.transfer_datasets import NAMES, Task, open_task, task_from_source
from meanshift.evaluation import transfer
from meanshift.evaluation.context import EncoderContext, FeatureSet
from meanshift.evaluation.result import result_name
from meanshift.models.weights import load_weights
from meanshift.ops.logistic_regression import PENALTIES, LogisticRegression
from tests.support.layouts import write_copy


def source(labels):
    pixels = np.zeros((len(labels), 8, 8, 3), dtype=np.uint8)
    return ArraySource(pixels, np.asarray(labels), name="made up")


class Stub(EncoderContext):
    """A context with given features."""

    def __init__(self, *features):
        super().__init__(load_weights("pixels"), image_size=8, device="cpu")
        self.rows = features

    def features_of_parts(self, *sources, **options):
        assert options == {"resize": 8, "bicubic": True}
        return [FeatureSet(one, rows) for one, rows in zip(sources, self.rows, strict=True)]


@pytest.fixture
def noisy():
    """Three parts of overlapping classes in 20 dimensions, unequal in size."""
    generator = torch.Generator().manual_seed(3)
    centers = torch.randn(3, 20, generator=generator)
    parts, labels = [], []
    for size in (60, 45, 90):
        label = torch.multinomial(torch.tensor([0.6, 0.3, 0.1]), size, True, generator=generator)
        labels.append(label.tolist())
        parts.append(centers[label] + 1.5 * torch.randn(size, 20, generator=generator))
    return parts, labels


def task(labels, metric="top-1"):
    return Task("made", "Made up", *map(source, labels), metric, "as made")


@pytest.mark.parametrize("metric", ["top-1", "mean per class"])
def test_the_metrics_are_scikit_learns(metric):
    truth = torch.tensor([0] * 50 + [1] * 5 + [3] * 10)
    predicted = truth.clone()
    predicted[[0, 1, 50, 51, 55]] = 2
    theirs = accuracy_score if metric == "top-1" else balanced_accuracy_score
    with pytest.warns(UserWarning, match="not in y_true") if metric != "top-1" else no_warning():
        expected = 100 * theirs(truth, predicted)
    assert transfer.accuracy(predicted, truth, metric) == pytest.approx(expected)


def no_warning():
    from contextlib import nullcontext

    return nullcontext()


@pytest.mark.parametrize("metric", ["top-1", "mean per class"])
def test_the_penalty_is_the_best_on_validation_and_the_layer_is_fitted_to_both(noisy, metric):
    parts, labels = noisy
    result = transfer.evaluate(Stub(*parts), task(labels, metric))
    train, val, test = (torch.tensor(part) for part in labels)
    found = [
        transfer.accuracy(layer(parts[1]), val, metric)
        for layer in LogisticRegression(parts[0], train, classes=3).path()
    ]
    best = found.index(max(found))  # the strongest of equals
    assert best > 0 and found[best] > max(found[0], found[-1])  # or the test could not fail
    assert result.settings["penalty"] == PENALTIES[best]
    assert result.settings["validation by penalty"] == pytest.approx(found)
    both = LogisticRegression(torch.cat(parts[:2]), torch.cat([train, val]), classes=3)
    expected = transfer.accuracy(both.fit(PENALTIES[best])(parts[2]), test, metric)
    assert result.metrics == {metric: pytest.approx(expected)}
    alone = LogisticRegression(parts[0], train, classes=3).fit(PENALTIES[best])
    assert expected != transfer.accuracy(alone(parts[2]), test, metric)


def test_the_test_images_choose_nothing(noisy):
    parts, labels = noisy
    one = transfer.evaluate(Stub(*parts), task(labels))
    other = transfer.evaluate(Stub(*parts), task([*labels[:2], labels[2][::-1]]))
    chosen = ("penalty", "validation", "validation by penalty", "loss")
    assert all(one.settings[name] == other.settings[name] for name in chosen)
    assert one.metrics != other.metrics


def test_a_class_that_only_the_test_images_have_is_only_wrong(noisy):
    parts, labels = noisy
    strange = [*labels[:2], [3] * 9 + labels[2][9:]]
    before, after = (
        transfer.evaluate(Stub(*parts), task(part_labels)) for part_labels in (labels, strange)
    )
    assert after.metrics["top-1"] < before.metrics["top-1"]


def test_the_summary_has_one_metric_per_dataset_and_their_mean(noisy):
    parts, labels = noisy
    one = transfer.evaluate(Stub(*parts), task(labels))
    other = transfer.evaluate(Stub(*parts), task(labels, "mean per class"))
    summary = transfer.summarize({"a": one, "b": other})
    top, mean = one.metrics["top-1"], other.metrics["mean per class"]
    assert summary.metrics == pytest.approx({"a": top, "b": mean, "mean": (top + mean) / 2})
    assert summary.settings["metrics"] == {"a": "top-1", "b": "mean per class"}


def test_labels_far_apart_and_strange_ones_cost_nothing(noisy):
    parts, labels = noisy
    plain = transfer.evaluate(Stub(*parts), task(labels))
    apart = [[400_000 * label + 7 for label in part] for part in labels]
    assert transfer.evaluate(Stub(*parts), task(apart)).metrics == plain.metrics
    with pytest.raises(ValueError, match=r"a label is 2000000, .*need classes numbered from 0"):
        source([0, 1, 2_000_000])


@pytest.mark.parametrize(("gone", "refused"), [(1, False), (2, True)])
def test_many_unreadable_images_are_refused(gone, refused):
    random = torch.Generator().manual_seed(0)
    labels = [0, 1] * 60
    rows = torch.randn(120, 4, generator=random) + torch.tensor(labels)[:, None]

    class Some(Stub):
        def features_of_parts(self, *sources, **_):
            read = [
                one.subset(torch.arange(len(one) - gone * (one is sources[2]))) for one in sources
            ]
            return [FeatureSet(one, rows[: len(one)]) for one in read]

    made = task([labels, labels, labels])
    if refused:
        with pytest.raises(ValueError, match=r"made, test: 2 of 120 images cannot be read; .*1%"):
            transfer.evaluate(Some(), made)
    else:
        assert transfer.evaluate(Some(), made).card["unreadable"] == 1


def test_the_card_of_the_summary_has_splits_and_sizes_of_each(noisy):
    parts, labels = noisy
    one = transfer.evaluate(Stub(*parts), task(labels))
    some = transfer.summarize({"made": one, "other": one})
    assert some.name == "transfer-of-made-other" and some.card["data"] == "made, other"
    card = some.card["datasets"]["made"]
    assert card["sizes"] == {"train": 60, "val": 45, "test": 90} and card["split"] == "as made"
    assert transfer.summarize(dict.fromkeys(NAMES, one)).name == "transfer"
    six = [transfer.summarize(dict.fromkeys(names, one)) for names in (NAMES[:6], NAMES[1:7])]
    assert {result.name for result in six} == {"transfer-of-6"}
    assert len({result_name(result.name, options=result.options) for result in six}) == 2


def test_other_images_of_one_name_have_results_of_their_own(noisy):
    parts, labels = noisy
    tasks = [replace(task(labels), spec=spec) for spec in ("", "a/val", "b/val")]
    results = [transfer.evaluate(Stub(*parts), each) for each in tasks]
    for group in (results, [transfer.summarize({"made": result}) for result in results]):
        names = [result_name(result.name, options=result.options) for result in group]
        assert len(set(names)) == 3


# The paper


def test_the_papers_rows_have_the_papers_means():
    """The paper prints them; a typing error in one of a hundred numbers would show."""
    printed = [78.9, 74.0, 74.2, 79.2, 79.2, 74.3, 72.6, 75.8, 75.5, 76.3]
    means = [row["mean"] for row in transfer.paper_rows(list(NAMES)).values()]
    assert means == pytest.approx(printed, abs=0.061)


def test_the_document_has_the_same_rows():
    text = (Path(meanshift.__file__).parent.parent / "docs" / "transfer.md").read_text()
    for row in transfer.PAPER.values():
        cells = r"\s*\|\s*".join(rf"\**{value}\**" for value in row)
        assert re.search(cells, text), row


def test_rows_of_the_paper_have_a_mean_only_over_the_same_datasets():
    assert transfer.paper_rows(["cifar10", "pets"])["MSF, 200"] == pytest.approx(
        {"cifar10": 92.0, "pets": 89.2, "mean": 90.6}
    )
    assert transfer.paper_rows(["pets", "pollen"])["MSF, 200"] == {"pets": 89.2}
    assert transfer.paper_rows(["pollen"]) == {}


# Features


@pytest.fixture
def colors(tmp_path):
    """An .npz whose classes differ in color."""
    random, path = np.random.default_rng(0), tmp_path / "colors.npz"
    labels = np.arange(60) % 3
    pixels = random.integers(0, 80, (60, 32, 32, 3), dtype=np.uint8)
    pixels[np.arange(60), :, :, labels] += 120
    np.savez(path, x_train=pixels[:40], y_train=labels[:40], x_test=pixels[40:], y_test=labels[40:])
    return path


@pytest.fixture
def run(call, tmp_path, make_images):
    make_images(tmp_path / "few", {"": 8}, size=(32, 32))
    tiny = (
        "--data.image_size 32 --encoder.width 0.125 --train.batch_size 4 --method.bank_size 16 "
        "--train.device cpu --train.epochs 1 --optim.warmup_epochs 0 --data.workers 0 "
        "--train.snapshots 0"
    )
    options = ("--data", tmp_path / "few", "--out", tmp_path / "run", *tiny.split())
    code, _, err = call("pretrain", "small", *options)
    assert code == 0, err
    return tmp_path / "run"


def test_features_are_shared_with_the_other_protocols(run, colors, call):
    assert call("evaluate", "knn", run, "--data", colors, "--ks", 1)[0] == 0
    files = {file: file.stat().st_mtime_ns for file in (run / "features").glob("*.npy")}
    assert len(files) == 2  # of train, from which validation is drawn, and of test
    assert call("evaluate", "transfer", run, "--add", f"mine={colors}")[0] == 0
    assert {file: file.stat().st_mtime_ns for file in (run / "features").glob("*.npy")} == files


def test_bicubic_is_another_file_of_features_unless_nothing_is_resized(
    tmp_path, make_images, monkeypatch
):
    monkeypatch.setattr("meanshift.evaluation.context.PIXEL_ROWS", 0)  # pixels are in files too
    context = EncoderContext(load_weights("pixels"), output_dir=tmp_path / "out", image_size=32)
    as_is = ArraySource(np.zeros((4, 32, 32, 3), np.uint8), np.zeros(4, np.int64), name="as is")
    for options in ({}, {"resize": 32, "bicubic": True}):
        context.features(as_is, **options)
    files = tmp_path / "out" / "features"
    assert len(list(files.glob("*.npy"))) == 1
    photos = task_from_source("photos", str(make_images(tmp_path / "p", {"a": 6, "b": 6}))).train
    one = context.features(photos)
    other = context.features(photos, resize=36, bicubic=True)
    assert len(list(files.glob("*.npy"))) == 3
    assert not torch.equal(one.features, other.features)


# The command


@pytest.fixture
def ten(tmp_path, monkeypatch):
    root = tmp_path / "data"
    for name in NAMES:
        write_copy(name, root, monkeypatch)
    return root


def test_all_ten_from_their_own_layouts_to_the_table_and_the_cards(ten, tmp_path, call):
    code, out, err = call("evaluate", "transfer", "pixels", "--root", ten, "--out", tmp_path / "o")
    assert code == 0, err
    header, ours, *paper = [line for line in out.splitlines()[2:] if line]
    assert header.split() == [*NAMES, "mean"]
    assert ours.split()[0] == "pixels" and len(ours.split()) == 12
    assert len(paper) == len(transfer.PAPER) + 1 and "ResNet-50 at 224" in paper[-1]
    assert "not evaluated" not in err
    results = tmp_path / "o" / "results"
    summary = json.loads((results / "transfer-weights-pixels.json").read_text())
    for name in NAMES:
        result = json.loads((results / f"transfer-{name}-weights-pixels.json").read_text())
        entry = open_task(name, ten)
        assert list(result["metrics"]) == [entry.metric]
        assert summary["metrics"][name] == result["metrics"][entry.metric]
        card = result["card"]
        assert card["sizes"] == {"train": 18, "val": 6, "test": 12} and card["unreadable"] == 0
        assert card["split"] == entry.split and card["data"] == entry.title
        assert card["weights"] and card["versions"] and card["date"] and "bicubic" in card["resize"]
    values = [summary["metrics"][name] for name in NAMES]
    assert summary["metrics"]["mean"] == pytest.approx(sum(values) / 10)
    assert max(values) == 100  # the color of an image shows its class


def test_what_is_missing_is_named_and_the_others_are_evaluated(ten, tmp_path, call):
    (ten / "dtd").rename(ten / "elsewhere")
    options = ("--root", ten, "--only", "dtd,pets", "--out", tmp_path / "o")
    code, out, err = call("evaluate", "transfer", "pixels", *options)
    assert code == 0 and "pets" in out and "dtd" not in out
    assert "not evaluated" in err and "dtd-r1.0.1.tar.gz" in err and str(ten / "dtd" / "dtd") in err


def test_a_damaged_copy_stops_before_any_work(ten, tmp_path, call):
    (ten / "flowers-102" / "setid.mat").write_bytes(b"torn")
    options = ("--root", ten, "--only", "pets", "flowers102", "--out", tmp_path / "o")
    code, out, err = call("evaluate", "transfer", "pixels", *options)
    assert code == 2 and not out and "flowers102" in err and "damaged" in err
    assert not (tmp_path / "o").exists()


def test_own_images_are_added_by_name(colors, tmp_path, call):
    code, out, err = call(
        "evaluate", "transfer", "pixels", "--add", f"mine={colors}", "--out", tmp_path / "o"
    )
    assert code == 0, err
    assert "mine" in out and "100.00" in out and "the paper" not in out
    (file,) = (tmp_path / "o" / "results").glob("transfer-mine-*.json")
    card = json.loads(file.read_text())["card"]
    assert card["sizes"] == {"train": 31, "val": 9, "test": 20}


def test_several_weights_stand_below_each_other(run, colors, call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = call(
        "evaluate", "transfer", run, "--compare", "pixels", "--add", f"mine={colors}"
    )
    assert code == 0, err
    assert [line.split()[0] for line in out.splitlines()[3:5]] == [str(run), "pixels"]
    names = sorted(path.name[:-12] for path in (run / "results").glob("transfer-mine-*.json"))
    assert names == ["transfer-mine", "transfer-mine-weights-pixels"]
    code, _, err = call("report", run)
    assert code == 0, err
    page = (run / "report.html").read_text()
    assert "transfer" in page and "transfer-mine on" not in page


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), r"type --root FOLDER"),
        (("--root", "nowhere"), r"--root: nowhere is no folder"),
        (
            ("--root", ".", "--only", "cifar10,flowers"),
            r"--only: got flowers; need some of food101",
        ),
        (("--add", "mine"), r"--add: got mine; need NAME=SOURCE"),
        (("--add", "pets=x"), r"--add: got pets=x; need NAME=SOURCE with a new name"),
        (("--root", ".", "--only", "pets"), r"none of pets is under"),
        (("--add", "mine=nowhere.npz"), r"nowhere.npz: nothing there"),
    ],
)
def test_mistakes_are_named_with_what_to_type(words, message, call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = call("evaluate", "transfer", "pixels", *words)
    assert code == 2 and not out and re.search(message, err), err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "transfer pixels --root . --data sample",
            "--data: is for knn, linear, semi, finetune, cluster, rank; got",
        ),
        ("transfer pixels --root . --rois 4", "--rois: is for detect; got transfer"),
        ("detect pixels --root . --image-size 9", "--image-size: is for .*transfer; got detect"),
        ("knn pixels --data sample --add a=b", "--add: is for transfer; got knn"),
        ("cluster pixels --data sample --lr 1", "--lr: is for linear, semi, finetune, detect; got"),
        ("transfer detect pixels --root .", "a --root of their own each: type two commands"),
    ],
)
def test_an_option_that_nothing_reads_is_refused(words, message, call):
    code, out, err = call("evaluate", *words.split())
    assert code == 2 and not out and re.search(message, err), err


def test_a_root_is_for_protocols_that_have_one(call):
    code, _, err = call("evaluate", "knn", "pixels", "--data", "sample", "--root", ".")
    assert code == 2 and "--root: is for transfer, detect; got knn" in err


def test_several_processes_are_for_detect(call, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, _, err = call("evaluate", "transfer", "pixels", "--root", ".")
    assert code == 2 and "2 processes were started" in err and "leave torchrun out" in err
