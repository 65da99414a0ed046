"""Parquet files that are streamed by row group give the images they were written from."""

import json
import pickle
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from fsspec import AbstractFileSystem
from fsspec.registry import _registry

from meanshift.config.recipes import recipe
from meanshift.data import (
    evaluation_splits,
    huggingface,
    open_source,
    remote,
    train_and_validation,
)
from meanshift.data.folder import FolderSource
from meanshift.data.packed import pack
from meanshift.data.source import block_order
from meanshift.runtime import checkpoint, rng
from meanshift.training.loop import pretrain
from tests.support.exact import assert_same
from tests.support.sources import (
    assert_damage_is_reported,
    assert_is_folder,
    assert_same_images,
    damaged_columns,
    image_cells,
    load_batches,
    open_one,
    serve_folder,
    table_columns,
)

CLASSES = ["a", "b"]


@pytest.fixture(autouse=True)
def _no_delays(monkeypatch):
    monkeypatch.setattr(remote, "RETRY_DELAYS", (0.0, 0.0))


@pytest.fixture
def photos(tmp_path, make_images):
    return make_images(tmp_path / "photos", {"a": 7, "b": 6})


def table_of(root, **columns):
    """A table as the `datasets` library writes it: images, their classes, and another column."""
    columns = table_columns(root, CLASSES) | columns
    features = {
        "id": {"dtype": "int64", "_type": "Value"},
        "image": {"_type": "Image"},
        "label": {"names": CLASSES, "_type": "ClassLabel"},
    }
    image_type = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    schema = pa.schema(
        {"id": pa.int64(), "image": image_type, "label": pa.int64()},
        metadata={"huggingface": json.dumps({"info": {"features": features}})},
    )
    return pa.table(columns, schema=schema)


