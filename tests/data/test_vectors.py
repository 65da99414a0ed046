"""Vectors: arrays of two axes, embeddings that this program has written, and Parquet files."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from meanshift.data import open_source, train_and_validation
from meanshift.evaluation.embed import embed
from meanshift.models.weights import load_weights
from meanshift.runtime.errors import Note
from tests.support.sources import open_one, titles

ROWS = np.arange(24, dtype="float32").reshape(6, 4)
LABELS = ["cat", None, "dog", "cat", "dog", "dog"]
SPLITS = ["train", "train", "test", "train", "test", "train"]


@pytest.fixture
def write(tmp_path):
    """Write the columns of a Parquet file; return its path."""

    def write(**columns):
        pq.write_table(pa.table(columns), tmp_path / "a.parquet")
        return str(tmp_path / "a.parquet")

    return write


def assert_is_rows(source, rows):
    """The source has these rows of ROWS, one by one and together."""
    assert source.kind == "vector" and source.uniform and len(source) == len(rows)
    assert torch.equal(source.read(0), torch.from_numpy(ROWS[rows[0]]))
    everything = source.sample_batch(torch.arange(len(source)))
    assert torch.equal(everything, torch.from_numpy(ROWS[rows]))


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "uint8", "float16"])
def test_an_array_of_two_axes_holds_vectors(tmp_path, dtype):
    np.save(tmp_path / "a.npy", ROWS.astype(dtype))
    source = open_one(tmp_path / "a.npy")
    assert torch.equal(source.sample(2), torch.from_numpy(ROWS[2]))  # of float32
    assert (source.sample_spec.kind, source.sample_spec.channels) == ("vector", 4)


def test_splits_of_an_npz(tmp_path):
    np.savez(tmp_path / "a.npz", x_train=ROWS[:4], y_train=[0, 1, 0, 1], x_test=ROWS[4:])
    splits = open_source(str(tmp_path / "a.npz"))
    assert_is_rows(splits["train"], [0, 1, 2, 3])
    assert_is_rows(splits["test"], [4, 5])
    assert splits["train"].labels.tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize("suffix", [".npz", ".parquet"])
def test_embeddings_of_this_program_are_a_source(tmp_path, make_images, suffix):
    counts = {"train/a": 3, "train/b": 2, "val/a": 1, "val/b": 1}
    photos = make_images(tmp_path / "photos", counts, size=(8, 8))
    out = tmp_path / f"e{suffix}"
    count, columns = embed(load_weights("pixels"), str(photos), out, device="cpu", image_size=8)
    splits = open_source(str(out))
    assert list(splits) == ["train", "val"] and count == 7
    train, validation = train_and_validation(str(out), "auto", seed=0)
    assert titles(train) == ["a/000.jpg", "a/001.jpg", "a/002.jpg", "b/000.jpg", "b/001.jpg"]
    assert train.classes == ["a", "b"] and train.labels.tolist() == [0, 0, 0, 1, 1]
    assert validation.labels.tolist() == [0, 1]
    assert train.read(0).shape == (columns,) == (3072,)
    assert not torch.equal(train.read(0), train.read(1))


def test_embeddings_without_labels(tmp_path, make_images):
    photos = make_images(tmp_path / "photos", {"": 3}, size=(8, 8))
    embed(load_weights("pixels"), str(photos), tmp_path / "e.npz", device="cpu")
    assert not open_one(tmp_path / "e.npz").labeled


@pytest.mark.parametrize("name", ["embedding", "features", "anything"])
@pytest.mark.parametrize("fixed", [False, True], ids=["list", "fixed size"])
def test_a_column_of_lists_holds_the_vectors(write, name, fixed):
    kind = pa.list_(pa.float32(), 4) if fixed else pa.list_(pa.float64())
    lists = pa.array(ROWS.tolist(), kind)
    path = write(
        id=list(range(6)), **{name: lists}, label=LABELS, split=SPLITS, file=list("abcdef")
    )
    splits = open_source(path)
    assert list(splits) == ["train", "test"]
    assert_is_rows(splits["train"], [0, 1, 3, 5])
    assert_is_rows(splits["test"], [2, 4])
    assert splits["train"].classes == splits["test"].classes == ["cat", "dog"]
    assert splits["train"].labels.tolist() == [0, -1, 0, 1]
    assert titles(splits["test"]) == ["c", "e"]


@pytest.mark.parametrize("label", ["label", "target", "class", "y"])
def test_columns_of_numbers_are_those_of_the_vectors(write, label):
    columns = {f"c{index}": ROWS[:, index] for index in range(3)}
    whole = ROWS[:, 3].astype("int64")
    path = write(name=list("abcdef"), **columns, count=whole, **{label: [2, 0, 1, 1, 0, -1]})
    with pytest.warns(Note, match="1 columns are not numbers and left out: name"):
        source = open_one(path)
    assert_is_rows(source, list(range(6)))
    assert source.labels.tolist() == [2, 0, 1, 1, 0, -1] and source.classes == ["0", "1", "2"]
    assert titles(source)[:2] == ["#0", "#1"]


def test_numbers_of_rows_are_no_columns(write):
    path = write(id=[5, 4], __index_level_0__=[5, 4], a=[1, None], b=[0.5, 2.5], c=[True, None])
    source = open_one(path)
    assert source.read(0).tolist() == [1.0, 0.5, 1.0]
    assert source.read(1)[1] == 2.5 and source.read(1)[[0, 2]].isnan().all()


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"embedding": [[1.0, 2.0], [3.0]]}, "lists of `embedding` differ in length"),
        ({"embedding": [[1.0, 2.0], None]}, "lists of `embedding` differ in length"),
        ({"name": ["a", "b"]}, "no column of numbers or of lists"),
        ({"label": [0, 1]}, "no column of numbers or of lists"),
        ({"a": [1.0, 2.0], "split": ["val", "test"]}, "need some to train on"),
        ({"embedding": [["a"], ["b"]]}, "`embedding` are not numbers"),
    ],
)
def test_what_is_no_table_of_vectors(write, columns, message):
    with pytest.raises(ValueError, match=message):
        open_source(write(**columns))


def test_a_damaged_file_is_named(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and nothing")
    with pytest.raises(ValueError, match=r"a.parquet: not a readable Parquet file"):
        open_source(str(tmp_path / "a.parquet"))


@pytest.mark.parametrize("missing", [None, float("nan"), float("inf")])
def test_a_missing_value_is_named(write, missing):
    source = open_one(write(a=[1.0, 2.0, missing], b=[1.0, 2.0, 3.0], file=["x", "y", "z"]))
    assert source.sample_batch(torch.tensor([0, 1])).shape == (2, 2)
    with pytest.raises(ValueError, match=r"a.parquet: z has values that are not finite"):
        source.sample_batch(torch.arange(3))
    assert all(np.isfinite(source.sample_spec.mean))
