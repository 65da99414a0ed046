"""Detection on tiny VOC folders: metrics, stored detections, seeds, and the command."""

import dataclasses
import json
import math
import re
import signal
import statistics
import time

import numpy as np
import pytest
import torch

from meanshift.config import SampleSpec
from meanshift.data.voc import read_voc
from meanshift.evaluation.detection import evaluate as protocol
from meanshift.evaluation.detection.evaluate import run_detector
from meanshift.evaluation.detection.model import build_detector
from meanshift.evaluation.detection.settings import DetectionSettings
from meanshift.models.weights import fingerprint
from meanshift.ops.average_precision import Detections, GroundTruth
from meanshift.runtime import checkpoint, distributed
from tests.support.detectors import (
    TINY,
    TINY_OPTIONS,
    detection_context,
    small_backbone,
    trained_detector,
    training_inputs,
    write_weights,
)
from tests.support.exact import assert_same
from tests.support.processes import run_processes, start_processes
from tests.support.voc import truncate_images, write_voc


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_voc(tmp_path_factory.mktemp("made") / "heads" / "VOCdevkit")


@pytest.fixture(scope="module")
def sets(root):
    return read_voc(root)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return write_weights(tmp_path_factory.mktemp("weights") / "small.pt")


@pytest.fixture
def command(weights, root):
    """command(out, *options, root=...) -> the words of `evaluate detect`."""

    def words(out, *options, root=root):
        data = ("--root", str(root), "--out", str(out), "--device", "cpu")
        return ["evaluate", "detect", str(weights), *data, *map(str, options)]

    return words


def image_in_training(root, position=0):
    """The name of the image at a position in training."""
    train, _ = read_voc(root)
    index, *_ = training_inputs(train, TINY)[position]
    return train.images[index].title.rpartition("/")[2]


# The same bits after a kill


def outcome(out):
    """What must not depend on interruptions: the last checkpoint, the metrics, and the card."""
    (folder,) = (out / "detectors").iterdir()
    state, unreadable = checkpoint.latest(folder)
    (path,) = (out / "results").glob("*.json")
    result = json.loads(path.read_text())
    names = ("settings", "weights", "images", "sizes", "unreadable")
    return state, unreadable, result["metrics"], {name: result["card"][name] for name in names}


@pytest.mark.slow
def test_a_killed_command_typed_again_ends_in_the_same_bits(call, command, tmp_path):
    options = ("--iterations", 24, "--size", 64, "--batch-size", 2, "--rois", 8)
    uninterrupted, killed = tmp_path / "uninterrupted", tmp_path / "killed"
    code, _, err = call(*command(uninterrupted, *options))
    assert code == 0, err
    with start_processes(1, command(killed, *options, "--workers", 2), tmp_path / "first") as group:
        while not list(killed.glob("detectors/*/step-00000001?.pt")):  # of 24
            assert group.processes[0].poll() is None, group.output
            time.sleep(0.005)
        group.signal(signal.SIGKILL)
        assert group.wait() == [-signal.SIGKILL]
    (folder,) = (killed / "detectors").iterdir()
    assert 10 <= checkpoint.latest(folder)[0]["step"] < 24
    assert not (killed / "results").exists()
    code, _, err = call(*command(killed, *options))
    assert code == 0, err
    assert_same(outcome(killed), outcome(uninterrupted))
    state, unreadable, metrics, card = outcome(uninterrupted)
    assert (state["step"], unreadable, len(metrics)) == (24, [], 6)
    losses = state["log"]["losses"]
    assert list(losses) == list(range(1, 25)) and card["unreadable"] == 0
    assert list(map(float, card["settings"]["loss"][0].values())) == list(losses.values())


def test_a_finished_training_is_not_done_again(sets, tmp_path, monkeypatch):
    first = protocol.evaluate(detection_context(tmp_path), *sets, settings=TINY)
    monkeypatch.setattr(checkpoint, "save", None)
    monkeypatch.setattr(torch.optim.SGD, "step", None)
    again = protocol.evaluate(detection_context(tmp_path), *sets, settings=TINY)
    assert again.metrics == first.metrics and again.settings == first.settings


