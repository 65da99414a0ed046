"""Detection on tiny VOC folders: what is shown, exact resumption, the figures, the command."""

import dataclasses
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from meanshift import config
from meanshift.data.voc import read_voc
from meanshift.evaluation.context import EncoderContext
from meanshift.evaluation.detection import evaluate as protocol
from meanshift.evaluation.detection import train as detecting
from meanshift.evaluation.detection.model import DetectionSettings, build_detector
from meanshift.evaluation.detection.train import detect, learn
from meanshift.models.encoder import build_backbone
from meanshift.models.weights import Weights, export, fingerprint
from meanshift.ops.average_precision import Detections, GroundTruth
from meanshift.runtime import checkpoint, distributed
from meanshift.viz import detections
from tests.support.exact import assert_same

COLORS = {"lime": (40, 210, 30), "plum": (210, 30, 160)}
SMALL = config.Encoder(name="resnet10", stem="small-stride2", width=0.125)
TINY = DetectionSettings.of(3, size=64, batch_size=2, rois=8)
CPU = torch.device("cpu")


def write_voc(root, train=6, test=3, *, sides=(26, 44), suffix=".jpg"):
    """One solid rectangle an image, lime and plum in turn, on gray noise."""
    random, folder = np.random.default_rng(0), root / "VOC2007"
    for part in ("ImageSets/Main", "JPEGImages", "Annotations"):
        (folder / part).mkdir(parents=True)
    for split, count, first in (("trainval", train, 0), ("test", test, 100)):
        names = [f"{first + index:06d}" for index in range(count)]
        (folder / f"ImageSets/Main/{split}.txt").write_text("\n".join(names) + "\n")
        for index, name in enumerate(names):
            high, wide = random.integers(64, 97, 2)
            pixels = random.integers(90, 166, (high, wide, 3), dtype=np.uint8)
            box_high, box_wide = random.integers(*sides, 2)
            top, left = random.integers(0, high - box_high), random.integers(0, wide - box_wide)
            label = sorted(COLORS)[index % 2]
            pixels[top : top + box_high, left : left + box_wide] = COLORS[label]
            Image.fromarray(pixels).save(folder / f"JPEGImages/{name}{suffix}", quality=95)
            corners = (left + 1, top + 1, left + box_wide, top + box_high)
            placed = zip(("xmin", "ymin", "xmax", "ymax"), corners, strict=True)
            box = "".join(f"<{side}>{value}</{side}>" for side, value in placed)
            (folder / f"Annotations/{name}.xml").write_text(
                f"<annotation><object><name>{label}</name><bndbox>{box}</bndbox></object>"
                f"</annotation>"
            )
    return root


def truncate(root, *names):
    """The header stays: that an image cannot be read is found out when it is."""
    for name in names:
        file = root / f"VOC2007/JPEGImages/{name}.jpg"
        file.write_bytes(file.read_bytes()[:900])


def backbone(seed=0):
    torch.manual_seed(seed)
    return build_backbone(SMALL)[0].eval()


def judge(home, *, seed=0, workers=0, network=None, **options):
    weights = Weights("made", network or backbone(), "made in a test", 64, home)
    return EncoderContext(weights, seed=seed, workers=workers, device="cpu", **options)


def trained(judged, train, recipe=TINY, seed=0):
    """A detector after its iterations, what `learn` told, and its last checkpoint."""
    detector = build_detector(judged.backbone, len(train.classes), recipe=recipe, seed=seed)
    told = learn(judged, detector, train, recipe, seed)
    state, wrong = checkpoint.latest(detecting._folder(judged, train, recipe, seed))
    assert not wrong
    return detector, told, state


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_voc(tmp_path_factory.mktemp("made") / "heads" / "VOCdevkit")


@pytest.fixture(scope="module")
def sets(root):
    return read_voc(root)


@pytest.fixture
def as_one_of(monkeypatch):
    """This process takes itself for one of several, which talk to nobody."""

    def pretend(rank, world):
        monkeypatch.setattr(distributed, "rank", lambda: rank)
        monkeypatch.setattr(distributed, "world_size", lambda: world)

    return pretend


