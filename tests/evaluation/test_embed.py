"""Embeddings in a file: each row belongs to its image, in every format."""

import gc
import os
import sys

import numpy as np
import pytest
import torch
from pyarrow import parquet
from torch import nn

from meanshift import config
from meanshift.data import open_source
from meanshift.evaluation import embed as module
from meanshift.evaluation.embed import embed
from meanshift.models.encoder import Encoder
from meanshift.models.features import extract_features
from meanshift.models.weights import Weights
from meanshift.runtime.files import atomic_writer

CPU = torch.device("cpu")
SUFFIXES = pytest.mark.parametrize("suffix", [".npz", ".parquet"])


@pytest.fixture(scope="module")
def encoder():
    torch.manual_seed(0)
    settings = config.Encoder(name="resnet10", stem="small-stride2", width=0.125)
    return Encoder(settings, dim=5, image_size=16).eval()


@pytest.fixture
def weights(encoder, tmp_path):
    return Weights(
        "toy", encoder.backbone, "a toy", 16, tmp_path / "run", projector=encoder.projector
    )


@pytest.fixture
def photos(tmp_path, make_images):
    """Two splits with class folders."""
    counts = {"train/ant": 3, "train/bee": 2, "val/bee": 2, "val/ant": 1}
    return make_images(tmp_path / "photos", counts, size=(20, 26))


def read(path):
    """The columns of either format: lists, and the embeddings as an array."""
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as arrays:
            assert sorted(arrays.files) == ["embedding", "file", "id", "label", "split"]
            columns = {name: arrays[name] for name in arrays.files}
        assert columns["id"].dtype == np.int64
        labels = [label or None for label in columns["label"].tolist()]
        lists = {name: columns[name].tolist() for name in ("file", "id", "split")}
        return {**lists, "label": labels, "embedding": columns["embedding"]}
    table = parquet.read_table(path)
    assert table.column_names == ["file", "id", "split", "label", "embedding"]
    assert str(table.schema.field("embedding").type).startswith("fixed_size_list<element: float")
    columns = table.to_pydict()
    return {**columns, "embedding": np.array(columns["embedding"], np.float32)}


def expected_rows(network, source, image_size=16, **options):
    rows = extract_features(network, source, image_size=image_size, device=CPU, **options)
    return rows.numpy()


def visible(folder):
    return sorted(path.name for path in folder.iterdir())


@SUFFIXES
def test_names_ids_splits_labels_and_embeddings_are_those_of_the_images(
    weights, photos, tmp_path, suffix
):
    out = tmp_path / "deep" / "er" / f"a{suffix}"
    assert embed(weights, str(photos), out) == (8, 64)
    columns, splits = read(out), open_source(str(photos))
    assert columns["file"] == [
        *(f"ant/{index:03d}.jpg" for index in range(3)),
        *(f"bee/{index:03d}.jpg" for index in range(2)),
        "ant/000.jpg",
        *(f"bee/{index:03d}.jpg" for index in range(2)),
    ]
    assert columns["id"] == [0, 1, 2, 3, 4, 0, 1, 2]
    assert columns["split"] == ["train"] * 5 + ["val"] * 3
    assert columns["label"] == ["ant"] * 3 + ["bee"] * 2 + ["ant"] + ["bee"] * 2
    expected = [expected_rows(weights.backbone, source) for source in splits.values()]
    assert columns["embedding"].dtype == np.float32
    assert np.array_equal(columns["embedding"], np.concatenate(expected))
    assert visible(out.parent) == [out.name]


def test_both_formats_contain_the_same(weights, photos, tmp_path):
    for suffix in (".npz", ".parquet"):
        embed(weights, str(photos), tmp_path / f"a{suffix}")
    npz, table = read(tmp_path / "a.npz"), read(tmp_path / "a.parquet")
    assert np.array_equal(npz.pop("embedding"), table.pop("embedding"))
    assert npz == table


@SUFFIXES
def test_arrays_have_numbers_for_names(weights, tmp_path, suffix):
    pixels = np.random.default_rng(0).integers(0, 256, (300, 16, 16, 3), dtype=np.uint8)
    np.savez(tmp_path / "a.npz", x_train=pixels, y_train=np.arange(300) % 3)
    out = tmp_path / f"out{suffix}"
    assert embed(weights, str(tmp_path / "a.npz"), out) == (300, 64)
    columns = read(out)
    assert columns["file"] == [f"#{index}" for index in range(300)]
    assert columns["label"] == [str(index % 3) for index in range(300)]
    source = open_source(str(tmp_path / "a.npz"))["train"]
    assert np.array_equal(columns["embedding"], expected_rows(weights.backbone, source))


