"""Folders, named datasets and the sample give the right images and labels."""

import os
import shutil
import struct
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
import torch
import torchvision

from meanshift.data import (
    UnreadableSample,
    evaluation_splits,
    open_source,
    train_and_validation,
)
from meanshift.data.decode import read_image
from meanshift.runtime.errors import Note
from tests.support.sources import load_batches, titles

RANDOM = np.random.default_rng(0)
PIXELS = RANDOM.integers(0, 256, (12, 6, 8, 3), dtype=np.uint8)
LABELS = np.arange(12) % 3


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


# Folders


def test_subfolders_are_classes_in_the_order_of_their_names(tmp_path, make_images):
    source = open_source(str(make_images(tmp_path, {"pear": 2, "apple": 3})))["train"]
    assert source.classes == ["apple", "pear"]
    assert source.labels.tolist() == [0, 0, 0, 1, 1]
    apples = [f"apple/{index:03d}.jpg" for index in range(3)]
    assert titles(source) == [*apples, "pear/000.jpg", "pear/001.jpg"]
    assert source.read(0).shape == (3, 40, 48)
    assert source.read(0).dtype == torch.uint8


def test_a_flat_folder_has_no_labels(tmp_path, make_images):
    source = open_source(str(make_images(tmp_path, {"": 3})))["train"]
    assert len(source) == 3
    assert source.labels is None
    assert source.classes == []


def test_one_subfolder_is_no_class(tmp_path, make_images):
    source = open_source(str(make_images(tmp_path, {"everything": 3})))["train"]
    assert len(source) == 3
    assert source.labels is None


def test_an_image_at_the_top_makes_the_subfolders_mere_storage(tmp_path, make_images):
    source = open_source(str(make_images(tmp_path, {"a": 2, "b": 2, "": 1})))["train"]
    assert len(source) == 5
    assert source.labels is None


def test_nested_folders_belong_to_the_class_at_the_top(tmp_path, make_images):
    make_images(tmp_path, {"a/2019/may": 1, "a/2020": 2, "b/x": 1})
    source = open_source(str(tmp_path))["train"]
    assert source.classes == ["a", "b"]
    assert source.labels.tolist() == [0, 0, 0, 1]


def test_train_val_and_test_are_splits(tmp_path, make_images):
    make_images(tmp_path, {"train/a": 3, "train/b": 2, "val/a": 1, "val/b": 1, "test/b": 1})
    splits = open_source(str(tmp_path))
    assert list(splits) == ["train", "val", "test"]
    assert [len(part) for part in splits.values()] == [5, 2, 1]
    assert splits["train"].classes == ["a", "b"]
    assert splits["test"].classes == ["b"] and splits["test"].labels.tolist() == [0]
    train, validation = train_and_validation(str(tmp_path), "auto", seed=0)
    assert (len(train), len(validation)) == (5, 2)
    assert len(train_and_validation(str(tmp_path), "none", seed=0)[0]) == 5


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("Training", "Testing"), {"train": 3, "test": 2}),
        (("TRAIN", "Valid"), {"train": 3, "val": 2}),
        (("train", "validation"), {"train": 3, "val": 2}),
        (("archive/Training", "archive/Testing"), {"train": 3, "test": 2}),
        (("a/b/train", "a/b/test"), {"train": 3, "test": 2}),
    ],
)
def test_splits_in_other_spellings_are_no_classes(tmp_path, make_images, names, expected):
    first, second = names
    make_images(tmp_path, {f"{first}/a": 1, f"{first}/b": 2, f"{second}/a": 1, f"{second}/b": 1})
    note = rf"taken as splits, not as classes: {first}/ is train \(3 images\), {second}/ is .*\(2"
    with pytest.warns(Note, match=note):
        splits = open_source(str(tmp_path))
    assert {name: len(part) for name, part in splits.items()} == expected
    assert all(part.classes == ["a", "b"] for part in splits.values())
    assert titles(splits["train"])[0] == "a/000.jpg"


def test_the_usual_name_of_a_split_wins(tmp_path, make_images):
    make_images(tmp_path, {"Train/a": 1, "train/a": 2, "train/b": 2, "val/a": 1, "valid/a": 1})
    with pytest.warns(UserWarning, match="2 folders and images beside them .* first is Train"):
        splits = open_source(str(tmp_path))
    assert [len(part) for part in splits.values()] == [4, 1]


def test_a_folder_with_a_link_to_itself_ends(tmp_path, make_images):
    make_images(tmp_path, {".hidden": 1})
    (tmp_path / "again").symlink_to(".")
    with pytest.raises(ValueError, match="no image found"):
        open_source(str(tmp_path))


def test_a_folder_with_only_train_is_that_split(tmp_path, make_images):
    make_images(tmp_path, {"train/a": 2, "train/b": 2})
    assert open_source(str(tmp_path))["train"].classes == ["a", "b"]


