"""The ten transfer datasets in their real layouts: right images, right parts, right sizes."""

from collections import Counter
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from PIL import Image

from meanshift.data import open_source, transfer_datasets
from meanshift.data.splits import split_per_class
from meanshift.data.transfer_datasets import (
    DATASETS,
    NAMES,
    DatasetNotFound,
    open_task,
    task_from_source,
)
from tests.support.layouts import SERIES, make_sun397, pixels, shuffled, write, write_copy

GIVEN = ("dtd", "flowers102")  # all three parts are given
DRAWN = ("caltech101",)  # all three parts are drawn
FILES = tuple(name for name in NAMES if not name.startswith("cifar"))


def codes(source):
    """(Class, number) of each image, read from its pixels."""
    means = [source.read(index).float().mean((1, 2)).tolist() for index in range(len(source))]
    return [(round((red - 40) / 60), round((green - 20) / 12)) for red, green, _ in means]


@pytest.fixture
def make(tmp_path, monkeypatch):
    return lambda name, **more: write_copy(name, tmp_path, monkeypatch, **more)


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("nothing is ever downloaded")

    monkeypatch.setattr("urllib.request.urlopen", refuse)
    monkeypatch.setattr("socket.socket.connect", refuse)


# The ten, each from its own layout


@pytest.mark.parametrize("name", NAMES)
def test_the_right_images_are_in_the_right_parts(name, make, tmp_path):
    names = make(name)
    task = open_task(name, tmp_path)
    parts = {"train": task.train, "val": task.val, "test": task.test}
    found = {part: codes(source) for part, source in parts.items()}
    for part, source in parts.items():
        painted = [names[label] for label, _ in found[part]]
        assert [source.classes[label] for label in source.labels.tolist()] == painted
    every = [code for part in found.values() for code in part]
    assert sorted(every) == list(product(range(3), range(12)))  # each image once
    for part, count in (("train", 6), ("val", 2), ("test", 4)):
        assert Counter(label for label, _ in found[part]) == dict.fromkeys(range(3), count)
        if name in GIVEN or (part == "test" and name not in DRAWN):
            assert {serial for _, serial in found[part]} == set(SERIES[part])
    assert task.name == name
    assert (task.title, task.metric) == (DATASETS[name].title, DATASETS[name].metric)


@pytest.mark.parametrize("name", NAMES)
def test_each_seed_draws_other_parts_and_given_parts_stay(name, make, tmp_path):
    make(name)
    parts = [open_task(name, tmp_path, seed=seed) for seed in (3, 3, 4)]
    first, again, other = [[codes(task.train), codes(task.val), codes(task.test)] for task in parts]
    assert first == again
    assert (first[:2] == other[:2]) == (name in GIVEN)
    assert (first[2] == other[2]) == (name not in DRAWN)
    assert parts[2].split.endswith(", seed 4") != (name in GIVEN)


@pytest.mark.parametrize("name", FILES)
def test_the_content_fingerprint_sees_rewritten_images(name, make, tmp_path):
    make(name)
    before = [part.content_fingerprint() for part in parts_of(open_task(name, tmp_path))]
    assert before == [part.content_fingerprint() for part in parts_of(open_task(name, tmp_path))]
    assert len(set(before)) == 3
    for path in tmp_path.rglob("*.jpg"):
        Image.open(path).rotate(90).save(path, quality=50)
    after = [part.content_fingerprint() for part in parts_of(open_task(name, tmp_path))]
    assert not set(before) & set(after)


def parts_of(task):
    return task.train, task.val, task.test


def test_the_order_of_the_parts_is_that_of_the_lists(make, tmp_path):
    make("sun397")
    task = open_task("sun397", tmp_path)
    assert codes(task.test) == shuffled("test")
    drawn = set(codes(task.val))
    assert codes(task.train) == [code for code in shuffled("trainval") if code not in drawn]


@pytest.mark.parametrize("folder", ["SUN397", "SUN397/Partitions", "Partitions"])
def test_the_partition_lists_may_be_in_three_folders(folder, make, tmp_path, monkeypatch):
    make("sun397")
    for part in ("Training", "Testing"):
        (tmp_path / "SUN397" / f"{part}_01.txt").unlink()
    with pytest.raises(ValueError, match=r"Training_01\.txt is in none of .*Partitions") as caught:
        open_task("sun397", tmp_path)
    assert not isinstance(caught.value, DatasetNotFound) and "Partitions.zip" in str(caught.value)
    make_sun397(tmp_path, monkeypatch, folder)
    assert codes(open_task("sun397", tmp_path).test) == shuffled("test")