def write_parquet(table, path, rows=2):
    """A file with so many rows in each row group."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=rows)
    return path


@pytest.fixture
def parquet(tmp_path, photos):
    """The images in two files with row groups of two."""
    table = table_of(photos)
    write_parquet(table.slice(0, 7), tmp_path / "parquet/part-0.parquet")
    write_parquet(table.slice(7), tmp_path / "parquet/part-1.parquet")
    return tmp_path / "parquet"


def open_stream(path):
    return open_one(f"hf+stream:{path}")


def batches_of(source, workers):
    return [vars(batch) for batch in load_batches(source, 0, 6, batch_size=3, workers=workers)]


# Files


def test_row_groups_are_the_folder(parquet, photos):
    source = open_stream(parquet)
    assert_is_folder(source, photos)
    assert [source.title(index) for index in (0, 6, 7, 12)] == [
        "part-0.parquet#0",
        "part-0.parquet#6",
        "part-1.parquet#0",
        "part-1.parquet#5",
    ]
    assert source.rows.tolist() == [2, 2, 2, 1, 2, 2, 2]
    assert len(open_stream(parquet / "part-*.parquet")) == 13
    assert_same(batches_of(source, 2), batches_of(source, 0))


def test_splits_by_the_names_of_files_and_folders(tmp_path, photos):
    table = table_of(photos)
    for name, start, count in (
        ("data/train-00000-of-00002", 0, 3),
        ("data/train-00001-of-00002", 3, 2),
        ("data/validation-00000-of-00001", 0, 2),
        ("test/0000", 0, 1),
    ):
        write_parquet(table.slice(start, count), tmp_path / f"parquet/{name}.parquet")
    splits = open_source(f"hf+stream:{tmp_path / 'parquet'}")
    sizes = [(split, len(source)) for split, source in splits.items()]
    assert sizes == [("train", 5), ("val", 2), ("test", 1)]
    assert_same_images(splits["train"], FolderSource(photos).subset(torch.arange(5)))


def test_a_part_of_train_is_a_split_of_its_own(tmp_path, photos):
    table = table_of(photos)
    for name, count in (("train-00000-of-00001", 8), ("train_small-00000-of-00001", 2)):
        write_parquet(table.slice(0, count), tmp_path / f"{name}.parquet")
    spec = f"hf+stream:{tmp_path}"
    sizes = {split: len(source) for split, source in open_source(spec).items()}
    assert sizes == {"train": 8, "train_small": 2}
    train, validation = train_and_validation(spec, "auto", seed=0)
    assert len(train) == 8 and validation is None  # not on images of train
    assert len(evaluation_splits(spec).test) == 2  # a quarter of train
    assert len(evaluation_splits(spec, split="train_small").test) == 2
    (tmp_path / "train-00000-of-00001.parquet").rename(tmp_path / "train_large.parquet")
    assert [(s, len(source)) for s, source in open_source(spec).items()] == [("train", 10)]


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int8(), pa.string())]
)
def test_labels_may_be_words(tmp_path, photos, kind):
    contents = [cell["bytes"] for cell in image_cells(photos)]
    words = pa.array(["dog", None, "", *["cat"] * 10]).cast(kind)
    pq.write_table(pa.table({"jpg": contents, "label": words}), tmp_path / "x.parquet")
    source = open_stream(tmp_path / "x.parquet")
    assert source.classes == ["cat", "dog"]
    assert source.labels.tolist() == [1, -1, -1, *[0] * 10]


def test_labels_of_other_types_are_named(tmp_path, photos):
    contents = [cell["bytes"] for cell in image_cells(photos)]
    pq.write_table(pa.table({"jpg": contents, "label": [0.5] * 13}), tmp_path / "x.parquet")
    with pytest.warns(UserWarning, match="the column label has the type double and is not used"):
        assert open_stream(tmp_path / "x.parquet").labels is None


def test_bad_images_are_unreadable_and_unknown_labels_stay_unknown(tmp_path, photos):
    table = table_of(photos, **damaged_columns(photos))
    source = open_stream(write_parquet(table, tmp_path / "x.parquet"))
    assert_damage_is_reported(source, photos)


def test_parquet_of_other_programs(tmp_path, photos):
    contents = [cell["bytes"] for cell in image_cells(photos)]
    columns = {"number": list(range(13)), "jpg": contents, "labels": [3, *[1] * 12]}
    pq.write_table(pa.table(columns), tmp_path / "x.parquet")
    source = open_stream(tmp_path / "x.parquet")
    assert_same_images(source, FolderSource(photos))
    assert source.classes == ["0", "1", "2", "3"]
    assert source.labels.tolist() == [3, *[1] * 12]
    pq.write_table(pa.table({"jpg": contents}), tmp_path / "bare.parquet")
    assert open_stream(tmp_path / "bare.parquet").labels is None
    pq.write_table(pa.table({"jpg": contents, "label": [-1] * 13}), tmp_path / "none.parquet")
    assert open_stream(tmp_path / "none.parquet").labels is None
    pq.write_table(pa.table({"text": ["a"], "n": [1]}), tmp_path / "text.parquet")
    with pytest.raises(ValueError, match="has the columns text, n; need one of images"):
        open_stream(tmp_path / "text.parquet")
    pq.write_table(pa.table({"jpg": contents, "label": [10**7] * 13}), tmp_path / "far.parquet")
    with pytest.raises(ValueError, match="a label is 10000000; need classes numbered from 0"):
        open_stream(tmp_path / "far.parquet")


def test_a_stream_can_be_packed(tmp_path, parquet, photos):
    spec = f"hf+stream:{parquet}"
    assert_is_folder(pack(open_source(spec), tmp_path / "out", name=spec)["train"], photos)


def test_content_fingerprints_see_other_images_and_other_labels(tmp_path, photos):
    kinds = {
        "same": {},
        "labels": {"label": [0] * 13},
        "images": {"image": image_cells(photos)[::-1]},
    }
    fingerprints = set()
    for name, columns in kinds.items():
        path = write_parquet(table_of(photos, **columns), tmp_path / f"{name}.parquet")
        fingerprints.add(open_stream(path).content_fingerprint())
    assert len(fingerprints) == 3


def test_files_of_several_datasets_are_refused(parquet, photos):
    table = table_of(photos).rename_columns(["id", "photo", "label"])
    write_parquet(table, parquet / "part-2.parquet")
    with pytest.raises(ValueError, match=r"part-2\.parquet has not the columns .* part-0\.parquet"):
        open_stream(parquet)


@pytest.mark.parametrize("name", ["none.parquet", "empty"])
def test_a_stream_of_nothing_is_refused(tmp_path, name):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no Parquet file there; need files that end"):
        open_stream(tmp_path / name)


def test_damaged_parquet_is_an_error_and_no_bad_image(parquet):
    path = parquet / "part-0.parquet"
    source = open_stream(path)
    content = bytearray(path.read_bytes())
    group = pq.read_metadata(path).row_group(0)
    columns = map(group.column, range(group.num_columns))
    (chunk,) = (column for column in columns if column.path_in_schema == "image.bytes")
    first = chunk.dictionary_page_offset or chunk.data_page_offset
    content[first : first + 40] = b"\xff" * 40  # the header of a page
    path.write_bytes(content)
    with pytest.raises(OSError, match=r"part-0\.parquet: not readable as Parquet"):
        source.read(0)
    path.write_bytes(b"PAR1 and no more")
    with pytest.raises(OSError, match=r"part-0\.parquet: not readable as Parquet .* write the"):
        open_stream(path)


def test_without_pyarrow_the_error_names_what_to_type(parquet, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"pyarrow; type: pip install 'meanshift\[parquet\]'"):
        open_stream(parquet)


# Row groups in memory


def test_a_copy_for_a_worker_has_no_row_group(parquet, photos):
    source = open_stream(parquet)
    source.read(0)
    assert source._cache
    copy = pickle.loads(pickle.dumps(source))
    assert not copy._cache
    assert_is_folder(copy, photos)


@pytest.fixture
def blocks_read(monkeypatch):
    """The row groups that are read, in order."""
    blocks = []
    read_block = huggingface.StreamedSource._read_block

    def record(source, block):
        blocks.append(block)
        return read_block(source, block)

    monkeypatch.setattr(huggingface.StreamedSource, "_read_block", record)
    return blocks


def test_an_epoch_reads_each_row_group_once_and_keeps_few(parquet, blocks_read, monkeypatch):
    monkeypatch.setattr(huggingface, "_BUDGET", 1)  # the smallest window
    source = open_stream(parquet)
    assert source.window == 2
    order = source.order(0, 3)
    assert torch.equal(order, block_order(0, 3, source.rows, window=2))
    for index in order.tolist():
        source.read(index)
        assert len(source._cache) <= 2
    assert sorted(blocks_read) == list(range(7))
    blocks_read.clear()
    for index in rng.permutation(0, 3, 13).tolist():
        source.read(index)
    assert len(blocks_read) > 7  # the cost of any other order


def test_the_least_recently_used_row_group_is_dropped(parquet, blocks_read, monkeypatch):
    monkeypatch.setattr(huggingface, "_BUDGET", 1)
    source = open_stream(parquet)
    for index in (0, 2, 0, 4, 0, 2):  # row groups 0 1 0 2 0 1
        source.read(index)
    assert blocks_read == [0, 1, 2, 1]


def test_the_window_follows_the_size_of_the_row_groups(parquet, monkeypatch):
    source = open_stream(parquet)
    assert source.window == 32
    mean = sum(source.sizes) / 7
    assert 2 * 500 < mean < 2 * 10_000
    monkeypatch.setattr(huggingface, "_BUDGET", int(5.5 * mean))
    other = open_stream(parquet)
    assert other.window == 5
    assert other.fingerprint() != source.fingerprint()  # its order is another
    monkeypatch.setattr(huggingface, "_LARGE", int(mean / 4))
    with pytest.warns(UserWarning, match="each worker keeps it in memory; write the files with sm"):
        open_stream(parquet)


def test_a_subset_of_a_stream_follows_its_row_groups(parquet):
    source = open_stream(parquet)
    subset = source.subset(torch.arange(0, 13, 3))
    expected = [index for index in source.order(1, 1).tolist() if index % 3 == 0]
    assert subset.indices[subset.order(1, 1)].tolist() == expected


# At an address


def test_remote_files_are_the_folder(parquet, photos):
    with serve_folder(parquet) as server:
        source = open_stream(f"{server.address}/part-{{0..1}}.parquet")
        assert_is_folder(source, photos)
        source._cache.clear()
        server.requests.clear()
        images = [source.read(0), source.read(1)]
        assert len(server.requests) == 1  # one for both: they share a row group
        server.fail = 1
        source.read(7)
        source._cache.clear()
        server.fail = 1000
        with pytest.raises(OSError, match=rf"{server.address}/part-0.parquet: could not be read"):
            source.read(0)
    assert torch.equal(images[1], FolderSource(photos).read(1))


def test_remote_files_in_workers(parquet):
    local = batches_of(open_stream(parquet), 0)
    with serve_folder(parquet) as server:
        remote = batches_of(open_stream(f"{server.address}/part-{{0..1}}.parquet"), 2)
    assert_same(remote, local)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Replaces the file system of the Hub: its files are below a folder."""

    class FakeHub(AbstractFileSystem):
        protocol = "hf"
        root = tmp_path / "hub"
        down = False

        def glob(self, pattern):
            top = self.root / self._strip_protocol(pattern).removesuffix("/**/*.parquet")
            found = top.rglob("*.parquet") if top.is_dir() else []
            return [file.relative_to(self.root).as_posix() for file in found]

        def info(self, path):
            size = (self.root / self._strip_protocol(path)).stat().st_size
            return {"size": size, "blob_id": "b10b"}

        def cat_file(self, path, start, end):
            if self.down:
                raise RuntimeError("no route")
            return (self.root / self._strip_protocol(path)).read_bytes()[start:end]

    monkeypatch.setitem(_registry, "hf", FakeHub)
    return FakeHub


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        ("datasets/me/test-set/data", "me/test-set"),
        ("datasets/me/test-set", "me/test-set"),
        ("datasets/me/test-set/large", "me/test-set:large"),
        ("datasets/me/test-set@refs/convert/parquet/default", "me/test-set"),
    ],
)
def test_a_dataset_of_the_hub(hub, photos, layout, name):
    table = table_of(photos)
    write_parquet(table, hub.root / layout / "train-00000.parquet")
    write_parquet(table.slice(0, 2), hub.root / layout / "test-00000.parquet")
    if ":" in name:
        write_parquet(table, hub.root / "datasets/me/test-set/small/train-00000.parquet")
    splits = open_source(f"hf+stream:{name}")
    sizes = [(split, len(source)) for split, source in splits.items()]
    assert sizes == [("train", 13), ("test", 2)]
    assert_is_folder(splits["train"], photos)
    splits["train"]._cache.clear()
    hub.down = True
    with pytest.raises(OSError, match=r"hf://datasets/me.*could not be read \(RuntimeError: no ro"):
        splits["train"].read(0)