@pytest.mark.parametrize("split", ["val", "test"])
def test_a_split_of_one_class_is_labeled_as_the_others(tmp_path, make_images, split):
    make_images(tmp_path, {"train/a": 8, "train/b": 8, f"{split}/b": 3})
    validation = train_and_validation(str(tmp_path), "auto", seed=0)[1]
    assert validation.labels.tolist() == [1, 1, 1] and validation.classes == ["a", "b"]
    assert evaluation_splits(str(tmp_path)).test.labels.tolist() == [1, 1, 1]


def test_a_single_folder_that_is_no_class_elsewhere_is_storage(tmp_path, make_images):
    make_images(tmp_path, {"train/everything": 3, "val/a": 1, "val/b": 1})
    splits = open_source(str(tmp_path))
    assert splits["train"].labels is None and splits["val"].classes == ["a", "b"]


def test_files_beside_train_do_not_make_it_a_class(tmp_path, make_images):
    make_images(tmp_path, {"train/a": 2, "train/b": 2})
    write(tmp_path / "README.md", b"hello")
    write(tmp_path / "download.sh", b"hello")
    assert open_source(str(tmp_path))["train"].classes == ["a", "b"]


def test_what_is_beside_the_splits_is_named(tmp_path, make_images):
    make_images(tmp_path, {"train/a": 2, "train/b": 2, "val/a": 1, "extra": 1, "": 1})
    with pytest.warns(UserWarning, match="2 folders and images beside them .* first is 000.jpg"):
        splits = open_source(str(tmp_path))
    assert [len(part) for part in splits.values()] == [4, 1]


def test_classes_that_are_linked_into_each_other_keep_their_images(tmp_path, make_images):
    make_images(tmp_path, {"a": 2, "b": 3})
    (tmp_path / "a/more").symlink_to("../b")
    (tmp_path / "b/more").symlink_to("../a")
    (tmp_path / "b/top").symlink_to("..")
    (tmp_path / "c").symlink_to("a")
    with pytest.warns(UserWarning, match="10 images that are in it by another path too"):
        source = open_source(str(tmp_path))["train"]
    assert source.classes == ["a", "b", "c"]
    assert source.labels.bincount().tolist() == [5, 5, 5]
    own = [f"a/00{i}.jpg" for i in range(2)] + [f"b/00{i}.jpg" for i in range(3)]
    assert {title for title in titles(source) if title.count("/") == 1} >= {*own}


def test_linked_classes_from_outside_are_classes(tmp_path, make_images):
    make_images(tmp_path / "store", {"cats": 2, "dogs": 1})
    (tmp_path / "photos").mkdir()
    for name in ("cats", "dogs"):
        (tmp_path / "photos" / name).symlink_to(tmp_path / "store" / name)
    source = open_source(str(tmp_path / "photos"))["train"]
    assert titles(source) == ["cats/000.jpg", "cats/001.jpg", "dogs/000.jpg"]
    assert source.labels.tolist() == [0, 0, 1]


def test_a_folder_that_cannot_be_listed_is_named(tmp_path, make_images, monkeypatch):
    make_images(tmp_path, {"a": 1, "b": 1, "lost": 1})
    scandir = os.scandir

    def refuse(folder):
        if Path(folder).name == "lost":
            raise PermissionError(13, "Permission denied", str(folder))
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.warns(UserWarning, match=r"1 folders cannot be read.*lost \(Permission denied\)"):
        assert len(open_source(str(tmp_path))["train"]) == 2


def test_files_that_never_end_are_named_and_not_waited_for(tmp_path, make_images):
    make_images(tmp_path, {"": 6})
    os.mkfifo(tmp_path / "pipe.jpg")
    (tmp_path / "zeros.jpg").symlink_to("/dev/zero")
    source = open_source(str(tmp_path))["train"]
    assert len(source.content_fingerprint()) == 16
    bad = [bad for batch in load_batches(source, 0, 2) for bad in batch.bad]
    names = {Path(title).name: reason for title, reason in bad}
    assert names.keys() == {"pipe.jpg", "zeros.jpg"}
    assert "a FIFO" in names["pipe.jpg"] and "a device" in names["zeros.jpg"]


@pytest.mark.parametrize("name", ["train", "Train", "Training"])
def test_train_beside_other_folders_is_a_class(tmp_path, make_images, name):
    make_images(tmp_path, {name: 2, "car": 2, "plane": 2})
    splits = open_source(str(tmp_path))
    assert list(splits) == ["train"]
    assert splits["train"].classes == sorted([name, "car", "plane"])


def test_hidden_files_are_ignored_and_other_files_counted(tmp_path, make_images):
    make_images(tmp_path, {"a": 1, "b": 1, ".cache": 1, "a/.thumbs": 1})
    shutil.copy(tmp_path / "a/000.jpg", tmp_path / "a/._000.jpg")
    write(tmp_path / "notes.txt", b"hello")
    write(tmp_path / "a/photo.HEIC", b"hello")
    write(tmp_path / "b/photo.heic", b"hello")
    write(tmp_path / "b/photo", b"hello")
    shutil.copy(tmp_path / "a/000.jpg", tmp_path / "a/LOUD.JPEG")
    left_out = r"left out 4 other files \(2 \.heic, 1 \.txt, 1 without extension\)"
    with pytest.warns(UserWarning, match=left_out):
        source = open_source(str(tmp_path))["train"]
    assert titles(source) == ["a/000.jpg", "a/LOUD.JPEG", "b/000.jpg"]