# Unreadable images


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_an_unreadable_training_image_is_counted(tmp_path, workers):
    root = write_voc(tmp_path / "pollen")
    name = image_in_training(root)
    truncate_images(root, name)
    sets = read_voc(root)
    message = rf"1 images cannot be read.*VOC2007/{name} \(OSError.*truncated"
    for _ in range(2):  # the second time nothing is left to train
        context = detection_context(tmp_path, workers=workers)
        with pytest.warns(UserWarning, match=message):
            result = protocol.evaluate(context, *sets, settings=TINY)
        assert result.card["unreadable"] == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_an_unreadable_test_image_is_left_out_and_counted(tmp_path, workers):
    root = write_voc(tmp_path / "pollen", test=4)
    truncate_images(root, "000101")
    train, test = read_voc(root)
    context = detection_context(tmp_path, workers=workers)
    detector = build_detector(small_backbone(), 2, settings=TINY)
    detections, unreadable = run_detector(context, detector, test, "detect")
    assert sorted(detections) == [0, 2, 3] and list(unreadable) == ["VOC2007/000101"]
    with pytest.warns(UserWarning, match=r"1 images cannot be read.*VOC2007/000101 \(OSError"):
        result = protocol.evaluate(context, train, test, settings=TINY)
    assert result.card["unreadable"] == 1
    titles = [f"VOC2007/{name}" for name in ("000100", "000102", "000103")]
    assert sorted(result.arrays["titles"].tolist()) == titles


@pytest.mark.parametrize("split", ["trainval", "test"])
def test_more_than_a_twentieth_of_unreadable_images_is_an_error(call, command, tmp_path, split):
    root = write_voc(tmp_path / "pollen", test=11)
    names = ["000103", "000110"]
    if split == "trainval":
        names = [image_in_training(root, position) for position in (0, 1)]
    truncate_images(root, *names)
    code, out, err = call(*command(tmp_path, *TINY_OPTIONS, root=root))
    assert (code, out) == (2, "")
    pattern = rf"meanshift: VOC 07 {split}: 2 of (6|11) images cannot be read.*/{names[0]} .*5%"
    assert re.search(pattern, err), err


@pytest.mark.parametrize("split", ["trainval", "test"])
def test_a_set_without_a_readable_image_is_an_error(call, command, tmp_path, split):
    root = write_voc(tmp_path / "pollen", train=3)
    truncate_images(root, *(root / f"VOC2007/ImageSets/Main/{split}.txt").read_text().split())
    code, out, err = call(*command(tmp_path, *TINY_OPTIONS, root=root))
    assert (code, out) == (2, "")
    assert re.search(rf"meanshift: VOC 07 {split}: .*images? can(not)? be read", err), err


def test_an_error_in_a_worker_is_reported_and_ends_the_command(command, tmp_path):
    """In a process of its own: a process that waits for its workers forever must not be this."""
    root = write_voc(tmp_path / "pollen", train=3)
    truncate_images(root, "000000", "000001", "000002")
    words = command(tmp_path, *TINY_OPTIONS, "--workers", 2, root=root)
    codes, group = run_processes(1, words, tmp_path / "output")
    assert codes == [2], group.output
    assert "meanshift: VOC 07 trainval: " in group.output and "Traceback" not in group.output


# A detector that learns


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("learned")
    train, test = read_voc(write_voc(folder / "pollen", 24, 12, sides=(34, 56)))
    settings = DetectionSettings.scaled(80, size=64, batch_size=4, rois=16, lr=0.08)
    context = detection_context(folder)
    before = fingerprint(context.backbone)
    result = protocol.evaluate(context, train, test, settings=settings)
    assert fingerprint(context.backbone) == before and not context.backbone.training
    return context, train, test, settings, result


