"""Splits: validation images, stratified draws, and the images that an evaluation uses."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meanshift.config import Config
from meanshift.data import (
    describe_splits,
    evaluation_splits,
    open_source,
    stratified_sample,
    stratified_split,
    train_and_validation,
)
from meanshift.data.arrays import ArraySource
from meanshift.data.splits import split_per_class
from meanshift.runtime import rng
from tests.support.sources import titles

PIXELS = np.random.default_rng(0).integers(0, 256, (12, 6, 8, 3), dtype=np.uint8)
LABELS = np.arange(12) % 3


def labeled(counts):
    """An array source with so many images of each class."""
    labels = np.repeat(np.arange(len(counts)), counts)
    return ArraySource(np.zeros((len(labels), 2, 2), np.uint8), labels, name="toy")


def numbers_of(source):
    """Which images of an array source (or of a subset of it) these are."""
    return {int(title[1:]) for title in titles(source)}


# Validation images


def test_a_split_keeps_the_proportions_of_the_classes():
    source = labeled([50, 30, 20])
    rest, drawn = stratified_split(source, 0.1, seed=0)
    assert drawn.labels.bincount().tolist() == [5, 3, 2]
    assert rest.labels.bincount().tolist() == [45, 27, 18]
    assert numbers_of(rest) | numbers_of(drawn) == set(range(100))
    assert not numbers_of(rest) & numbers_of(drawn)


def test_a_split_is_seeded():
    source = labeled([50, 50])
    chosen = [numbers_of(stratified_split(source, 0.2, seed=seed)[1]) for seed in (0, 0, 1)]
    assert chosen[0] == chosen[1] != chosen[2]
    assert min(chosen[0]) < 50 <= max(chosen[0]) and chosen[0] != set(range(len(chosen[0])))


def test_a_split_needs_no_labels():
    source = ArraySource(np.zeros((40, 2, 2), np.uint8), None, name="toy")
    rest, drawn = stratified_split(source, 0.25, seed=0)
    assert (len(rest), len(drawn), drawn.labels) == (30, 10, None)


@pytest.mark.parametrize("fraction", [0.001, 0.999])
def test_a_split_leaves_no_side_empty(fraction):
    with pytest.raises(ValueError, match=r"toy: a fraction of .* of 20 images leaves one side"):
        stratified_split(labeled([10, 10]), fraction, seed=0)


def test_a_tenth_of_a_labeled_source_validates(tmp_path):
    for count, expected in ((200, 20), (60, None)):
        np.savez(tmp_path / "a.npz", x=np.zeros((count, 2, 2), np.uint8), y=np.arange(count) % 2)
        train, validation = train_and_validation(str(tmp_path / "a.npz"), "auto", seed=0)
        assert (validation and len(validation)) == expected
        assert len(train) == count - (expected or 0)


def test_a_split_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match=r"no split 'val'; it has test"):
        train_and_validation("sample", "val", seed=0)
    _, validation = train_and_validation("sample", "test", seed=0)
    assert len(validation) == 2000


def test_validation_classes_are_numbered_by_their_names(tmp_path, make_images):
    make_images(tmp_path, {"train/a": 1, "train/b": 1, "train/c": 1, "val/b": 2, "val/c": 1})
    _, validation = train_and_validation(str(tmp_path), "auto", seed=0)
    assert validation.labels.tolist() == [1, 1, 2]
    assert validation.classes == ["a", "b", "c"]


def test_validation_classes_that_training_lacks_are_refused(tmp_path, make_images):
    make_images(tmp_path, {"train/a": 1, "train/b": 1, "val/b": 1, "val/z": 1})
    with pytest.raises(ValueError, match=r"val: has classes that .*train lacks: z;"):
        train_and_validation(str(tmp_path), "auto", seed=0)


def test_an_unknown_label_stays_unknown(tmp_path):
    np.savez(
        tmp_path / "a.npz", x_train=PIXELS, y_train=LABELS, x_test=PIXELS[:3], y_test=[0, -1, 1]
    )
    _, validation = train_and_validation(str(tmp_path / "a.npz"), "auto", seed=0)
    assert validation.labels.tolist() == [0, -1, 1]


# Counts in words


def test_the_counts_of_splits_are_described():
    equal, mixed_, one = labeled([6, 6]), labeled([3, 1, 4]), labeled([2, 2])
    one.labels = torch.tensor([0, -1, 1, -1])
    one.groups = torch.tensor([0, 0, 5, 5])
    plain = ArraySource(np.zeros((7, 2, 2), np.uint8), None, name="toy")
    assert describe_splits({"train": equal, "test": mixed_, "val": None}) == (
        "train 12 images of 2 classes (6 each); test 8 images of 3 classes (0: 3, 1: 1, 2: 4)"
    )
    assert describe_splits({"train": one}) == (
        "train 4 images of 2 classes (1 each), 2 unlabeled, 2 groups"
    )
    assert describe_splits({"train": plain}) == "train 7 images without labels"


def test_many_classes_are_described_by_the_smallest_and_the_largest():
    counts = [9] * 40
    counts[17] = 0
    counts[30] = 12
    source = labeled(counts)
    source.classes = [f"class {number}" for number in range(40)]
    text = describe_splits({"train": source})
    assert text == "train 354 images of 40 classes (0 (class 17) to 12)"


# Draws in the proportions of the classes


COUNTS = st.lists(st.integers(1, 40), min_size=1, max_size=12)


@st.composite
def samples(draw):
    """Labels in any order, and a size that a sample of them can have."""
    counts = draw(COUNTS)
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    order = torch.randperm(
        len(labels), generator=torch.Generator().manual_seed(draw(st.integers(0, 9)))
    )
    return labels[order], draw(st.integers(len(counts), len(labels)))


@settings(max_examples=100, deadline=None)
@given(samples(), st.integers(0, 2**31))
def test_a_sample_has_its_size_its_proportions_and_all_classes(sample, seed):
    labels, count = sample
    chosen = stratified_sample(labels, count, seed=seed)
    assert len(chosen) == count
    assert (chosen[1:] > chosen[:-1]).all()  # rising, so none twice
    assert chosen[0] >= 0 and chosen[-1] < len(labels)
    got, members = labels[chosen].bincount(), labels.bincount()
    assert (got >= 1).all() and (got <= members).all()
    quota = members * count / len(labels)
    if (quota >= 1).all():  # no class needs more than its quota, so none is a whole image off
        assert ((got - quota).abs() < 1 + 1e-4).all()
    assert (got[quota < 1] <= 1 + quota[quota < 1].ceil()).all()
    larger = members[:, None] > members[None]
    assert (got[:, None] >= got[None] - 1)[larger].all()


@pytest.mark.parametrize(
    ("members", "count", "expected"),
    [
        ([50, 30, 20], 10, [5, 3, 2]),
        ([50, 30, 20], 100, [50, 30, 20]),
        ([50, 30, 20], 3, [1, 1, 1]),
        ([97, 1, 1, 1], 4, [1, 1, 1, 1]),
        ([97, 1, 1, 1], 10, [7, 1, 1, 1]),
        ([100, 100, 100], 100, [34, 33, 33]),
        ([60, 26, 14], 10, [6, 3, 1]),  # quotas 6, 2.6 and 1.4
        ([1300] * 10, 130, [13] * 10),
    ],
)
def test_samples_that_can_be_checked_by_hand(members, count, expected):
    labels = torch.arange(len(members)).repeat_interleave(torch.tensor(members))
    chosen = stratified_sample(labels, count, seed=0)
    assert labels[chosen].bincount().tolist() == expected


def test_a_sample_is_a_function_of_the_seed():
    labels = torch.arange(300) % 3
    before = torch.get_rng_state()
    samples = [stratified_sample(labels, 60, seed=seed) for seed in (0, 0, 1, 2)]
    assert torch.equal(samples[0], samples[1])
    assert len({tuple(chosen.tolist()) for chosen in samples}) == 3
    assert torch.equal(torch.get_rng_state(), before)


def test_each_image_is_as_likely_as_another():
    labels = torch.tensor([0] * 60 + [1] * 20)
    samples = [stratified_sample(labels, 20, seed=seed) for seed in range(200)]
    counts = torch.stack([chosen.bincount(minlength=80) for chosen in samples])
    frequency = counts.float().mean(0)  # a quarter; five stds of 200 draws are 0.15
    assert (frequency - 0.25).abs().max() < 0.15


def test_a_smaller_sample_of_the_same_seed_is_part_of_a_larger_one():
    labels = torch.arange(200) % 4
    small, large = (set(stratified_sample(labels, count, seed=5).tolist()) for count in (20, 80))
    assert small < large


def test_classes_need_no_images_of_every_number():
    labels = torch.tensor([7, 2, 7, 2, 7, 7])
    chosen = stratified_sample(labels, 3, seed=0)
    assert labels[chosen].bincount().tolist() == [0, 0, 1, 0, 0, 0, 0, 2]


@pytest.mark.parametrize("count", [-1, 0, 1, 2, 10])
def test_an_impossible_sample_is_refused(count):
    with pytest.raises(ValueError, match=rf"a subset of {count} images out of 9 of 3 classes"):
        stratified_sample(torch.arange(9) % 3, count, seed=0)


# A number or a fraction per class


def mixed(sizes):
    """Labels of classes of these sizes, in random order."""
    labels = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    return labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))]


def test_a_draw_is_the_naive_one_and_that_of_every_split():
    labels = mixed([9, 4, 7, 30])
    rest, drawn = split_per_class(labels, fraction=0.2, seed=5)

    def rank(index):
        return float(rng.uniform(5, 0, torch.tensor([index]), rng.SPLIT, 1))

    naive = []
    for label, take in enumerate((2, 1, 1, 6)):
        members = [index for index, found in enumerate(labels.tolist()) if found == label]
        naive += sorted(members, key=rank)[:take]
    assert drawn.tolist() == sorted(naive)
    toy = ArraySource(np.zeros((50, 2, 2), np.uint8), labels.numpy(), name="toy")
    for indices, part in zip((rest, drawn), stratified_split(toy, 0.2, seed=5), strict=True):
        assert torch.equal(indices, part.indices)


def test_a_draw_is_the_same_on_every_machine():
    labels = torch.arange(12) % 2
    assert split_per_class(labels, count=2, seed=0)[1].tolist() == [1, 5, 6, 8]


# The images of an evaluation


def run_config(source, validation="auto", seed=3):
    overrides = {"data.source": str(source), "data.validation": validation, "train.seed": seed}
    return Config().with_overrides(overrides)


def save_arrays(path, count=200, *, labels=None, test=0):
    """An .npz of images that are all different, two classes, with or without a test split."""
    pixels = np.arange(count, dtype=np.uint16).view(np.uint8).reshape(count, 1, 2)
    arrays = {"x_train": pixels, "y_train": np.arange(count) % 2 if labels is None else labels}
    if test:
        arrays |= {"x_test": pixels[:test], "y_test": np.arange(test) % 2}
    np.savez(path, **arrays)
    return path


def test_the_splits_of_the_source_are_used(tmp_path):
    path = save_arrays(tmp_path / "a.npz", test=30)
    for run in (None, run_config(path)):
        train, test, description, _ = evaluation_splits(str(path), run=run)
        assert (len(train), len(test)) == (200, 30)
        assert description == "the source's own train and test"
    with pytest.raises(ValueError, match=r"--split: .* has no labeled split 'val'; it has test"):
        evaluation_splits(str(path), split="val")


def test_a_run_is_tested_on_its_own_validation_images(tmp_path):
    path = save_arrays(tmp_path / "a.npz")
    run_train, run_validation = train_and_validation(str(path), 0.3, seed=3)
    train, test, description, seen = evaluation_splits(str(path), run=run_config(path, 0.3))
    assert torch.equal(train.indices, run_train.indices)
    assert torch.equal(test.indices, run_validation.indices)
    assert "validation images of the run" in description and "0.3" in description
    assert not seen


def changed_splits(source, run, trained_on, **options):
    """The splits of a source that has other images than when the run was trained."""
    with pytest.warns(UserWarning, match="training images have changed since the run: the run"):
        splits = evaluation_splits(str(source), run=run, trained_on=trained_on, **options)
    assert splits.seen.startswith("the training images have changed since the run: ")
    assert "validation images of the run" not in splits.description
    return splits


@pytest.mark.parametrize("labels", [None, "labels.csv"])
def test_a_source_that_has_changed_is_not_called_held_out(tmp_path, make_images, labels):
    source = make_images(tmp_path / "all", {"a": 60, "b": 60} if not labels else {"": 120})
    run = run_config(source)
    trained, _ = train_and_validation(str(source), "auto", seed=3)
    options = {"run": run, "trained_on": trained.fingerprint()}
    if labels:
        rows = "".join(f"{index:03d}.jpg,{'ab'[index % 2]}\n" for index in range(120))
        (source / labels).write_text("file,label\n" + rows)
    else:
        assert not evaluation_splits(str(source), **options).seen
        make_images(source, {"a/0": 1})
    splits = changed_splits(source, **options)
    assert splits.seen.endswith("the run has seen them unlabeled")


def test_images_may_have_been_moved_to_a_split_of_their_own(tmp_path, make_images):
    source = make_images(tmp_path / "all", {"a": 60, "b": 60})
    trained, _ = train_and_validation(str(source), "auto", seed=3)
    for name in "ab":
        for split, count in (("train", 40), ("val", 60)):
            (source / split / name).mkdir(parents=True)
            for file in sorted((source / name).glob("*.jpg"))[:count]:
                file.rename(source / split / name / file.name)
        (source / name).rmdir()
    splits = changed_splits(source, run_config(source), trained.fingerprint(), split="val")
    assert splits.description == "the source's own train and val"
    assert splits.seen.endswith("the run may have seen some of them")


@pytest.mark.filterwarnings("ignore:.*of them among the")
def test_a_run_has_seen_the_labeled_images_if_its_validation_images_have_no_labels(
    tmp_path, make_images
):
    source = make_images(tmp_path / "all", {"": 40})
    train, _ = train_and_validation(str(source), 0.3, seed=3)
    rows = "".join(f"{title},{'ab'[at % 2]}\n" for at, title in enumerate(titles(train)))
    labels = tmp_path / "labels.csv"
    labels.write_text("file,label\n" + rows)
    splits = evaluation_splits(str(source), labels=labels, run=run_config(source, 0.3))
    assert splits.seen == "the run has seen them unlabeled"


def test_another_source_is_split_with_seed_0(tmp_path):
    for count, expected in ((200, 20), (60, 15)):
        path = save_arrays(tmp_path / "a.npz", count)
        train, test, description, seen = evaluation_splits(str(path))
        split = stratified_split(open_source(str(path))["train"], expected / count, seed=0)
        for part, other in zip((train, test), split, strict=True):
            assert torch.equal(part.indices, other.indices)
        assert "seed 0" in description and not seen


def test_a_run_that_trained_on_all_images_has_seen_the_test_images(tmp_path):
    path = save_arrays(tmp_path / "a.npz")
    train, test, description, seen = evaluation_splits(str(path), run=run_config(path, "none"))
    assert (len(train), len(test)) == (180, 20)
    assert description.endswith("seed 3") and seen == "the run has seen them unlabeled"


def test_unlabeled_images_take_no_part(tmp_path):
    labels = np.where(np.arange(200) < 40, -1, np.arange(200) % 2)
    path = save_arrays(tmp_path / "a.npz", labels=labels)
    train, test, *_ = evaluation_splits(str(path))
    assert (len(train), len(test)) == (144, 16)
    assert evaluation_splits(str(path)).description.endswith("; 40 unlabeled images left out")
    assert (train.labels >= 0).all() and (test.labels >= 0).all()
    path = save_arrays(tmp_path / "b.npz", labels=np.full(200, -1))
    train, test, description, _ = evaluation_splits(str(path))
    assert (len(train), test, description) == (200, None, "one part, no labels")
