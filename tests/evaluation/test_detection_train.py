"""Training of a detector: its batches, exact continuation, and what goes wrong."""

import dataclasses

import pytest
import torch
from torch import nn

from meanshift.data.voc import read_voc
from meanshift.evaluation.detection.batches import inputs, train_batches
from meanshift.evaluation.detection.model import build_detector
from meanshift.evaluation.detection.settings import DetectionSettings
from meanshift.evaluation.detection.train import checkpoint_folder
from meanshift.runtime import distributed
from tests.support.detectors import (
    CPU,
    TINY,
    detection_context,
    small_backbone,
    trained_detector,
    training_inputs,
)
from tests.support.exact import assert_same
from tests.support.voc import COLORS, truncate_images, write_voc


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    dataset, _ = read_voc(write_voc(tmp_path_factory.mktemp("made")))
    return dataset


@pytest.fixture
def act_as(monkeypatch):
    """act_as(rank, world): this process acts as one of several that do not communicate."""

    def act(rank, world):
        monkeypatch.setattr(distributed, "rank", lambda: rank)
        monkeypatch.setattr(distributed, "world_size", lambda: world)

    return act


# Which images, in which order, flipped or not


def test_every_image_occurs_once_per_epoch_in_a_new_order(train):
    settings = DetectionSettings.scaled(9, size=64, batch_size=4, rois=8)  # 36 images, 6 epochs
    positions = training_inputs(train, settings, 5)
    assert list(positions) == list(range(36))
    order = [index for index, *_ in positions.values()]
    epochs = [order[start : start + 6] for start in range(0, 36, 6)]
    assert all(sorted(epoch) == list(range(6)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 3
    assert [index for index, *_ in training_inputs(train, settings, 6).values()] != order


@pytest.mark.parametrize("world", [2, 3, 4])
def test_any_number_of_processes_has_the_same_batches(train, act_as, world):
    settings = DetectionSettings.scaled(5, size=64, batch_size=4, rois=8)
    alone = training_inputs(train, settings, 1)
    together = {}
    for rank in range(world):
        act_as(rank, world)
        part = training_inputs(train, settings, 1)
        assert not part.keys() & together.keys()
        together |= part
    assert_same(dict(sorted(together.items())), alone)


def test_a_later_start_and_other_workers_give_the_same_batches(train):
    settings = DetectionSettings.scaled(6, size=64, batch_size=3, rois=8)
    complete = training_inputs(train, settings, 2)
    late = training_inputs(train, settings, 2, start=4, workers=2)
    assert_same(late, {position: one for position, one in complete.items() if position >= 12})
    assert len(late) == 6


def test_a_flipped_box_contains_the_flipped_object(tmp_path):
    train, _ = read_voc(write_voc(tmp_path, suffix=".png"))
    settings = DetectionSettings.scaled(10, size=64, batch_size=6, rois=8)
    flips = []
    for index, image, target in training_inputs(train, settings).values():
        (box,), (label,) = target["boxes"].int().tolist(), target["labels"].tolist()
        assert target["boxes"].dtype == torch.float32 and image.dtype == torch.float32
        assert label == int(train.images[index].labels) + 1  # the first is the background
        left, top, right, bottom = box
        color = torch.tensor(COLORS[train.classes[label - 1]])[:, None, None] / 255
        inside = torch.zeros(image.shape[1:], dtype=torch.bool)
        inside[top:bottom, left:right] = True
        assert torch.equal((image == color).all(0), inside)
        unchanged = torch.equal(image, train.read(index) / 255)
        assert unchanged == torch.equal(target["boxes"], train.images[index].boxes)
        flips.append(not unchanged)
    assert 15 < sum(flips) < 45  # of 60
    others = training_inputs(train, settings, 1).values()
    assert [not torch.equal(image, train.read(index) / 255) for index, image, _ in others] != flips


# The same bits


def test_workers_change_no_bit(train, tmp_path):
    states = [
        trained_detector(detection_context(tmp_path / str(workers), workers=workers), train)[2]
        for workers in (0, 2)
    ]
    assert_same(*states)
    assert states[0]["step"] == 3 and set(states[0]["log"]["losses"]) == {1, 2, 3}


def test_the_callers_random_state_is_restored_and_changes_nothing(train, tmp_path):
    states = []
    for seed in (1, 2):
        context = detection_context(tmp_path / str(seed))
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        states.append(trained_detector(context, train)[2])
        assert torch.equal(torch.get_rng_state(), before)
    assert_same(*states)


def test_batch_norms_are_computed_again_with_the_final_weights(train, tmp_path):
    """They are plain means over the batches that would come next."""
    settings = dataclasses.replace(TINY, iterations=20)
    assert settings.batch_norm_batches == 3
    detector, _, state = trained_detector(detection_context(tmp_path), train, settings)
    norms = {
        name: module
        for name, module in detector.named_modules()
        if isinstance(module, nn.BatchNorm2d)
    }
    recorded = {name: [] for name in norms}
    reference = build_detector(small_backbone(), 2, settings=settings)
    reference.load_state_dict(state["detector"])
    for name, module in reference.named_modules():
        if name in recorded:
            module.register_forward_pre_hook(
                lambda _, arguments, name=name: recorded[name].append(arguments[0])
            )
    reference.train()
    later = train_batches(train, settings, seed=0, start=20, stop=23, workers=0)
    with torch.random.fork_rng(), torch.no_grad():
        for step, samples in later:
            reference(*inputs(train, samples, settings, seed=0, step=step, device=CPU))
    assert len(norms) == 13
    for name, norm in norms.items():
        assert len(recorded[name]) == 3 and norm.momentum == 0.1
        means = torch.stack([x.mean((0, 2, 3)) for x in recorded[name]])
        variances = torch.stack([x.var((0, 2, 3)) for x in recorded[name]])
        torch.testing.assert_close(norm.running_mean, means.mean(0), rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(norm.running_var, variances.mean(0), rtol=1e-3, atol=1e-4)
    last = state["detector"]
    assert all(torch.equal(value, last[name]) for name, value in detector.named_parameters())


def test_a_damaged_newest_checkpoint_is_reported_and_the_one_before_is_used(train, tmp_path):
    detector, _, _ = trained_detector(detection_context(tmp_path), train)
    folder = checkpoint_folder(detection_context(tmp_path), train, TINY, 0)
    names = ["step-000000002.pt", "step-000000003.pt"]
    assert [file.name for file in sorted(folder.iterdir())] == names
    newest = folder / names[1]
    newest.write_bytes(newest.read_bytes()[:1000])
    with pytest.warns(UserWarning, match=r"step-000000003\.pt.*; an earlier one is used"):
        again, log, state = trained_detector(detection_context(tmp_path), train)
    assert state["step"] == 3 and set(log.losses) == {1, 2, 3}
    assert_same(dict(again.state_dict()), dict(detector.state_dict()))


def test_other_settings_weights_or_images_have_other_checkpoints(train, tmp_path):
    def folder(dataset=train, settings=TINY, seed=0, **options):
        context = detection_context(tmp_path / "out", **options)
        return checkpoint_folder(context, dataset, settings, seed)

    folders = [
        folder(),
        folder(seed=1),
        folder(settings=dataclasses.replace(TINY, lr=0.5)),
        folder(settings=dataclasses.replace(TINY, iterations=4)),
        folder(dataset=dataclasses.replace(train, images=train.images[:-1])),
        folder(backbone=small_backbone(1)),
        folder(precision="bfloat16"),
    ]
    assert len(set(folders)) == len(folders)
    assert folder(workers=2) == folder()  # workers change no bit
    assert all(other.parent == tmp_path / "out" / "detectors" for other in folders)


# What goes wrong


def test_a_loss_that_is_no_number_stops_with_what_to_try(train, tmp_path):
    settings = DetectionSettings.scaled(20, size=64, batch_size=2, rois=8, lr=1e20)
    with pytest.raises(ValueError, match=r"the loss is (nan|inf) after \d+ iter.*smaller --lr"):
        trained_detector(detection_context(tmp_path), train, settings)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_unreadable_image_is_replaced_by_the_next_one(tmp_path, workers):
    root = write_voc(tmp_path / "pollen")
    order = [index for index, *_ in training_inputs(read_voc(root)[0], TINY).values()]
    bad = order[0]
    following = (bad + 1) % 6
    truncate_images(root, f"{bad:06d}")
    train, _ = read_voc(root)
    batches = train_batches(train, TINY, seed=0, start=0, stop=3, workers=workers)
    samples = [sample for _, batch in batches for sample in batch]
    expected = [following if index == bad else index for index in order]
    assert [index for _, index, _ in samples] == expected
    assert torch.equal(samples[0].image, train.read(following))
    assert [[error.title for error in sample.errors] for sample in samples] == [
        [f"VOC2007/{bad:06d}"] if index == bad else [] for index in order
    ]