@pytest.mark.slow
def test_solid_rectangles_are_found(learned):
    _, _, test, _, result = learned
    metrics = result.metrics
    assert metrics["AP50"] > 30 and metrics["AP50 (COCO)"] > 30
    assert metrics["AP"] < metrics["AP50"]
    (by_class,) = result.settings["AP50 by class"]
    assert list(by_class) == ["lime", "plum"] == test.classes
    assert statistics.fmean(by_class.values()) == pytest.approx(metrics["AP50"])
    (losses,) = result.settings["loss"]
    assert list(losses) == list(range(4, 81, 4)) and losses[4] > 1.5 * losses[80] > 0


def detect_one_by_one(learned):
    """Detections and ground truth of all test images, with the last checkpoint."""
    context, train, test, settings, _ = learned
    detector, _, _ = trained_detector(context, train, settings)
    detector.eval()
    detections, truths = [], []
    for index, image in enumerate(test.images):
        with torch.no_grad():
            (found,) = detector([test.read(index) / 255])
        detections.append(Detections(found["boxes"], found["scores"], found["labels"] - 1))
        truths.append(GroundTruth(image.boxes, image.labels, image.difficult))
    return detections, truths


def test_the_metrics_are_those_of_the_detections(learned):
    metrics = learned[-1].metrics
    detections, truths = detect_one_by_one(learned)
    for rule, suffix in (("voc07", ""), ("coco", " (COCO)")):
        expected = protocol.average_precision(detections, truths, classes=2, rule=rule)
        for name in ("AP", "AP50", "AP75"):
            value = getattr(expected, name.lower())
            assert metrics[f"{name}{suffix}"] == pytest.approx(value, abs=1e-9)
    names = ["AP", "AP50", "AP75"]
    assert list(metrics) == names + [f"{name} (COCO)" for name in names]


def test_objects_and_detections_are_stored_to_be_drawn(learned):
    context, _, test, _, result = learned
    detections, truths = detect_one_by_one(learned)
    with np.load(context.save(result).with_suffix(".npz")) as stored:
        arrays = {name: stored[name] for name in stored.files}
    assert arrays["classes"].tolist() == ["lime", "plum"]
    titles = arrays["titles"].tolist()
    assert sorted(titles) == sorted(image.title for image in test.images)
    index_of = {image.title: index for index, image in enumerate(test.images)}
    order = [index_of[title] for title in titles]
    assert arrays["files"].tolist() == [str(test.images[index].file) for index in order]
    for kind, values in (("truth", truths), ("detection", detections)):
        counts = arrays[f"{kind}_counts"].tolist()
        assert counts == [len(values[index].labels) for index in order]
        for name in ("boxes", "labels", "difficult" if kind == "truth" else "scores"):
            parts = np.split(arrays[f"{kind}_{name}"], np.cumsum(counts)[:-1])
            for index, part in zip(order, parts, strict=True):
                np.testing.assert_allclose(part, getattr(values[index], name), atol=1e-4)
    assert sum(arrays["detection_counts"]) > 0


def test_at_most_24_images_are_stored(tmp_path):
    _, test = read_voc(write_voc(tmp_path, test=30))
    empty = Detections(torch.zeros(0, 4), torch.zeros(0), torch.zeros(0, dtype=torch.int64))
    arrays = protocol._arrays(test, dict.fromkeys(range(30), empty))
    assert len(set(arrays["titles"].tolist())) == 24 == len(arrays["truth_counts"])
    assert len(arrays["detection_boxes"]) == 0