@SUFFIXES
def test_many_images_are_written_a_part_at_a_time(weights, photos, tmp_path, suffix, monkeypatch):
    embed(weights, str(photos), tmp_path / f"complete{suffix}")
    monkeypatch.setattr(module, "_ROWS", 2)
    embed(weights, str(photos), tmp_path / f"parts{suffix}")
    complete, parts = read(tmp_path / f"complete{suffix}"), read(tmp_path / f"parts{suffix}")
    assert np.array_equal(complete.pop("embedding"), parts.pop("embedding"))
    assert complete == parts
    if suffix == ".parquet":
        assert parquet.ParquetFile(tmp_path / "parts.parquet").num_row_groups == 5


@SUFFIXES
def test_unlabeled_images_have_no_label(weights, tmp_path, make_images, suffix):
    root = make_images(tmp_path / "flat", {"": 3}, size=(20, 20))
    out = tmp_path / f"a{suffix}"
    embed(weights, str(root), out)
    assert read(out)["label"] == [None] * 3
    if suffix == ".npz":
        assert np.load(out)["label"].tolist() == [""] * 3


@SUFFIXES
def test_a_csv_can_give_the_labels_and_leave_some_out(weights, photos, tmp_path, suffix):
    path = tmp_path / "table.csv"
    path.write_text("file,label\ntrain/ant/001.jpg,été\nval/bee/000.jpg,snow\n")
    with pytest.warns(UserWarning, match="2 of them among the 8 images"):
        embed(weights, str(photos), tmp_path / f"a{suffix}", labels=path)
    labels = [None, "été", None, None, None, None, "snow", None]
    assert read(tmp_path / f"a{suffix}")["label"] == labels


@SUFFIXES
def test_the_output_of_the_projector_can_be_chosen(weights, encoder, photos, tmp_path, suffix):
    plain, projected = tmp_path / f"a{suffix}", tmp_path / f"b{suffix}"
    embed(weights, str(photos), plain)
    assert embed(weights, str(photos), projected, projector=True) == (8, 5)
    network = nn.Sequential(encoder.backbone, encoder.projector)
    train = open_source(str(photos))["train"]
    assert np.array_equal(read(projected)["embedding"][:5], expected_rows(network, train))
    assert embed(weights, str(photos), plain) == (8, 64)  # not those of the projector


def test_size_and_crop_can_be_chosen(weights, photos, tmp_path):
    out = tmp_path / "a.npz"
    embed(weights, str(photos), out, image_size=20, resize=24)
    train = open_source(str(photos))["train"]
    expected = expected_rows(weights.backbone, train, 20, resize=24)
    assert np.array_equal(read(out)["embedding"][:5], expected)
    assert not np.array_equal(expected, expected_rows(weights.backbone, train))


@SUFFIXES
def test_an_unreadable_image_has_no_row_and_the_others_keep_their_ids(
    weights, photos, tmp_path, suffix
):
    (photos / "train/ant/001.jpg").write_bytes(b"")
    (photos / "val/bee/001.jpg").write_bytes(b"hello")
    out = tmp_path / f"a{suffix}"
    for _ in range(2):  # from the images, and from stored features
        with pytest.warns(UserWarning, match="images cannot be read and are left out") as warned:
            assert embed(weights, str(photos), out) == (6, 64)
        assert ["1 of 5" in str(w.message) for w in warned] == [True, False]
        assert "1 of 3" in str(warned[1].message)
    columns = read(out)
    assert columns["id"] == [0, 2, 3, 4, 0, 1]
    assert columns["split"] == ["train"] * 4 + ["val"] * 2
    assert columns["label"] == ["ant", "ant", "bee", "bee", "ant", "bee"]
    names = ["ant/000.jpg", "ant/002.jpg", "bee/000.jpg", "bee/001.jpg"]
    assert columns["file"] == [*names, "ant/000.jpg", "bee/000.jpg"]
    train = open_source(str(photos))["train"]
    with pytest.warns(UserWarning, match="replaced by gray"):
        expected = expected_rows(weights.backbone, train)
    assert np.array_equal(columns["embedding"][:4], expected[[0, 2, 3, 4]])


@SUFFIXES
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere all names are Unicode")
def test_a_file_name_that_is_no_unicode_can_be_written(weights, tmp_path, make_images, suffix):
    root = make_images(tmp_path / "flat", {"": 2}, size=(20, 20))
    (root / "001.jpg").rename(os.fsdecode(os.fsencode(root) + b"/caf\xe9.jpg"))
    embed(weights, str(root), tmp_path / f"a{suffix}")
    assert read(tmp_path / f"a{suffix}")["file"] == ["000.jpg", "caf\\udce9.jpg"]