# Which images, in which order, mirrored or not


def shown(train, recipe, seed=0, *, start=0, workers=0):
    """By place: the image's index, its pixels and its target as the detector gets them."""
    found = {}
    rank, world, size = distributed.rank(), distributed.world_size(), recipe.batch_size
    for step, samples in detecting._batches(train, recipe, seed, start, recipe.iterations, workers):
        ready = detecting._prepared(train, samples, recipe, seed, step, CPU)
        for at, (sample, *one) in enumerate(zip(samples, *ready, strict=True)):
            found[step * size + rank + world * at] = (sample[1], *one)
    return found


def test_every_image_comes_once_an_epoch_in_a_new_order(sets):
    train, recipe = (
        sets[0],
        DetectionSettings.of(9, size=64, batch_size=4, rois=8),
    )  # 36 places, 6 epochs
    places = shown(train, recipe, 5)
    assert list(places) == list(range(36))
    order = [index for index, *_ in places.values()]
    epochs = [order[at : at + 6] for at in range(0, 36, 6)]
    assert all(sorted(epoch) == list(range(6)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 3
    assert [index for index, *_ in shown(train, recipe, 6).values()] != order


@pytest.mark.parametrize("world", [2, 3, 4])
def test_any_number_of_processes_shows_the_same_batches(sets, as_one_of, world):
    train, recipe = sets[0], DetectionSettings.of(5, size=64, batch_size=4, rois=8)
    alone, together = shown(train, recipe, 1), {}
    for rank in range(world):
        as_one_of(rank, world)
        share = shown(train, recipe, 1)
        assert not share.keys() & together.keys()
        together |= share
    assert_same(dict(sorted(together.items())), alone)


def test_a_later_start_and_other_workers_show_the_same(sets):
    train, recipe = sets[0], DetectionSettings.of(6, size=64, batch_size=3, rois=8)
    whole = shown(train, recipe, 2)
    late = shown(train, recipe, 2, start=4, workers=2)
    assert_same(late, {place: one for place, one in whole.items() if place >= 12})
    assert len(late) == 6


def test_a_mirrored_box_lies_on_the_mirrored_object(tmp_path):
    train, _ = read_voc(write_voc(tmp_path, suffix=".png"))
    mirrored = []
    recipe = DetectionSettings.of(10, size=64, batch_size=6, rois=8)
    for index, image, target in shown(train, recipe).values():
        (box,), (label,) = target["boxes"].int().tolist(), target["labels"].tolist()
        assert target["boxes"].dtype == torch.float32 and image.dtype == torch.float32
        assert label == int(train.images[index].labels) + 1  # the first is the background
        left, top, right, bottom = box
        color = torch.tensor(COLORS[train.classes[label - 1]])[:, None, None] / 255
        inside = torch.zeros(image.shape[1:], dtype=torch.bool)
        inside[top:bottom, left:right] = True
        assert torch.equal((image == color).all(0), inside)
        as_it_is = torch.equal(image, train.read(index) / 255)
        assert as_it_is == torch.equal(target["boxes"], train.images[index].boxes)
        mirrored.append(not as_it_is)
    assert 15 < sum(mirrored) < 45  # of 60
    other = shown(train, recipe, 1)
    assert [torch.equal(p, train.read(i) / 255) for i, p, _ in other.values()] != [
        not flip for flip in mirrored
    ]


# Exact resumption


LONG = ("--iterations", "24", "--size", "64", "--batch-size", "2", "--rois", "8")


def write_weights(path, seed=0):
    """A file of weights, as a user names it."""
    settings = config.Config(data=config.Data(image_size=64), encoder=SMALL)
    return export(Weights("made", backbone(seed), "made", 64, path.parent, config=settings), path)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return write_weights(tmp_path_factory.mktemp("weights") / "small.pt")


@pytest.fixture
def type_it(weights, root):
    """The words of a command, for this process or for another one."""

    def words(out, *more, root=root):
        return [
            *("evaluate", "detect", str(weights), "--root", str(root), "--out", str(out)),
            *("--device", "cpu", *map(str, more)),
        ]

    return words


def outcome(out):
    """What must not depend on interruptions: the last checkpoint, the figures, and the losses."""
    (folder,) = (out / "detectors").iterdir()
    state, wrong = checkpoint.latest(folder)
    (result,) = (out / "results").glob("*.json")
    held = json.loads(result.read_text())
    kept = ("settings", "weights", "images", "sizes", "unreadable")
    return state, wrong, held["figures"], {name: held["card"][name] for name in kept}


def run_it(words, *before, timeout=300):
    return subprocess.run(
        [sys.executable, *before, "-m", "meanshift", *words], timeout=timeout,
        capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def test_a_killed_command_typed_again_ends_in_the_same_bits(call, type_it, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    code, _, err = call(*type_it(whole, *LONG))
    assert code == 0, err
    process = subprocess.Popen(
        [sys.executable, "-m", "meanshift", *type_it(killed, *LONG, "--workers", 2)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 120
    while not list(killed.glob("detectors/*/step-00000001?.pt")):  # of 24
        assert process.poll() is None and time.monotonic() < deadline, "it does not get on"
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait(timeout=60) == -signal.SIGKILL
    (folder,) = (killed / "detectors").iterdir()
    assert 10 <= checkpoint.latest(folder)[0]["step"] < 24
    assert not (killed / "results").exists()
    code, _, err = call(*type_it(killed, *LONG))
    assert code == 0, err
    assert_same(outcome(killed), outcome(whole))
    state, wrong, figures, card = outcome(whole)
    assert (state["step"], wrong, len(figures)) == (24, [], 6)
    assert list(state["told"]["losses"]) == list(range(1, 25)) and card["unreadable"] == 0
    assert list(map(float, card["settings"]["loss"][0].values())) == list(
        state["told"]["losses"].values()
    )


def test_workers_change_no_bit(sets, tmp_path):
    states = [
        trained(judge(tmp_path / str(workers), workers=workers), sets[0])[2] for workers in (0, 2)
    ]
    assert_same(*states)
    assert states[0]["step"] == 3 and set(states[0]["told"]["losses"]) == {1, 2, 3}


def test_the_callers_randomness_is_left_alone_and_changes_nothing(sets, tmp_path):
    states = []
    for seed in (1, 2):
        judged = judge(tmp_path / str(seed))
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        states.append(trained(judged, sets[0])[2])
        assert torch.equal(torch.get_rng_state(), before)
    assert_same(*states)


def test_batch_norms_are_measured_anew_with_the_last_weights(sets, tmp_path):
    """The plain means over the batches that would come next, each drawn at its own address."""
    train, recipe = sets[0], dataclasses.replace(TINY, iterations=20)
    assert recipe.settling == 3
    detector, _, state = trained(judge(tmp_path), train, recipe)
    norms = [
        (name, module)
        for name, module in detector.named_modules()
        if isinstance(module, nn.BatchNorm2d)
    ]
    seen = {name: [] for name, _ in norms}
    reference = build_detector(backbone(), 2, recipe=recipe)
    reference.load_state_dict(state["detector"])
    for name, module in reference.named_modules():
        if name in seen:
            module.register_forward_pre_hook(
                lambda _, given, name=name: seen[name].append(given[0])
            )
    reference.train()
    later = detecting._batches(train, recipe, 0, 20, 23, 0)
    with torch.random.fork_rng(), torch.no_grad():
        for step, samples in later:
            reference(*detecting._prepared(train, samples, recipe, 0, step, CPU))
    assert len(norms) == 13
    for name, norm in norms:
        assert len(seen[name]) == 3 and norm.momentum == 0.1
        for held, each in (
            (norm.running_mean, [x.mean((0, 2, 3)) for x in seen[name]]),
            (norm.running_var, [x.var((0, 2, 3)) for x in seen[name]]),
        ):
            torch.testing.assert_close(held, torch.stack(each).mean(0), rtol=1e-3, atol=1e-4)
    weights, last = dict(detector.named_parameters()), state["detector"]
    assert all(torch.equal(value, last[name]) for name, value in weights.items())


def test_a_finished_training_is_not_done_again(sets, tmp_path, monkeypatch):
    first = protocol.evaluate(judge(tmp_path), *sets, recipe=TINY)
    monkeypatch.setattr(checkpoint, "save", None)
    monkeypatch.setattr(torch.optim.SGD, "step", None)
    again = protocol.evaluate(judge(tmp_path), *sets, recipe=TINY)
    assert again.figures == first.figures and again.settings == first.settings


def test_a_damaged_newest_checkpoint_is_told_and_the_one_before_is_used(sets, tmp_path):
    detector, _, _ = trained(judge(tmp_path), sets[0])
    folder = detecting._folder(judge(tmp_path), sets[0], TINY, 0)
    assert [file.name for file in sorted(folder.iterdir())] == [
        "step-000000002.pt",
        "step-000000003.pt",
    ]
    newest = folder / "step-000000003.pt"
    newest.write_bytes(newest.read_bytes()[:1000])
    with pytest.warns(UserWarning, match=r"step-000000003\.pt.*; an earlier one is used"):
        again, told, state = trained(judge(tmp_path), sets[0])
    assert state["step"] == 3 and set(told.losses) == {1, 2, 3}
    assert_same(dict(again.state_dict()), dict(detector.state_dict()))


def test_other_settings_weights_or_images_have_other_checkpoints(sets, tmp_path):
    train, home = sets[0], tmp_path / "home"

    def folder(judged=None, images=train, recipe=TINY, seed=0):
        return detecting._folder(judged or judge(home), images, recipe, seed)

    changed = dataclasses.replace(TINY, lr=0.5)
    fewer = dataclasses.replace(train, images=train.images[:-1])
    others = [
        folder(),
        folder(seed=1),
        folder(recipe=changed),
        folder(recipe=dataclasses.replace(TINY, iterations=4)),
        folder(images=fewer),
        folder(judge(home, network=backbone(1))),
        folder(judge(home, precision="bfloat16")),
    ]
    assert len(set(others)) == len(others)
    assert folder(judge(home, workers=2, seed=3)) == folder()  # which change no bit
    assert all(other.parent == home / "detectors" for other in others)


# What goes wrong


def test_a_loss_that_is_no_number_stops_with_what_to_try(sets, tmp_path):
    recipe = DetectionSettings.of(20, size=64, batch_size=2, rois=8, lr=1e20)
    with pytest.raises(ValueError, match=r"the loss is (nan|inf) after \d+ iter.*smaller --lr"):
        trained(judge(tmp_path), sets[0], recipe)


def first_shown(root, place=0):
    """The name of the image that training meets at a place."""
    train, _ = read_voc(root)
    return train.images[shown(train, TINY)[place][0]].title.rpartition("/")[2]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_unreadable_image_to_train_on_is_replaced_and_counted(tmp_path, workers):
    root = write_voc(tmp_path / "pollen")
    order = [index for index, *_ in shown(read_voc(root)[0], TINY).values()]
    bad = order[0]
    truncate(root, f"{bad:06d}")
    train, test = read_voc(root)
    samples = [s for _, batch in detecting._batches(train, TINY, 0, 0, 3, workers) for s in batch]
    after = (bad + 1) % 6
    assert [index for _, index, _ in samples] == [after if i == bad else i for i in order]
    assert torch.equal(samples[0][0], train.read(after))
    assert [[error.title for error in errors] for *_, errors in samples] == [
        [f"VOC2007/{bad:06d}"] if index == bad else [] for index in order
    ]
    told = rf"1 images cannot be read.*VOC2007/{bad:06d} \(OSError.*truncated"
    for _ in range(2):  # the second time there is nothing left to train
        with pytest.warns(UserWarning, match=told):
            result = protocol.evaluate(judge(tmp_path, workers=workers), train, test, recipe=TINY)
        assert result.card["unreadable"] == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_an_unreadable_image_to_judge_on_is_left_out_and_counted(tmp_path, workers):
    root = write_voc(tmp_path / "pollen", test=4)
    truncate(root, "000101")
    train, test = read_voc(root)
    detector = build_detector(backbone(), 2, recipe=TINY)
    founds, bad = detect(judge(tmp_path, workers=workers), detector, test, "detect")
    assert sorted(founds) == [0, 2, 3] and list(bad) == ["VOC2007/000101"]
    with pytest.warns(UserWarning, match=r"1 images cannot be read.*VOC2007/000101 \(OSError"):
        result = protocol.evaluate(judge(tmp_path, workers=workers), train, test, recipe=TINY)
    assert result.card["unreadable"] == 1 and " of 3 objects found" in result.text


@pytest.mark.parametrize("split", ["trainval", "test"])
def test_more_than_a_twentieth_that_cannot_be_read_is_an_error(call, type_it, tmp_path, split):
    root = write_voc(tmp_path / "pollen", test=11)
    met = [first_shown(root, place) for place in (0, 1)]
    names = met if split == "trainval" else ["000103", "000110"]
    truncate(root, *names)
    code, out, err = call(*type_it(tmp_path, *SHORT, root=root))
    assert (code, out) == (2, "")
    told = rf"meanshift: VOC 07 {split}: 2 of (6|11) images cannot be read.*/{names[0]} .*most 5%"
    assert re.search(told, err), err


@pytest.mark.parametrize("split", ["trainval", "test"])
def test_nothing_that_can_be_read_is_an_error(call, type_it, tmp_path, split):
    root = write_voc(tmp_path / "pollen", train=3)
    truncate(root, *(root / f"VOC2007/ImageSets/Main/{split}.txt").read_text().split())
    code, out, err = call(*type_it(tmp_path, *SHORT, root=root))
    assert (code, out) == (2, "")
    assert re.search(rf"meanshift: VOC 07 {split}: .*images? can(not)? be read", err), err


def test_an_error_in_a_worker_is_told_plainly_and_ends_the_command(type_it, tmp_path):
    """In a process of its own, as it must not be this one that waits for its workers for ever."""
    root = write_voc(tmp_path / "pollen", train=3)
    truncate(root, "000000", "000001", "000002")
    done = run_it(type_it(tmp_path, *SHORT, "--workers", 2, root=root), timeout=60)
    assert done.returncode == 2
    assert "meanshift: VOC 07 trainval: " in done.stderr and "Traceback" not in done.stderr


# It learns


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    home = tmp_path_factory.mktemp("learned")
    train, test = read_voc(write_voc(home / "pollen", 24, 12, sides=(34, 56)))
    recipe = DetectionSettings.of(80, size=64, batch_size=4, rois=16, lr=0.08)
    judged = judge(home)
    before = fingerprint(judged.backbone)
    result = protocol.evaluate(judged, train, test, recipe=recipe)
    assert fingerprint(judged.backbone) == before and not judged.backbone.training
    return judged, train, test, recipe, result


def test_solid_rectangles_are_found(learned):
    _, _, test, _, result = learned
    assert result.figures["AP50"] > 30 and result.figures["AP50 (COCO)"] > 30
    assert result.figures["AP"] < result.figures["AP50"]
    (by_class,) = result.settings["AP50 by class"]
    assert list(by_class) == ["lime", "plum"] == test.classes
    assert statistics.fmean(by_class.values()) == pytest.approx(result.figures["AP50"])
    (losses,) = result.settings["loss"]
    assert list(losses) == list(range(4, 81, 4)) and losses[4] > 1.5 * losses[80] > 0


def test_the_figures_are_those_of_the_detections(learned):
    """Read from the last checkpoint, detected one by one and scored again."""
    judged, train, test, recipe, result = learned
    detector, _, _ = trained(judged, train, recipe)
    detector.eval()
    seen, truths = [], []
    for index, one in enumerate(test.images):
        with torch.no_grad():
            (found,) = detector([test.read(index) / 255])
        seen.append(Detections(found["boxes"], found["scores"], found["labels"] - 1))
        truths.append(GroundTruth(one.boxes, one.labels, one.difficult))
    for rule, suffix in (("voc07", ""), ("coco", " (COCO)")):
        told = protocol.average_precision(seen, truths, classes=2, rule=rule)
        named = {"AP": told.ap, "AP50": told.ap50, "AP75": told.ap75}
        for name, value in named.items():
            assert result.figures[f"{name}{suffix}"] == pytest.approx(value, abs=1e-9)
    assert result.text == detections.count(truths, seen)
    assert re.fullmatch(r"[1-9]\d* of 12 objects found, \d+ false alarms?", result.text)
    assert list(result.figures) == ["AP", "AP50", "AP75"] + [f"{n} (COCO)" for n in named]


def test_the_card_and_the_image_are_written_side_by_side(learned):
    judged, train, test, recipe, result = learned
    name = f"detect-80-at-64-batch-4-rois-16-lr-0.08-{train.folder_name}"
    path = judged.save(result)
    assert path == judged.home / f"results/{name}.json"
    held = json.loads(path.read_text())
    card, settings = held["card"], held["card"]["settings"]
    assert held["figures"] == result.figures
    assert card["protocol"] == name and card["image_size"] == 64
    assert card["sizes"] == {"train": 24, "test": 12} == card["objects"]
    assert card["classes"] == ["lime", "plum"] and card["unreadable"] == 0
    assert card["data"] == f"{train.folder_name}: VOC 07 trainval, judged on VOC 07 test"
    assert card["weights"] == fingerprint(backbone()) and card["images"] == {
        "train": train.fingerprint(),
        "test": test.fingerprint(),
    }
    assert card["resize"] == "short side 64, long side at most 107" and card["seed"] == 0
    assert {"versions", "date", "command", "device", "precision", "judged"} <= card.keys()
    assert {key: settings[key] for key in dataclasses.asdict(recipe)} == dataclasses.asdict(recipe)
    assert settings["short sides in training"] == recipe.sizes and settings["seeds"] == [0]
    assert settings["by seed"] == {name: [value] for name, value in result.figures.items()}
    assert (settings["processes"], settings["batch norm"]) == ([[1]], "one process")
    assert settings["proposals"] == recipe.proposals and card["root"] == str(train.root)
    with Image.open(path.with_suffix(".png")) as image:
        assert image.text["Description"] == result.text and min(image.size) > 300
        assert image.text["Title"] == f"{name}: made"
    assert len(test) == 12


# Seeds, processes, and the paper's table


def test_several_seeds_give_the_mean_and_the_sample_deviation(sets, tmp_path, monkeypatch):
    known = {3: 10.0, 4: 20.0, 5: 60.0}
    real = protocol._trial

    def trial(judged, train, test, recipe, seed):
        done = real(judged, train, test, recipe, seed)
        return dataclasses.replace(done, figures={"AP": known[seed], "AP50": 2 * known[seed]})

    monkeypatch.setattr(protocol, "_trial", trial)
    result = protocol.evaluate(judge(tmp_path, seed=3), *sets, recipe=TINY, seeds=3)
    deviation = math.sqrt((20**2 + 10**2 + 30**2) / 2)
    assert result.figures == pytest.approx(
        {
            "AP": 30,
            "AP deviation": deviation,
            "AP50": 60,
            "AP50 deviation": 2 * deviation,
        }
    )
    settings = result.settings
    assert settings["by seed"] == {"AP": [10, 20, 60], "AP50": [20, 40, 120]}
    assert settings["seeds"] == [3, 4, 5] and len(settings["AP50 by class"]) == 3
    alone = [trained(judge(tmp_path / "alone"), sets[0], seed=seed)[1].losses for seed in known]
    assert settings["loss"] == alone and len({str(losses) for losses in alone}) == 3


def test_one_seed_has_no_deviation_and_none_is_refused(sets, tmp_path):
    result = protocol.evaluate(judge(tmp_path), *sets, recipe=TINY)
    assert not any("deviation" in name for name in result.figures)
    with pytest.raises(ValueError, match="got 0 seeds, need 1 or more"):
        protocol.evaluate(judge(tmp_path), *sets, recipe=TINY, seeds=0)


def test_a_batch_must_have_an_image_for_each_process(sets, tmp_path, as_one_of):
    as_one_of(1, 3)
    with pytest.raises(ValueError, match=r"3 processes share batches of 2 images; .*batch-size"):
        protocol.evaluate(judge(tmp_path), *sets, recipe=TINY)
    assert not (tmp_path / "detectors").exists()


def test_the_rows_beside_ours_are_the_papers():
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
    rows = {name: (ap, ap50, ap75) for name, (ap50, ap, ap75) in ap50_ap_ap75.items()}
    assert rows == protocol.PAPER
    assert protocol.beside() == {
        name: {"AP": ap, "AP50": ap50, "AP75": ap75} for name, (ap, ap50, ap75) in rows.items()
    }


# The command


SHORT = ("--iterations", "2", "--size", "64", "--batch-size", "2", "--rois", "8")


def rows_of(out):
    return [re.split(r"  +", line.strip()) for line in out.splitlines() if "." in line]


def test_the_command_prints_our_row_and_the_papers(call, type_it, weights, tmp_path):
    code, out, err = call(*type_it(tmp_path / "out", *SHORT))
    assert code == 0, err
    assert out.startswith("\ndetect-2-at-64-rois-8-heads on VOC 07 test of heads\n")
    header, *rows = re.findall(r"^  .*$", out, re.MULTILINE)
    columns = ["AP", "AP50", "AP75"]
    assert re.split(r"  +", header.strip()) == columns + [f"{name} (COCO)" for name in columns]
    cells = [re.split(r"  +", row.strip()) for row in rows]
    held = json.loads((tmp_path / "out/results/detect-2-at-64-rois-8-heads.json").read_text())
    assert cells[0] == [str(weights), *(f"{value:.2f}" for value in held["figures"].values())]
    assert cells[1:] == [
        [f"{title} *", *(f"{value:.2f}" for value in row)] for title, row in protocol.PAPER.items()
    ]
    assert "* the paper's table: ResNet-50" in out
    assert (
        "heads, VOC 07 trainval: 6 images; VOC 07 test: 3; lime, plum; batches of 2 at 38 to 64"
        in err
    )
    image = tmp_path / "out/results/detect-2-at-64-rois-8-heads.png"
    assert image.is_file() and f"image: {image}: " in err
    assert re.search(r"\.png: \d of 3 objects found, \d+ false alarm", err)


def test_a_short_run_draws_no_bar_in_a_log(call, type_it, tmp_path):
    code, _, err = call(*type_it(tmp_path / "out", *SHORT))
    assert code == 0 and "it/s" not in err and "\r" not in err, err


@pytest.mark.filterwarnings("default")
def test_two_weights_are_compared_and_chosen_classes_are_judged(call, type_it, weights, tmp_path):
    other = write_weights(tmp_path / "other.pt", 1)
    code, out, err = call(
        *type_it(tmp_path / "out", *SHORT, "--compare", other, "--classes", "plum")
    )
    assert code == 0, err
    assert [row[0] for row in rows_of(out)][:2] == [str(weights), str(other)]
    cards = [json.loads(path.read_text())["card"] for path in tmp_path.rglob("results/*.json")]
    assert len({card["weights"] for card in cards}) == 2
    assert all(card["classes"] == ["plum"] for card in cards)
    assert all(card["objects"] == {"train": 3, "test": 1} for card in cards)
    assert "warning: VOC 07 trainval: 3 boxes of classes that are not asked for" in err


def test_other_images_seeds_and_how_many_of_them_have_results_of_their_own(call, type_it, tmp_path):
    root = write_voc(tmp_path / "moss/VOCdevkit")
    for more in ((), ("--seed", 3), ("--seeds", 2)):
        code, out, err = call(*type_it(tmp_path / "out", *SHORT, *more, root=root))
        assert code == 0, err
    assert {path.name for path in (tmp_path / "out/results").glob("*.json")} == {
        "detect-2-at-64-rois-8-moss.json",
        "detect-2-at-64-rois-8-moss-seed3.json",
        "detect-2-at-64-rois-8-moss-2-seeds.json",
    }
    assert re.search(r"small\.pt +\d+\.\d\d ± \d+\.\d\d ", out)


def test_bfloat16_is_judged_too(call, type_it, tmp_path):
    code, _, err = call(*type_it(tmp_path / "out", *SHORT, "--precision", "bfloat16"))
    assert code == 0, err
    file = tmp_path / "out/results/detect-2-at-64-rois-8-heads-bfloat16.json"
    card = json.loads(file.read_text())["card"]
    assert card["precision"] == "torch.bfloat16"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (
            "detect WEIGHTS",
            r"where are the images\? say --root VOCDEVKIT; need VOCdevkit/VOC2007",
        ),
        ("detect WEIGHTS --root EMPTY", r"EMPTY: no VOC2007 in it; need VOCdevkit/VOC2007"),
        ("detect WEIGHTS --root NOWHERE", r"NOWHERE: no folder; need VOCdevkit/VOC2007 .*\.tar"),
        ("detect WEIGHTS --root ROOT --classes cow", "lack cow and have lime, plum"),
        ("detect WEIGHTS --root ROOT --iterations 0", "got --iterations 0, .*need 1 or more"),
        ("detect WEIGHTS --root ROOT --size 8", "--size 8, .*a size of 32 or more"),
        (
            "detect WEIGHTS --root ROOT --seeds 0 --iterations 1 --size 64",
            "0 seeds, need 1 or more",
        ),
        ("detect pixels --root ROOT --iterations 1", "needs a ResNet, .*got Pixels"),
        ("detect WEIGHTS --root ROOT --ks 3", "--ks: is for knn; got detect"),
        ("knn WEIGHTS --root ROOT", "--root: is for transfer, detect; got knn"),
        ("detect --root ROOT", "got detect; need one or more of .*then what to judge"),
    ],
)
def test_mistakes_are_named_with_what_to_type(
    call, weights, root, tmp_path, monkeypatch, words, why
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "EMPTY").mkdir()
    given = words.replace("WEIGHTS", str(weights)).replace("ROOT", str(root)).split()
    code, out, err = call("evaluate", *given, "--device", "cpu")
    assert (code, out) == (2, "")
    assert re.search(rf"^meanshift: .*{why}", err, re.MULTILINE), err


# Two processes


def test_two_processes_train_and_judge_together_and_speak_once(type_it, tmp_path):
    root, out = write_voc(tmp_path / "pollen", 6, 5), tmp_path / "out"
    truncate(root, first_shown(root, place=1))  # in the share of the second process alone
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = run_it(type_it(out, *SHORT, root=root), *launch)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("on VOC 07 test") == done.stdout.count("MSF w/s, 200 *") == 1
    assert rows_of(done.stdout)[0][0] == str(type_it(out)[2])
    assert done.stderr.count("card: ") == 1 and done.stderr.count("VOC 07 test: 5;") == 1
    assert " of 5 objects found" in done.stderr
    (result,) = (out / "results").glob("*.json")
    card = json.loads(result.read_text())["card"]
    assert card["settings"]["processes"] == [[2]] and card["sizes"] == {"train": 6, "test": 5}
    assert card["settings"]["batch norm"] == "synchronized"
    assert done.stderr.count("1 images cannot be read") == 1, done.stderr
    assert card["unreadable"] == 1