def test_the_card_contains_what_was_done(learned):
    context, train, test, settings, result = learned
    name = f"detect-80-at-64-batch-4-rois-16-lr-0.08-{train.folder_name}"
    path = context.save(result)
    assert path.parent == context.output_dir / "results"
    assert re.fullmatch(rf"{re.escape(name)}-[0-9a-f]{{6}}\.json", path.name)
    content = json.loads(path.read_text())
    card, details = content["card"], content["card"]["settings"]
    assert content["metrics"] == result.metrics
    assert card["protocol"] == name and card["image_size"] == 64
    assert card["sizes"] == {"train": 24, "test": 12} == card["objects"]
    assert card["classes"] == ["lime", "plum"] and card["unreadable"] == 0
    assert card["data"] == f"{train.folder_name}: VOC 07 trainval, evaluated on VOC 07 test"
    assert card["weights"] == fingerprint(small_backbone())
    assert card["images"] == {"train": train.fingerprint(), "test": test.fingerprint()}
    assert card["resize"] == "short side 64, long side at most 107" and card["seed"] == 0
    assert {"versions", "date", "command", "device", "precision", "encoder"} <= card.keys()
    expected = dataclasses.asdict(settings)
    assert {key: details[key] for key in expected} == expected
    assert details["short sides in training"] == settings.train_sizes
    assert details["seeds"] == [0]
    assert details["by seed"] == {name: [value] for name, value in result.metrics.items()}
    assert (details["processes"], details["batch norm"]) == ([[1]], "one process")
    assert details["proposals"] == settings.proposals and card["root"] == str(train.root)


# Seeds, processes, and the paper's table


@pytest.mark.slow
def test_several_seeds_give_the_mean_and_the_sample_std(sets, tmp_path, monkeypatch):
    ap = {3: 10.0, 4: 20.0, 5: 60.0}
    run_trial = protocol.run_trial

    def known_metrics(context, train, test, settings, seed):
        trial = run_trial(context, train, test, settings, seed)
        return dataclasses.replace(trial, metrics={"AP": ap[seed], "AP50": 2 * ap[seed]})

    monkeypatch.setattr(protocol, "run_trial", known_metrics)
    context = detection_context(tmp_path, seed=3)
    result = protocol.evaluate(context, *sets, settings=TINY, seeds=3)
    std = math.sqrt((20**2 + 10**2 + 30**2) / 2)
    assert result.metrics == pytest.approx(
        {"AP": 30, "AP std": std, "AP50": 60, "AP50 std": 2 * std}
    )
    settings = result.settings
    assert settings["by seed"] == {"AP": [10, 20, 60], "AP50": [20, 40, 120]}
    assert settings["seeds"] == [3, 4, 5] and len(settings["AP50 by class"]) == 3
    alone = detection_context(tmp_path / "alone")
    losses = [trained_detector(alone, sets[0], seed=seed)[1].losses for seed in ap]
    assert settings["loss"] == losses and len(set(map(str, losses))) == 3


def test_one_seed_has_no_std_and_none_is_refused(sets, tmp_path):
    result = protocol.evaluate(detection_context(tmp_path), *sets, settings=TINY)
    assert not any("std" in name for name in result.metrics)
    with pytest.raises(ValueError, match="got 0 seeds, need 1 or more"):
        protocol.evaluate(detection_context(tmp_path), *sets, settings=TINY, seeds=0)


def test_weights_for_other_images_than_rgb_are_refused(sets, tmp_path, monkeypatch):
    context = detection_context(tmp_path)
    gray = SampleSpec(channels=1, mean=(0.5,), std=(0.5,))
    monkeypatch.setattr(type(context.weights), "sample_spec", gray)
    with pytest.raises(ValueError, match=r"detect: .* takes images of 1 channel, .* for RGB"):
        protocol.evaluate(context, *sets, settings=TINY)


def test_a_batch_must_have_an_image_for_each_process(sets, tmp_path, monkeypatch):
    monkeypatch.setattr(distributed, "world_size", lambda: 3)
    with pytest.raises(ValueError, match=r"3 processes share batches of 2 images; .*batch-size"):
        protocol.evaluate(detection_context(tmp_path), *sets, settings=TINY)
    assert not (tmp_path / "detectors").exists()


