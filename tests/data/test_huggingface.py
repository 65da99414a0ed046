"""Hugging Face datasets, opened by the `datasets` library, give the images they were made of."""

import pickle
import sys

import pytest
import torch
from fsspec.registry import _registry

from meanshift.data import UnreadableSample, huggingface, open_source
from meanshift.data.folder import FolderSource
from meanshift.data.packed import pack
from tests.support.exact import assert_same
from tests.support.sources import (
    assert_damage_is_reported,
    assert_is_folder,
    assert_same_images,
    damaged_columns,
    image_cells,
    load_batches,
    open_one,
    table_columns,
)

pytestmark = pytest.mark.extras
datasets = pytest.importorskip("datasets")
huggingface_hub = pytest.importorskip("huggingface_hub")

CLASSES = ["a", "b"]


@pytest.fixture(autouse=True)
def _offline(tmp_path, monkeypatch):
    """Nothing is requested from the network, cached outside or printed to a terminal."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    for module in (datasets.config, huggingface_hub.constants):
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_TELEMETRY", True)
    datasets.disable_progress_bars()


@pytest.fixture
def photos(tmp_path, make_images):
    return make_images(tmp_path / "photos", {"a": 7, "b": 6})


def dataset_of(root, **columns):
    """The dataset of a folder: images as bytes, their classes, and another column."""
    columns = table_columns(root, CLASSES) | columns
    features = datasets.Features(
        id=datasets.Value("int64"), image=datasets.Image(), label=datasets.ClassLabel(names=CLASSES)
    )
    return datasets.Dataset.from_dict(columns, features=features)


def write_parquet(dataset, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    dataset.to_parquet(path)
    return path


def open_saved(dataset, path):
    dataset.save_to_disk(path)
    return open_one(f"hf:{path}")


def batches_of(source, workers):
    return [vars(batch) for batch in load_batches(source, 0, 6, batch_size=3, workers=workers)]


def test_a_saved_dataset_is_the_folder(tmp_path, photos):
    source = open_saved(dataset_of(photos), tmp_path / "saved")
    assert_is_folder(source, photos)
    assert (source.title(3), source.blockwise) == ("#3", False)
    assert_same_images(pickle.loads(pickle.dumps(source)), FolderSource(photos))
    assert_same(batches_of(source, 2), batches_of(source, 0))


@pytest.mark.parametrize("kind", ["hf", "hf+stream"])
def test_parquet_is_the_folder(tmp_path, photos, kind):
    dataset = dataset_of(photos)
    for number, rows in enumerate((range(7), range(7, 13))):
        write_parquet(dataset.select(rows), tmp_path / f"parquet/part-{number}.parquet")
    root = tmp_path / "parquet"
    assert_is_folder(open_one(f"{kind}:{root}"), photos)
    assert len(open_one(f"{kind}:{root / 'part-1.parquet'}")) == 6
    assert len(open_one(f"{kind}:{root / 'part-{0..1}.parquet'}")) == 13


def test_splits_have_our_names_and_order(tmp_path, photos):
    dataset = dataset_of(photos)
    sizes = {"test": 1, "validation": 2, "more": 3, "train": 4}
    parts = datasets.DatasetDict(
        {split: dataset.select(range(size)) for split, size in sizes.items()}
    )
    parts.save_to_disk(tmp_path / "saved")
    splits = open_source(f"hf:{tmp_path / 'saved'}")
    found = [(split, len(source)) for split, source in splits.items()]
    assert found == [("train", 4), ("val", 2), ("test", 1), ("more", 3)]
    del parts["train"]
    parts.save_to_disk(tmp_path / "other")
    with pytest.raises(ValueError, match="has the splits test, validation, more; need one named"):
        open_source(f"hf:{tmp_path / 'other'}")


def test_a_part_of_train_is_a_split_of_its_own(tmp_path, photos):
    dataset = dataset_of(photos)
    parts = {"train": 8, "train_small": 2, "test_a": 1, "test_b": 2}
    parts = {split: dataset.select(range(size)) for split, size in parts.items()}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "saved")
    splits = open_source(f"hf:{tmp_path / 'saved'}")
    sizes = {split: len(source) for split, source in splits.items()}
    assert sizes == {"train": 8, "test": 3, "train_small": 2}
    assert_same_images(splits["train"], FolderSource(photos).subset(torch.arange(8)))


def test_labels_may_be_words(tmp_path, photos):
    words = ["dog", None, *["cat"] * 11]
    dataset = datasets.Dataset.from_dict({"image": image_cells(photos), "label": words})
    source = open_saved(dataset, tmp_path / "saved")
    assert source.classes == ["cat", "dog"]
    assert source.labels.tolist() == [1, -1, *[0] * 11]


def test_splits_by_the_names_of_files_and_folders(tmp_path, photos):
    dataset = dataset_of(photos)
    for name, rows in (
        ("data/train-00000-of-00002", range(3)),
        ("data/train-00001-of-00002", range(3, 5)),
        ("data/validation-00000-of-00001", range(2)),
        ("test/0000", range(1)),
    ):
        write_parquet(dataset.select(rows), tmp_path / f"parquet/{name}.parquet")
    splits = open_source(f"hf:{tmp_path / 'parquet'}")
    found = [(split, len(source)) for split, source in splits.items()]
    assert found == [("train", 5), ("val", 2), ("test", 1)]
    assert_same_images(splits["train"], FolderSource(photos).subset(torch.arange(5)))


def test_images_given_as_paths_are_read_from_their_files(tmp_path, photos):
    files = [{"bytes": None, "path": str(file)} for file in sorted(photos.rglob("*.jpg"))]
    files[2] = None
    dataset = dataset_of(photos, image=files)
    saved = open_saved(dataset, tmp_path / "saved")  # saving embeds the bytes
    in_memory = huggingface.HubSource(dataset, name="in memory")
    for source in (saved, in_memory):
        assert torch.equal(source.read(0), FolderSource(photos).read(0))
    gone = [{"bytes": None, "path": str(tmp_path / "gone.jpg")}]
    lost = huggingface.HubSource(dataset_of(photos, id=[0], image=gone, label=[0]), name="lost")
    with pytest.raises(UnreadableSample, match=r"gone\.jpg"):
        lost.read(0)
    with pytest.raises(UnreadableSample, match="neither bytes nor"):
        saved.read(2)


def test_bad_images_are_unreadable_and_unknown_labels_stay_unknown(tmp_path, photos):
    dataset = dataset_of(photos, **damaged_columns(photos))
    source = open_one(f"hf:{write_parquet(dataset, tmp_path / 'x.parquet')}")
    assert_damage_is_reported(source, photos)


def test_columns_of_other_programs(tmp_path, photos):
    contents = [cell["bytes"] for cell in image_cells(photos)]
    columns = {"number": list(range(13)), "jpg": contents, "labels": [3, *[1] * 12]}
    source = open_saved(datasets.Dataset.from_dict(columns), tmp_path / "x")
    assert_same_images(source, FolderSource(photos))
    assert source.classes == ["0", "1", "2", "3"]
    assert source.labels.tolist() == [3, *[1] * 12]
    bare = open_saved(datasets.Dataset.from_dict({"jpg": contents}), tmp_path / "bare")
    assert bare.labels is None
    text = datasets.Dataset.from_dict({"text": ["a"], "n": [1]})
    with pytest.raises(ValueError, match="has the columns text, n; need one of images"):
        open_saved(text, tmp_path / "text")


def test_fingerprints_see_other_images_and_other_labels(tmp_path, photos):
    first = open_saved(dataset_of(photos), tmp_path / "first")
    images = image_cells(photos)
    for name, columns in (
        ("same", {}),
        ("labels", {"label": [0] * 13}),
        ("images", {"image": images[::-1]}),
    ):
        source = open_saved(dataset_of(photos, **columns), tmp_path / name)
        assert (source.fingerprint() == first.fingerprint()) == (name == "same")
        assert source.content_fingerprint() != first.content_fingerprint()


def test_a_dataset_can_be_packed(tmp_path, photos):
    dataset_of(photos).save_to_disk(tmp_path / "saved")
    spec = f"hf:{tmp_path / 'saved'}"
    assert_is_folder(pack(open_source(spec), tmp_path / "out", name=spec)["train"], photos)


@pytest.mark.parametrize("spec", ["hf:nobody/nothing-of-this-name", "hf:{}", "hf:{}/x.txt"])
def test_what_is_no_dataset_is_refused(tmp_path, spec):
    (tmp_path / "x.txt").write_text("hello")
    with pytest.raises(ValueError, match=r"could not be opened \(.+\); need hf:NAME or hf:NAME:"):
        open_source(spec.format(tmp_path))


@pytest.mark.parametrize(
    ("module", "spec"), [("datasets", "hf:someone/photos"), ("huggingface_hub", "hf+stream:me/x")]
)
def test_a_missing_library_is_named_with_what_to_type(monkeypatch, module, spec):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(_registry, "hf", raising=False)  # imported by another test
    with pytest.raises(ValueError, match=rf"{module}.*pip install 'meanshift\[huggingface\]'"):
        open_source(spec)