def test_an_empty_folder_is_refused_with_what_it_needs(tmp_path):
    write(tmp_path / "a/photo.heic", b"hello")
    needs = r"no image found, but 1 other files \(1 \.heic\); need files ending in .*\.jpg"
    with pytest.raises(ValueError, match=needs) as caught:
        open_source(str(tmp_path))
    assert str(tmp_path) in str(caught.value)


def test_what_is_no_source_is_refused_with_what_is(tmp_path):
    with pytest.raises(ValueError, match=r"nothing there; need a folder .*cifar10"):
        open_source(str(tmp_path / "missing"))
    with pytest.raises(ValueError, match=r"neither \.npz nor \.npy"):
        open_source(str(write(tmp_path / "table.csv", b"1,2")))


# Named datasets and the sample


def test_a_missing_named_dataset_is_reported_in_one_line(tmp_path, monkeypatch):
    attempts = []

    def no_network(root, *, download, **arguments):
        attempts.append((root, download, arguments))
        raise URLError("no route") if download else RuntimeError("Dataset not found")

    monkeypatch.setenv("MEANSHIFT_DATA", str(tmp_path / "deep"))
    monkeypatch.setattr(torchvision.datasets, "CIFAR10", no_network)
    with pytest.raises(
        ValueError, match=r"cifar10: .*no route.*; put torchvision's CIFAR10"
    ) as caught:
        open_source("CIFAR10")
    message = str(caught.value)
    assert "\n" not in message
    assert str(tmp_path / "deep") in message and "MEANSHIFT_DATA" in message
    assert attempts == [
        (tmp_path / "deep", download, {"train": True}) for download in (False, True)
    ]


def write_idx(path, array):
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    write(path, header + array.tobytes())


def test_a_named_dataset_of_arrays_that_is_there(tmp_path, monkeypatch):
    gray = RANDOM.integers(0, 256, (30, 28, 28), dtype=np.uint8)
    labels = (np.arange(30) % 10).astype(np.uint8)
    raw = tmp_path / "MNIST" / "raw"
    for split, part in (("train", slice(0, 20)), ("t10k", slice(20, 30))):
        for name, array in (("images-idx3", gray[part]), ("labels-idx1", labels[part])):
            write_idx(raw / f"{split}-{name}-ubyte", array)
    monkeypatch.setenv("MEANSHIFT_DATA", str(tmp_path))
    splits = open_source("mnist")
    assert list(splits) == ["train", "test"]
    assert splits["train"].uniform
    for split, part in (("train", slice(0, 20)), ("test", slice(20, 30))):
        source = splits[split]
        pixels = source.read_batch(torch.arange(len(source))).numpy()
        assert np.array_equal(pixels, gray[part][..., None])
        assert source.labels.tolist() == labels[part].tolist()
    assert splits["train"].classes[7] == "7 - seven"


def test_a_named_dataset_of_files_that_is_there(tmp_path, monkeypatch, make_images):
    root = make_images(tmp_path / "eurosat" / "2750", {"Forest": 2, "River": 1})
    write(root / "River" / "001.jpg", b"hello")
    monkeypatch.setenv("MEANSHIFT_DATA", str(tmp_path))
    splits = open_source("eurosat")
    assert list(splits) == ["train"]
    source = splits["train"]
    assert source.classes == ["Forest", "River"]
    assert source.labels.tolist() == [0, 0, 1, 1]
    assert torch.equal(source.read(2), read_image(root / "River" / "000.jpg"))
    with pytest.raises(UnreadableSample, match=r"River/001.jpg"):  # the file, not a number
        source.read(3)


def test_unlabeled_named_data_has_no_labels(monkeypatch):
    class Unlabeled:
        def __init__(self, _root, *, split, **_):
            self.classes = ["cat", "dog", "fox"]
            self.data = PIXELS.transpose(0, 3, 1, 2)
            self.labels = np.full(12, -1) if split == "unlabeled" else LABELS

    monkeypatch.setattr(torchvision.datasets, "STL10", Unlabeled)
    splits = open_source("stl10")
    for source in splits.values():
        assert np.array_equal(source.read_batch(torch.arange(12)).numpy(), PIXELS)
    assert splits["train"].labels is None
    assert splits["test"].labels.tolist() == LABELS.tolist()


def test_the_sample_is_balanced():
    splits = open_source("sample")
    assert list(splits) == ["train", "test"]
    for part, count in zip(splits.values(), (1000, 200), strict=True):
        assert len(part) == 10 * count
        assert part.labels.bincount().tolist() == [count] * 10
        assert part.read_batch(torch.arange(3)).shape == (3, 32, 32, 3)
        assert part.classes == "airplane automobile bird cat deer dog frog horse ship truck".split()
    images = torch.cat([p.read_batch(torch.arange(len(p))).flatten(1) for p in splits.values()])
    assert len({row.tobytes() for row in images.numpy()}) > 11_980