def test_the_rows_of_the_paper():
    ap50_ap_ap75 = {  # in the order of the paper's columns
        "Supervised": (81.3, 53.5, 58.8),
        "From scratch": (60.2, 33.8, 33.1),
        "SimCLR, 200, symmetric": (81.8, 55.5, 61.4),
        "MoCo v2, 200, symmetric": (82.3, 57.0, 63.3),
        "BYOL, 200, symmetric": (81.4, 55.3, 61.1),
        "SwAV, 200, symmetric": (81.5, 55.4, 61.4),
        "SimSiam, 200, symmetric": (82.4, 57.0, 63.7),
        "MoCo v2, 800": (82.5, 57.4, 64.0),
        "InvP, 800": (81.8, 56.2, 61.5),
        "MoCo v2, 200": (82.4, 57.0, 63.6),
        "CO2, 200": (82.7, 57.2, 64.1),
        "BYOL-asym, 200": (81.9, 56.8, 63.5),
        "MSF, 200": (82.2, 56.7, 63.4),
        "MSF w/s, 200": (82.2, 56.6, 63.1),
    }
    assert protocol.paper_rows() == {
        name: {"AP": ap, "AP50": ap50, "AP75": ap75}
        for name, (ap50, ap, ap75) in ap50_ap_ap75.items()
    }


# The command


def table_rows(out):
    return [re.split(r"  +", line.strip()) for line in out.splitlines() if "." in line]


def test_the_command_prints_our_row_and_the_papers(call, command, weights, tmp_path):
    code, out, err = call(*command(tmp_path / "out", *TINY_OPTIONS))
    assert code == 0, err
    name = "detect-2-at-64-rois-8-heads"
    assert out.startswith(f"\n{name} on VOC 07 test of heads\n")
    header, *lines = re.findall(r"^  .*$", out, re.MULTILINE)
    columns = ["AP", "AP50", "AP75"]
    assert re.split(r"  +", header.strip()) == columns + [f"{column} (COCO)" for column in columns]
    rows = [re.split(r"  +", line.strip()) for line in lines]
    (file,) = (tmp_path / "out/results").glob(f"{name}-*.json")
    metrics = json.loads(file.read_text())["metrics"]
    assert rows[0] == [str(weights), *(f"{value:.2f}" for value in metrics.values())]
    assert rows[1:] == [
        [f"{title} *", *(f"{value:.2f}" for value in row)] for title, row in protocol.PAPER.items()
    ]
    assert "* the paper's table: ResNet-50" in out
    data = "heads, VOC 07 trainval: 6 images; VOC 07 test: 3; lime, plum; batches of 2 at 38 to 64"
    assert data in err
    image = file.with_suffix(".png")
    assert image.is_file() and f"image: {image}: " in err
    assert re.search(r"\.png: \d of 3 objects found", err)


def test_a_short_run_draws_no_bar_in_a_log(call, command, tmp_path):
    code, _, err = call(*command(tmp_path / "out", *TINY_OPTIONS))
    assert code == 0 and "it/s" not in err and "\r" not in err, err


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_two_weights_are_compared_on_chosen_classes(call, command, weights, tmp_path):
    other = write_weights(tmp_path / "other.pt", 1)
    options = ("--compare", other, "--classes", "plum")
    code, out, err = call(*command(tmp_path / "out", *TINY_OPTIONS, *options))
    assert code == 0, err
    assert [row[0] for row in table_rows(out)][:2] == [str(weights), str(other)]
    cards = [json.loads(path.read_text())["card"] for path in tmp_path.rglob("results/*.json")]
    assert len({card["weights"] for card in cards}) == 2
    assert all(card["classes"] == ["plum"] for card in cards)
    assert all(card["objects"] == {"train": 3, "test": 1} for card in cards)
    assert re.search(r"warning: VOC 07 trainval: 3 boxes of classes", err), err