def test_listed_scenes_that_are_absent_are_named_and_counted(make, tmp_path):
    make("sun397")
    for number in (2, 3):
        (tmp_path / "SUN397" / "b" / "bakery" / "shop" / f"sun_{number:04d}.jpg").unlink()
    with pytest.raises(
        ValueError, match=r"2 of 24 in .*_01\.txt are absent, as b/bakery/shop/sun_"
    ):
        open_task("sun397", tmp_path)


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_small_images_may_come_as_arrays(name, make, tmp_path, monkeypatch):
    names = make(name)
    by_folder = open_task(name, tmp_path)
    arrays = {}
    for split, part in (("train", "trainval"), ("test", "test")):
        arrays[f"x_{split}"] = np.stack([pixels(*code, size=32) for code in shuffled(part)])
        arrays[f"y_{split}"] = np.array([label for label, _ in shuffled(part)])
    if name == "cifar10":  # its batches were dealt from the list in turns
        order = [index for start in range(5) for index in range(start, 24, 5)]
        arrays |= {key: arrays[key][order] for key in ("x_train", "y_train")}
    np.savez(tmp_path / f"{name}.npz", **{**arrays, "x_test": arrays["x_test"][:1]})
    assert open_task(name, tmp_path).train.classes == names  # the folder has priority over the file
    for file in (tmp_path / DATASETS[name].folder).iterdir():
        file.unlink()
    (tmp_path / DATASETS[name].folder).rmdir()
    with pytest.raises(ValueError, match=rf"{name}: .*{name}\.npz is damaged or incomplete"):
        open_task(name, tmp_path)
    np.savez(tmp_path / f"{name}.npz", **arrays)
    by_file = open_task(name, tmp_path)
    for one, other in zip(parts_of(by_folder), parts_of(by_file), strict=True):
        assert codes(one) == codes(other)
        assert torch.equal(one.labels, other.labels)
    monkeypatch.setitem(DATASETS, name, replace(DATASETS[name], sizes=(17, 6, 12)))
    with pytest.raises(ValueError, match=r"got 18 / 6 / 12 .* need 17 / 6 / 12"):
        open_task(name, tmp_path)
    np.savez(tmp_path / f"{name}.npz", x_train=arrays["x_train"], y_train=arrays["y_train"])
    with pytest.raises(ValueError, match="got no x_test, need x_train"):
        open_task(name, tmp_path)
    np.savez(tmp_path / f"{name}.npz", **{key: arrays[key] for key in ("x_train", "x_test")})
    with pytest.raises(ValueError, match="got no labels"):
        open_task(name, tmp_path)


# Missing and incomplete copies