def test_a_dataset_of_several_configs_needs_one(hub, photos):
    for config in ("large", "small"):
        write_parquet(table_of(photos), hub.root / f"datasets/me/x/{config}/train-0.parquet")
    for config in ("", ":tiny"):
        with pytest.raises(ValueError, match=r"have large, small; need hf\+stream:NAME:CONFIG"):
            open_source(f"hf+stream:me/x{config}")
    with pytest.raises(ValueError, match=r"Parquet files have none"):
        open_source("hf+stream:me/y")
    assert len(open_one("hf+stream:me/x:small")) == 13


# A run


def test_a_streamed_run_that_stops_continues_to_the_same_bits(tmp_path, parquet, monkeypatch):
    monkeypatch.setattr(huggingface, "_BUDGET", 1)
    settings = {
        "data.source": f"hf+stream:{parquet}", "data.image_size": 16, "data.workers": 0,
        "data.validation": 0.2, "encoder.width": 0.125, "encoder.stem": "small-stride2",
        "encoder.name": "resnet10", "method.bank_size": 6, "method.k": 2, "train.epochs": 2,
        "train.batch_size": 3, "optim.warmup_epochs": 1, "train.save_every": 0.3,
        "train.log_every": 1, "train.device": "cpu",
    }  # fmt: skip
    config = recipe("small").with_overrides(settings)
    whole = pretrain(config, tmp_path / "whole")
    reads = []
    read = huggingface.StreamedSource.read

    def failing(source, index):
        reads.append(index)
        if len(reads) == 14:
            raise OSError("lost")
        return read(source, index)

    monkeypatch.setattr(huggingface.StreamedSource, "read", failing)
    with pytest.raises(OSError, match="lost"):
        pretrain(config, tmp_path / "parts")
    parts = pretrain(config, tmp_path / "parts")
    assert len(reads) > 14
    (one, damaged), (two, also) = (checkpoint.latest(out / "checkpoints") for out in (whole, parts))
    assert not damaged and not also
    assert_same(two, one)