def test_features_are_stored_beside_the_weights_and_used_again(weights, photos, tmp_path):
    calls = []
    handle = weights.backbone.register_forward_hook(lambda *_: calls.append(1))
    try:
        embed(weights, str(photos), tmp_path / "a.npz")
        assert len(calls) == 2
        embed(weights, str(photos), tmp_path / "b.parquet")
        assert len(calls) == 2
    finally:
        handle.remove()
    assert len(list((tmp_path / "run" / "features").glob("*.npy"))) == 2


@pytest.mark.parametrize("mode", [True, False])
def test_the_weights_do_not_change(weights, encoder, photos, tmp_path, mode):
    encoder.train(mode)
    before = {name: value.clone() for name, value in encoder.state_dict().items()}
    embed(weights, str(photos), tmp_path / "a.npz", projector=True)
    assert all(torch.equal(value, before[name]) for name, value in encoder.state_dict().items())
    assert all(part.training == mode for part in encoder.modules())
    encoder.eval()


# What is refused, and what fails


def test_without_a_projector_its_output_is_refused(encoder, photos, tmp_path):
    weights = Weights("toy", encoder.backbone, "a toy", 16, tmp_path / "run")
    with pytest.raises(ValueError, match="a toy: has no projector"):
        embed(weights, str(photos), tmp_path / "a.npz", projector=True)
    assert visible(tmp_path) == ["photos"]


@pytest.mark.parametrize("name", ["a.csv", "a", "a.npy", "npz", "a.npz.gz", "a.NPZ"])
def test_other_endings_are_refused_before_any_work(weights, photos, tmp_path, name):
    with pytest.raises(ValueError, match=r"need a name that ends in \.npz or \.parquet") as caught:
        embed(weights, str(photos), tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)
    assert visible(tmp_path) == ["photos"]


@SUFFIXES
def test_when_nothing_can_be_read_there_is_no_file(weights, tmp_path, make_images, suffix):
    root = make_images(tmp_path / "flat", {"": 2})
    for path in root.iterdir():
        path.write_bytes(b"")
    with pytest.raises(ValueError, match="none of the 2 images can be read"):
        embed(weights, str(root), tmp_path / f"a{suffix}")
    assert visible(tmp_path) == ["flat", "run"]


@SUFFIXES
@pytest.mark.parametrize("old", [b"an older file", None], ids=["older", "none"])
@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(28, "No space left on device"), r"could not be written \(.*No space.*; make room"),
        (KeyboardInterrupt(), None),
    ],
    ids=["full", "stopped"],
)
def test_a_file_is_complete_or_not_there(
    weights, photos, tmp_path, suffix, old, error, message, monkeypatch
):
    columns, out = module._columns, tmp_path / "out" / f"a{suffix}"
    out.parent.mkdir()
    if old is not None:
        out.write_bytes(old)

    def fails(splits):
        yield next(columns(splits))
        raise error

    monkeypatch.setattr(module, "_columns", fails)
    with pytest.raises(type(error), match=message) as caught:
        embed(weights, str(photos), out)
    if message:
        assert str(caught.value).startswith(f"{out}: ")
    assert visible(out.parent) == ([] if old is None else [out.name])
    assert old is None or out.read_bytes() == old
    monkeypatch.undo()
    assert embed(weights, str(photos), out) == (8, 64)
    assert len(read(out)["id"]) == 8


@SUFFIXES
@pytest.mark.parametrize("room", [0, 1500])
def test_a_full_disk_leaves_no_incomplete_file(
    weights, photos, tmp_path, suffix, room, monkeypatch
):
    class Full:
        def __init__(self, file):
            self.file = file

        def __getattr__(self, name):
            return getattr(self.file, name)

        def write(self, content):
            if self.file.tell() + len(content) > room:
                raise OSError(28, "No space left on device")
            return self.file.write(content)

    out = tmp_path / "out" / f"a{suffix}"
    embed(weights, str(photos), tmp_path / f"other{suffix}")  # stores the features
    monkeypatch.setattr(module, "atomic_writer", lambda path: _Wrapped(atomic_writer(path), Full))
    with pytest.raises(OSError, match=r"No space left on device.*make room") as caught:
        embed(weights, str(photos), out)
    assert str(caught.value).startswith(f"{out}: ")
    assert visible(out.parent) == []
    del caught
    gc.collect()  # here pyarrow's writer reports the full disk for the last time


class _Wrapped:
    """A context manager whose file is wrapped."""

    def __init__(self, inner, wrap):
        self.inner, self.wrap = inner, wrap

    def __enter__(self):
        return self.wrap(self.inner.__enter__())

    def __exit__(self, *error):
        return self.inner.__exit__(*error)