ARCHIVES = {
    "food101": ("food-101.tar.gz", "vision.ee.ethz.ch", "food-101"),
    "cifar10": ("cifar-10-python.tar.gz", "cs.toronto.edu", "cifar-10-batches-py"),
    "cifar100": ("cifar-100-python.tar.gz", "cs.toronto.edu", "cifar-100-python"),
    "sun397": ("SUN397.tar.gz and Partitions.zip", "vision.princeton.edu", "SUN397"),
    "cars": ("cars_train.tgz", "ai.stanford.edu", "stanford_cars"),
    "aircraft": ("fgvc-aircraft-2013b.tar.gz", "robots.ox.ac.uk", "fgvc-aircraft-2013b"),
    "dtd": ("dtd-r1.0.1.tar.gz", "robots.ox.ac.uk", "dtd/dtd"),
    "pets": ("images.tar.gz and annotations.tar.gz", "robots.ox.ac.uk", "oxford-iiit-pet"),
    "caltech101": ("caltech-101.zip", "data.caltech.edu", "caltech101/101_ObjectCategories"),
    "flowers102": ("102flowers.tgz", "robots.ox.ac.uk", "flowers-102"),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_dataset_is_refused_with_what_to_download_and_where_to_put_it(name, tmp_path):
    for root in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(DatasetNotFound) as caught:
            open_task(name, root)
        message = str(caught.value)
        archive, site, folder = ARCHIVES[name]
        assert message.startswith(f"{name}: ") and "\n" not in message
        assert archive in message and site in message
        assert f"{root / folder} contains {DATASETS[name].contains}" in message
        assert (f"{name}.npz" in message) == name.startswith("cifar")
        assert not list(tmp_path.iterdir())


def test_an_unknown_dataset_is_refused_with_the_ten(tmp_path):
    with pytest.raises(
        ValueError, match=r"imagenet: not one of the ten; need one of food101, .*102"
    ):
        open_task("imagenet", tmp_path)


@pytest.mark.parametrize("name", NAMES)
def test_a_copy_of_another_size_is_refused_with_both_sizes(name, make, tmp_path):
    make(name, sizes=DATASETS[name].sizes, classes=DATASETS[name].classes)
    need = " / ".join(f"{size:,}" for size in DATASETS[name].sizes)
    with pytest.raises(ValueError, match="incomplete") as caught:
        open_task(name, tmp_path)
    assert not isinstance(caught.value, DatasetNotFound)
    got = "got 18 / 6 / 12 images (train / val / test) of 3 / 3 / 3 classes"
    assert f"{name}: {got}, need {need} of {DATASETS[name].classes}: " in str(caught.value)
    archive, _, folder = ARCHIVES[name]
    assert str(tmp_path / folder) in str(caught.value) and archive in str(caught.value)


def test_too_few_classes_and_too_small_classes_are_refused(make, tmp_path):
    make("pets", classes=4)
    with pytest.raises(ValueError, match="of 3 / 3 / 3 classes, need 18 / 6 / 12 of 4"):
        open_task("pets", tmp_path)
    make("pets", val_per_class=8)
    with pytest.raises(ValueError, match="pets: got a class of 8 images, need more to draw 8"):
        open_task("pets", tmp_path)


@pytest.mark.parametrize("name", FILES)
def test_an_image_that_is_absent_is_named(name, make, tmp_path):
    make(name)
    path = sorted(tmp_path.rglob("*.jpg"))[3]
    path.unlink()
    with pytest.raises(ValueError, match=rf"{name}: .*incomplete") as caught:
        open_task(name, tmp_path)
    assert not isinstance(caught.value, DatasetNotFound)
    if name == "caltech101":  # it has no lists
        reason = "got 18 / 6 / 11"
    else:
        absent = path.relative_to(tmp_path / "SUN397") if name == "sun397" else path
        reason = f"absent, as {absent}"
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("food101", "food-101/meta/train.json"),
        ("cifar10", "cifar-10-batches-py/data_batch_3"),
        ("cifar100", "cifar-100-python/meta"),
        ("sun397", "SUN397/ClassName.txt"),
        ("cars", "stanford_cars/cars_test_annos_withlabels.mat"),
        ("aircraft", "fgvc-aircraft-2013b/data/images_variant_trainval.txt"),
        ("dtd", "dtd/dtd/labels/val1.txt"),
        ("pets", "oxford-iiit-pet/annotations/trainval.txt"),
        ("flowers102", "flowers-102/setid.mat"),
    ],
)
@pytest.mark.parametrize("damage", ["overwritten", "deleted"])
def test_a_damaged_or_deleted_list_is_reported(name, file, damage, make, tmp_path):
    make(name)
    assert len(open_task(name, tmp_path).train) == 18
    (tmp_path / file).unlink()
    if damage == "overwritten":
        write(tmp_path / file, "torn")
    with pytest.raises(ValueError, match=rf"^{name}: .+: the copy under .*is damaged") as caught:
        open_task(name, tmp_path)
    assert not isinstance(caught.value, DatasetNotFound)
    assert "download=True" not in str(caught.value)


def test_an_empty_folder_is_damage(tmp_path):
    for name in NAMES:
        (tmp_path / DATASETS[name].folder).mkdir(parents=True, exist_ok=True)
        with pytest.raises(ValueError, match="is damaged or incomplete; download") as caught:
            open_task(name, tmp_path)
        assert not isinstance(caught.value, DatasetNotFound)


def test_batches_with_other_checksums_are_damaged(make, tmp_path, monkeypatch):
    make("cifar10")
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"cifar10: .*corrupted: .*-py is damaged"):
        open_task("cifar10", tmp_path)


# The draw at full size