@pytest.mark.slow
def test_other_images_and_seeds_have_results_of_their_own(call, command, tmp_path):
    one, other = (write_voc(tmp_path / f"{place}/moss/VOCdevkit") for place in "ab")
    for root, options in ((one, ()), (other, ()), (one, ("--seed", 3)), (one, ("--seeds", 2))):
        code, out, err = call(*command(tmp_path / "out", *TINY_OPTIONS, *options, root=root))
        assert code == 0, err
    names = [path.stem for path in (tmp_path / "out/results").glob("*.json")]
    assert sorted(name.partition("-weights-small-")[0] for name in names) == [
        "detect-2-at-64-rois-8-moss",
        "detect-2-at-64-rois-8-moss",
        "detect-2-at-64-rois-8-moss-2-seeds",
        "detect-2-at-64-rois-8-moss-seed3",
    ]
    assert re.search(r"small\.pt +\d+\.\d\d ± \d+\.\d\d ", out)


def test_bfloat16_works_too(call, command, tmp_path):
    code, _, err = call(*command(tmp_path / "out", *TINY_OPTIONS, "--precision", "bfloat16"))
    assert code == 0, err
    results = tmp_path / "out/results"
    (file,) = results.glob("detect-2-at-64-rois-8-heads-precision-bfloat16-*.json")
    assert json.loads(file.read_text())["card"]["precision"] == "torch.bfloat16"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("detect WEIGHTS", r"where are the images\? .*--root VOCDEVKIT; need VOCdevkit/VOC2007"),
        ("detect WEIGHTS --root EMPTY", r"EMPTY: no VOC2007 in it; need VOCdevkit/VOC2007"),
        ("detect WEIGHTS --root NOWHERE", r"NOWHERE: no folder; need VOCdevkit/VOC2007 .*\.tar"),
        ("detect WEIGHTS --root ROOT --classes cow", "lack cow and have lime, plum"),
        ("detect WEIGHTS --root ROOT --iterations 0", "got --iterations 0, .*need 1 or more"),
        ("detect WEIGHTS --root ROOT --size 8", "--size 8, .*a size of 32 or more"),
        ("detect WEIGHTS --root ROOT --seeds 0 --iterations 1 --size 64", "0 seeds, need 1"),
        ("detect pixels --root ROOT --iterations 1", "needs a ResNet, .*got RawPixels"),
        ("detect WEIGHTS --root ROOT --ks 3", "--ks: is for knn; got detect"),
        ("knn WEIGHTS --root ROOT", "--root: is for transfer, detect; got knn"),
        ("detect --root ROOT", "got detect; need one or more of .*then what to evaluate"),
    ],
)
def test_mistakes_are_named_with_what_to_type(
    call, weights, root, tmp_path, monkeypatch, words, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "EMPTY").mkdir()
    arguments = words.replace("WEIGHTS", str(weights)).replace("ROOT", str(root)).split()
    code, out, err = call("evaluate", *arguments, "--device", "cpu")
    assert (code, out) == (2, "")
    assert re.search(rf"^meanshift: .*{message}", err, re.MULTILINE), err


@pytest.mark.slow
def test_two_processes_train_and_evaluate_together_and_report_once(command, tmp_path):
    root, out = write_voc(tmp_path / "pollen", 6, 5), tmp_path / "out"
    truncate_images(root, image_in_training(root, 1))  # in the part of the second process only
    codes, group = run_processes(2, command(out, *TINY_OPTIONS, root=root), tmp_path / "output")
    output = group.output
    assert codes == [0, 0], output
    assert output.count("on VOC 07 test") == output.count("MSF w/s, 200 *") == 1
    assert output.count(f"\n  {command(out)[2]}  ") == 1  # a row of the table
    assert output.count("card: ") == 1 and output.count("VOC 07 test: 5;") == 1
    assert " of 5 objects found" in output
    (path,) = (out / "results").glob("*.json")
    card = json.loads(path.read_text())["card"]
    assert card["settings"]["processes"] == [[2]] and card["sizes"] == {"train": 6, "test": 5}
    assert card["settings"]["batch norm"] == "synchronized"
    assert output.count("1 images cannot be read") == 1, output
    assert card["unreadable"] == 1