CARS = """45 32 43 42 41 39 45 45 41 33 38 41 43 41 43 37 45 40 42 43 46 41 40 43 44 39 45 46 35 37
36 36 41 43 42 44 34 45 41 41 39 42 42 41 33 44 42 43 35 38 43 45 41 45 45 42 40 38 47 30 35 37 43
39 45 45 43 44 40 44 38 44 37 40 44 49 44 43 45 41 38 45 42 41 44 39 41 42 39 41 46 44 44 40 43 44
40 46 40 43 39 42 28 34 44 43 38 45 45 43 42 43 45 44 46 45 42 45 45 40 68 42 43 39 39 41 42 44 39
24 42 42 43 44 42 34 40 44 41 42 34 33 40 47 43 45 45 44 43 44 45 36 36 43 43 39 29 36 44 48 46 44
45 37 41 37 48 46 44 42 39 44 44 41 39 31 44 42 40 45 43 38 46 42 41 39 41 44 44 39 43 46 43 46 42
43"""  # the training images of each class, as published (classes in the order of their names)
CLASS_SIZES = {  # before validation images are drawn
    "food101": [750] * 101,
    "cifar10": [5000] * 10,
    "cifar100": [500] * 100,
    "sun397": [50] * 397,
    "cars": [int(size) for size in CARS.split()],
    "aircraft": [67] * 67 + [66] * 33,
    "pets": [100] * 32 + [93, 96, 96, 97, 98],
    "caltech101": [467, 435, 435, 200, 798, 800, 128, 123, 107, 114, 239, 31]
    + [59] * 47
    + [58] * 43,
}


@pytest.mark.parametrize("name", CLASS_SIZES)
def test_the_rules_give_the_papers_sizes(name):
    entry = DATASETS[name]
    sizes = torch.tensor(CLASS_SIZES[name])
    labels = torch.arange(len(sizes)).repeat_interleave(sizes)
    labels = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))]
    train, val, test = entry.sizes
    assert len(sizes) == entry.classes
    if entry.train_per_class:
        rest, drawn = split_per_class(labels, count=entry.train_per_class, seed=0)
        assert len(rest) == test and rest.tolist() == sorted(rest.tolist())
        assert len(labels[rest].unique()) == entry.classes
        labels = labels[drawn]
    assert len(labels) == train + val
    rest, drawn = split_per_class(
        labels, count=entry.val_per_class, fraction=entry.val_fraction, seed=0
    )
    assert (len(rest), len(drawn)) == (train, val)
    assert sorted([*rest.tolist(), *drawn.tolist()]) == list(range(len(labels)))
    for indices in (rest, drawn):
        assert indices.tolist() == sorted(indices.tolist())
        assert len(labels[indices].unique()) == entry.classes
    sizes = labels.bincount().tolist()
    for size, count in zip(sizes, labels[drawn].bincount().tolist(), strict=True):
        assert count == (entry.val_per_class or int(size / 5 + 0.5))


def test_the_table_is_the_papers():
    names = "food101 cifar10 cifar100 sun397 cars aircraft dtd pets caltech101 flowers102"
    assert " ".join(NAMES) == names
    counts = {name: (DATASETS[name].classes, *DATASETS[name].sizes) for name in GIVEN}
    assert counts == {"dtd": (47, 1880, 1880, 1880), "flowers102": (102, 1020, 1020, 6149)}
    tests = {"food101": 25_250, "cifar10": 10_000, "cifar100": 10_000, "sun397": 19_850}
    tests |= {"cars": 8_041, "aircraft": 3_333, "pets": 3_669}
    assert {name: DATASETS[name].sizes[2] for name in tests} == tests
    by_class = {name for name in NAMES if DATASETS[name].metric == "mean per class"}
    assert by_class == {"aircraft", "pets", "caltech101", "flowers102"}
    assert {DATASETS[name].metric for name in set(NAMES) - by_class} == {"top-1"}


# Any other source


def save(path, **parts):
    """An .npz with so many images of each class in each part; -1 is a class too."""
    arrays = {}
    for part, counts in parts.items():
        every = [(label, serial) for label in counts for serial in range(counts[label])]
        arrays[f"x_{part}"] = np.stack([pixels(max(label, 0), s) for label, s in every])
        arrays[f"y_{part}"] = np.array([label for label, _ in every])
    np.savez(path, **arrays)
    return str(path)


def test_a_source_with_three_parts_keeps_them(tmp_path, make_images):
    for part, count in (("train", 3), ("val", 2), ("test", 4)):
        make_images(tmp_path / part, {"ant": count, "bee": 1, "cat": count})
    (tmp_path / "val" / "bee" / "000.jpg").unlink()
    (tmp_path / "val" / "bee").rmdir()  # so that cats are number 1 there
    task = task_from_source("pests", str(tmp_path))
    assert [len(part) for part in parts_of(task)] == [7, 4, 9]
    assert task.val.labels.tolist() == [0, 0, 2, 2]
    assert task.val.classes == task.test.classes == task.train.classes == ["ant", "bee", "cat"]
    assert (task.name, task.title, task.metric) == ("pests", "pests", "top-1")
    assert task.split == "train, val and test as given"


@pytest.mark.parametrize("second", ["val", "test"])
def test_a_source_with_two_parts_is_tested_on_the_second(second, tmp_path, make_images):
    make_images(tmp_path / "train", {"ant": 8, "bee": 13})
    make_images(tmp_path / second, {"ant": 3, "bee": 2})
    task = task_from_source("pests", str(tmp_path), seed=1)
    assert [part.labels.bincount().tolist() for part in parts_of(task)] == [[6, 10], [2, 3], [3, 2]]
    titles = [part.title(index) for part in (task.train, task.val) for index in range(len(part))]
    assert sorted(titles) == sorted({*titles}) and len(titles) == 21
    assert task.split == f"validation 20% per class of train, test is its own {second}, seed 1"
    other = task_from_source("pests", str(tmp_path), seed=2)
    assert not torch.equal(task.val.indices, other.val.indices)


def test_a_source_with_one_part_is_split_in_three(tmp_path):
    task = task_from_source("toy", save(tmp_path / "toy.npz", train={-1: 4, 0: 12, 1: 8}), seed=1)
    counts = [part.labels.bincount().tolist() for part in parts_of(task)]
    assert counts == [[8, 5], [2, 1], [2, 2]]  # the unlabeled are left out
    every = [code for part in parts_of(task) for code in codes(part)]
    assert sorted(every) == [*product([0], range(12)), *product([1], range(8))]
    for part in parts_of(task):
        assert [label for label, _ in codes(part)] == part.labels.tolist()
    assert task.split == "test 20% per class, validation 20% per class of the rest, seed 1"


def test_a_labeled_split_beside_the_unlabeled_training_images_is_used(tmp_path, monkeypatch):
    parts = {"train": {-1: 9}, "val": {0: 5, 1: 5}, "test": {0: 3, 1: 2}}
    splits = open_source(save(tmp_path / "toy.npz", **parts))
    as_stl10 = {"train": splits["train"], "test": splits["test"], "labeled": splits["val"]}
    monkeypatch.setattr(transfer_datasets, "open_source", lambda _: as_stl10)
    task = task_from_source("stl10", "stl10")
    counts = [part.labels.bincount().tolist() for part in parts_of(task)]
    assert counts == [[4, 4], [1, 1], [3, 2]]


def test_a_test_part_without_labels_is_not_used(tmp_path):
    task = task_from_source("toy", save(tmp_path / "toy.npz", train={0: 5, 1: 5}, test={-1: 3}))
    assert [len(part) for part in parts_of(task)] == [6, 2, 2]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"train": {-1: 5}}, "no labels; need a folder for each class"),
        ({"train": {0: 5}}, "one class; need two classes or more"),
        ({"train": {0: 5, 1: 1}}, "got 1 of 1 and at most 5 .* need 2 of each class and 4 of one"),
        ({"train": {0: 5, 1: 1}, "val": {0: 1}}, "got 1 of 1 .* 2 of each class and 3 of one"),
        ({"train": {0: 3, 1: 3}}, "got 3 of 0 and at most 3 .* and 4 of one"),
        ({"train": {0: 2, 1: 2}, "test": {0: 1}}, "got 2 of 0 and at most 2 .* and 3 of one"),
        ({"train": {0: 5, 2: 5}, "test": {1: 1, 2: 1}}, "test has images of 1, train has none"),
        ({"train": {0: 5, 1: 5}, "test": {2: 1}}, "has classes that .* lacks: 2"),
    ],
)
def test_what_cannot_be_a_task_is_refused_with_the_reason(parts, message, tmp_path):
    with pytest.raises(ValueError, match=rf"toy\.npz: .*{message}"):
        task_from_source("toy", save(tmp_path / "toy.npz", **parts))


def test_the_smallest_tasks_are_tasks(tmp_path):
    for parts, sizes in (
        ({"train": {0: 4, 1: 2}}, [4, 1, 1]),
        ({"train": {0: 3, 1: 2}, "test": {0: 1}}, [4, 1, 1]),
        ({"train": {0: 1, 1: 1}, "val": {0: 1}, "test": {1: 1}}, [2, 1, 1]),
    ):
        task = task_from_source("toy", save(tmp_path / "toy.npz", **parts))
        assert [len(part) for part in parts_of(task)] == sizes
