"""Hugging Face datasets, mapped or streamed, give the images they were made from."""

import io
import pickle
import sys

import datasets
import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from meanshift.config import Views
from meanshift.config.recipes import recipe
from meanshift.data import UnreadableSample, huggingface, open_source, shards
from meanshift.data.folder import FolderSource
from meanshift.data.loader import batches
from meanshift.data.packed import pack
from meanshift.data.source import block_order
from meanshift.runtime import checkpoint, rng
from meanshift.training.loop import pretrain
from meanshift.transforms.augment import TwoViews
from tests.data.test_shards import serving
from tests.support.exact import assert_same

NAMES = ["a", "b"]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    """Nothing is asked of the network, kept outside or told to a terminal."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    for room in (datasets.config, huggingface_hub.constants):
        monkeypatch.setattr(room, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_TELEMETRY", True)
    datasets.disable_progress_bars()
    monkeypatch.setattr(shards, "WAITS", (0.0, 0.0))


@pytest.fixture
def photos(tmp_path, make_images):
    return make_images(tmp_path / "photos", {"a": 7, "b": 6})


def dataset_of(root, **more):
    """The dataset of a folder: images as bytes, their classes, and a column of no interest."""
    files = sorted(root.rglob("*.jpg"))
    columns = {
        "id": list(range(len(files))),
        "image": [{"bytes": file.read_bytes(), "path": None} for file in files],
        "label": [NAMES.index(file.parent.name) for file in files],
    }
    features = datasets.Features(
        id=datasets.Value("int64"), image=datasets.Image(), label=datasets.ClassLabel(names=NAMES)
    )
    return datasets.Dataset.from_dict(columns | more, features=features)


def parquet_of(dataset, path, rows=2):
    """A Parquet file with so many rows in each row group, as the Hub keeps them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = dataset.with_format("arrow")[:]
    table = table.replace_schema_metadata(dataset.features.arrow_schema.metadata)
    pq.write_table(table, path, row_group_size=rows)
    return path


@pytest.fixture
def parquet(tmp_path, photos):
    """The images in two files of row groups of two."""
    dataset = dataset_of(photos)
    for number, rows in enumerate((range(7), range(7, 13))):
        parquet_of(dataset.select(rows), tmp_path / f"parquet/part-{number}.parquet")
    return tmp_path / "parquet"


def open_one(spec):
    splits = open_source(spec)
    assert list(splits) == ["train"]
    return splits["train"]


def assert_same_images(ours, theirs):
    assert len(ours) == len(theirs)
    for index in range(len(theirs)):
        assert torch.equal(ours.read(index), theirs.read(index))


def assert_the_folder(source, photos):
    folder = FolderSource(photos)
    assert_same_images(source, folder)
    assert torch.equal(source.labels, folder.labels)
    assert source.classes == folder.classes


def drawn(source, workers):
    crop = TwoViews(Views(), seed=0, size=16).crop
    found = batches(source, crop, batch_size=3, seed=1, start=0, stop=6, workers=workers)
    return [vars(batch) for batch in found]


# Mapped


def test_a_saved_dataset_is_the_folder(tmp_path, photos):
    dataset_of(photos).save_to_disk(tmp_path / "saved")
    source = open_one(f"hf:{tmp_path / 'saved'}")
    assert_the_folder(source, photos)
    assert (source.title(3), source.blockwise) == ("#3", False)
    assert_same_images(pickle.loads(pickle.dumps(source)), FolderSource(photos))
    assert_same(drawn(source, 2), drawn(source, 0))


def test_parquet_is_the_folder(parquet, photos):
    assert_the_folder(open_one(f"hf:{parquet}"), photos)
    assert len(open_one(f"hf:{parquet / 'part-1.parquet'}")) == 6
    assert len(open_one(f"hf:{parquet / 'part-{0..1}.parquet'}")) == 13


def test_splits_have_our_names_and_order(tmp_path, photos):
    dataset = dataset_of(photos)
    parts = {"test": range(1), "validation": range(2), "more": range(3), "train": range(4)}
    held = datasets.DatasetDict({split: dataset.select(rows) for split, rows in parts.items()})
    held.save_to_disk(tmp_path / "saved")
    splits = open_source(f"hf:{tmp_path / 'saved'}")
    assert [(split, len(source)) for split, source in splits.items()] == [
        ("train", 4), ("val", 2), ("test", 1), ("more", 3)
    ]  # fmt: skip
    del held["train"]
    held.save_to_disk(tmp_path / "other")
    with pytest.raises(ValueError, match="has the splits test, validation, more; need one named"):
        open_source(f"hf:{tmp_path / 'other'}")


def test_images_kept_as_paths_are_read_from_their_files(tmp_path, photos):
    files = [{"bytes": None, "path": str(file)} for file in sorted(photos.rglob("*.jpg"))]
    files[2] = None
    dataset_of(photos, image=files).save_to_disk(tmp_path / "saved")
    source = open_one(f"hf:{tmp_path / 'saved'}")
    near = huggingface.HubSource(
        dataset_of(photos, image=files), name="near"
    )  # saving takes them in
    for each in (source, near):
        assert torch.equal(each.read(0), FolderSource(photos).read(0))
    gone = [{**files[0], "path": str(tmp_path / "gone.jpg")}]
    lost = huggingface.HubSource(dataset_of(photos, id=[0], image=gone, label=[0]), name="lost")
    with pytest.raises(UnreadableSample, match=r"gone\.jpg"):
        lost.read(0)
    with pytest.raises(UnreadableSample, match="neither bytes nor"):
        source.read(2)


def test_fingerprints_see_other_images_and_other_labels(tmp_path, photos):
    images = [{"bytes": f.read_bytes(), "path": None} for f in sorted(photos.rglob("*.jpg"))]
    kinds = {"same": {}, "labels": {"label": [0] * 13}, "images": {"image": images[::-1]}}
    dataset_of(photos).save_to_disk(tmp_path / "first")
    first = open_one(f"hf:{tmp_path / 'first'}")
    for name, more in kinds.items():
        dataset_of(photos, **more).save_to_disk(tmp_path / name)
        source = open_one(f"hf:{tmp_path / name}")
        assert (source.fingerprint() == first.fingerprint()) == (name == "same")
        parquet_of(dataset_of(photos, **more), tmp_path / f"{name}.parquet")
        assert source.content_fingerprint() != first.content_fingerprint()
    one, *others = (open_one(f"hf+stream:{tmp_path / name}.parquet").content_fingerprint() for name in kinds)
    assert one not in others


def test_a_missing_library_says_what_to_type(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        ValueError, match=r"datasets is not.*pip install 'meanshift\[huggingface\]'"
    ):
        open_source(f"hf:{tmp_path}")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match=r"hub is not.*pip install 'meanshift\[huggingface\]'"):
        open_source("hf+stream:someone/photos")


@pytest.mark.parametrize("spec", ["hf:nobody/nothing-of-this-name", "hf:{}", "hf:{}/x.txt"])
def test_what_is_no_dataset_is_refused(tmp_path, spec):
    (tmp_path / "x.txt").write_text("hello")
    with pytest.raises(ValueError, match=r"could not be opened \(.+\); need hf:NAME or hf:NAME:"):
        open_source(spec.format(tmp_path))


# Either kind


@pytest.mark.parametrize("kind", ["hf", "hf+stream"])
def test_splits_by_the_names_of_files_and_folders(tmp_path, photos, kind):
    dataset = dataset_of(photos)
    for name, rows in {
        "data/train-00000-of-00002": range(3), "data/train-00001-of-00002": range(3, 5),
        "data/validation-00000-of-00001": range(2), "test/0000": range(1),
    }.items():  # fmt: skip
        parquet_of(dataset.select(rows), tmp_path / f"parquet/{name}.parquet")
    splits = open_source(f"{kind}:{tmp_path / 'parquet'}")
    assert [(split, len(source)) for split, source in splits.items()] == [
        ("train", 5), ("val", 2), ("test", 1)
    ]  # fmt: skip
    assert_same_images(splits["train"], FolderSource(photos).subset(torch.arange(5)))


@pytest.mark.parametrize("kind", ["hf", "hf+stream"])
def test_bad_images_are_unreadable_and_unknown_labels_stay_so(tmp_path, photos, kind):
    images = [{"bytes": f.read_bytes(), "path": None} for f in sorted(photos.rglob("*.jpg"))]
    images[1] = {"bytes": b"no image", "path": None}
    images[2] = None
    dataset = dataset_of(photos, image=images, label=[0, None, -1, *[1] * 10])
    source = open_one(f"{kind}:{parquet_of(dataset, tmp_path / 'x.parquet')}")
    assert source.labels.tolist() == [0, -1, -1, *[1] * 10]
    for index in (1, 2):
        with pytest.raises(UnreadableSample) as caught:
            source.read(index)
        assert caught.value.title == source.title(index)
    assert torch.equal(source.read(3), FolderSource(photos).read(3))


@pytest.mark.parametrize("kind", ["hf", "hf+stream"])
def test_parquet_of_other_makers(tmp_path, photos, kind):
    contents = [file.read_bytes() for file in sorted(photos.rglob("*.jpg"))]
    table = {"number": list(range(13)), "jpg": contents, "labels": [3, *[1] * 12]}
    pq.write_table(pa.table(table), tmp_path / "x.parquet")
    source = open_one(f"{kind}:{tmp_path / 'x.parquet'}")
    assert_same_images(source, FolderSource(photos))
    assert source.classes == ["0", "1", "2", "3"]
    assert source.labels.tolist() == [3, *[1] * 12]
    pq.write_table(pa.table({"jpg": contents}), tmp_path / "bare.parquet")
    assert open_one(f"{kind}:{tmp_path / 'bare.parquet'}").labels is None
    pq.write_table(pa.table({"jpg": contents, "label": [-1] * 13}), tmp_path / "none.parquet")
    assert open_one(f"{kind}:{tmp_path / 'none.parquet'}").labels is None
    pq.write_table(pa.table({"text": ["a"], "n": [1]}), tmp_path / "text.parquet")
    with pytest.raises(ValueError, match="has the columns text, n; need one of images"):
        open_source(f"{kind}:{tmp_path / 'text.parquet'}")
    pq.write_table(pa.table({"jpg": contents, "label": [10**7] * 13}), tmp_path / "far.parquet")
    with pytest.raises(ValueError, match="a label is 10000000; need classes numbered from 0"):
        open_source(f"{kind}:{tmp_path / 'far.parquet'}")


@pytest.mark.parametrize("kind", ["hf", "hf+stream"])
def test_either_kind_can_be_packed(tmp_path, parquet, photos, kind):
    spec = f"{kind}:{parquet}"
    assert_the_folder(pack(open_source(spec), tmp_path / "out", name=spec)["train"], photos)


# Streamed


def test_streamed_row_groups_are_the_folder(parquet, photos):
    source = open_one(f"hf+stream:{parquet}")
    assert_the_folder(source, photos)
    assert [source.title(index) for index in (0, 6, 7, 12)] == [
        "part-0.parquet#0", "part-0.parquet#6", "part-1.parquet#0", "part-1.parquet#5"
    ]  # fmt: skip
    assert source.rows.tolist() == [2, 2, 2, 1, 2, 2, 2]
    assert len(open_one(f"hf+stream:{parquet / 'part-*.parquet'}")) == 13
    assert_same(drawn(source, 2), drawn(source, 0))


def test_a_copy_for_a_worker_holds_no_row_group(parquet, photos):
    source = open_one(f"hf+stream:{parquet}")
    source.read(0)
    assert source._held
    copy = pickle.loads(pickle.dumps(source))
    assert not copy._held
    assert_the_folder(copy, photos)


@pytest.fixture
def fetched(monkeypatch):
    """The row groups that are read, in order."""
    held, fetch = [], huggingface.StreamedSource._fetch

    def noted(source, block):
        held.append(block)
        return fetch(source, block)

    monkeypatch.setattr(huggingface.StreamedSource, "_fetch", noted)
    return held


def test_an_epoch_reads_each_row_group_once_and_holds_few(parquet, fetched, monkeypatch):
    monkeypatch.setattr(huggingface, "_BUDGET", 1)  # the smallest window
    source = open_one(f"hf+stream:{parquet}")
    assert source.window == 2
    order = source.order(0, 3)
    assert torch.equal(order, block_order(0, 3, source.rows, window=2))
    for index in order.tolist():
        source.read(index)
        assert len(source._held) <= 2
    assert sorted(fetched) == list(range(7))
    fetched.clear()
    for index in rng.permutation(0, 3, 13).tolist():
        source.read(index)
    assert len(fetched) > 7  # what any other order costs


def test_the_row_group_used_longest_ago_goes_first(parquet, fetched, monkeypatch):
    monkeypatch.setattr(huggingface, "_BUDGET", 1)
    source = open_one(f"hf+stream:{parquet}")
    for index in (0, 2, 0, 4, 0, 2):  # row groups 0 1 0 2 0 1
        source.read(index)
    assert fetched == [0, 1, 2, 1]


def test_the_window_follows_the_size_of_the_row_groups(parquet, monkeypatch):
    one = open_one(f"hf+stream:{parquet}")
    assert one.window == 32
    mean = sum(one.sizes) / 7
    assert 2 * 500 < mean < 2 * 10_000
    monkeypatch.setattr(huggingface, "_BUDGET", int(5.5 * mean))
    other = open_one(f"hf+stream:{parquet}")
    assert other.window == 5
    assert other.fingerprint() != one.fingerprint()  # its order is another
    monkeypatch.setattr(huggingface, "_LARGE", int(mean / 4))
    with pytest.warns(UserWarning, match="held whole by each worker; write the files with smaller"):
        open_one(f"hf+stream:{parquet}")


def test_a_cut_of_a_stream_keeps_to_its_row_groups(parquet):
    source = open_one(f"hf+stream:{parquet}")
    cut = source.subset(torch.arange(0, 13, 3))
    kept = [index for index in source.order(1, 1).tolist() if index % 3 == 0]
    assert cut.indices[cut.order(1, 1)].tolist() == kept


def test_files_of_several_datasets_are_refused(parquet, photos):
    dataset = dataset_of(photos).rename_column("image", "image")
    parquet_of(dataset, parquet / "part-2.parquet")
    with pytest.raises(ValueError, match=r"part-2\.parquet has not the columns .* part-0\.parquet"):
        open_source(f"hf+stream:{parquet}")


@pytest.mark.parametrize("spec", ["hf+stream:{}/none.parquet", "hf+stream:{}/empty"])
def test_a_stream_of_nothing_is_refused(tmp_path, spec):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no Parquet file there; need files that end"):
        open_source(spec.format(tmp_path))


def test_damaged_parquet_is_an_error_and_no_bad_image(parquet):
    path = parquet / "part-0.parquet"
    source = open_one(f"hf+stream:{path}")
    content = bytearray(path.read_bytes())
    group = pq.read_metadata(path).row_group(0)
    (chunk,) = (c for c in map(group.column, range(4)) if c.path_in_schema == "image.bytes")
    first = chunk.dictionary_page_offset or chunk.data_page_offset
    content[first : first + 40] = b"\xff" * 40  # the head of a page
    path.write_bytes(content)
    with pytest.raises(OSError, match=r"part-0\.parquet: not readable as Parquet"):
        source.read(0)
    path.write_bytes(b"PAR1 and no more")
    with pytest.raises(OSError, match=r"part-0\.parquet: not readable as Parquet .* write the"):
        open_source(f"hf+stream:{path}")


# At an address


def test_streamed_addresses_are_the_folder(parquet, photos):
    with serving(parquet) as server:
        source = open_one(f"hf+stream:{server.address}/part-{{0..1}}.parquet")
        assert_the_folder(source, photos)
        source._held.clear()
        server.asked.clear()
        first = [source.read(0), source.read(1)]
        assert len(server.asked) == 1  # one request for both: they share a row group
        server.fail = 1
        source.read(7)
        source._held.clear()
        server.fail = 1000
        with pytest.raises(OSError, match=rf"{server.address}/part-0.parquet: could not be read"):
            source.read(0)
    assert torch.equal(first[1], FolderSource(photos).read(1))


def test_streamed_addresses_in_workers(parquet):
    near = drawn(open_one(f"hf+stream:{parquet}"), 0)
    with serving(parquet) as server:
        assert_same(drawn(open_one(f"hf+stream:{server.address}/part-{{0..1}}.parquet"), 2), near)


class Hub:
    """A stand-in for the file system of the Hub: what it holds is below a folder."""

    def __init__(self, root):
        self.root, self.down = root, False

    def glob(self, pattern):
        top = self.root / pattern.removesuffix("/**/*.parquet")
        found = top.rglob("*.parquet") if top.is_dir() else []
        return [file.relative_to(self.root).as_posix() for file in found]

    def info(self, path):
        return {"size": (self.root / path).stat().st_size, "blob_id": "b10b"}

    def cat_file(self, path, start, end):
        if self.down:
            raise RuntimeError("no route")
        return io.BytesIO((self.root / path).read_bytes()).getbuffer()[start:end].tobytes()


@pytest.fixture
def on_hub(tmp_path, monkeypatch):
    system = Hub(tmp_path / "hub")
    monkeypatch.setattr(huggingface, "file_system", lambda: system)
    return system


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        ("datasets/me/test-set/data", "me/test-set"),
        ("datasets/me/test-set", "me/test-set"),
        ("datasets/me/test-set/large", "me/test-set:large"),
        ("datasets/me/test-set@refs/convert/parquet/default", "me/test-set"),
    ],
)
def test_a_dataset_of_the_hub(on_hub, photos, layout, name):
    dataset = dataset_of(photos)
    parquet_of(dataset, on_hub.root / layout / "train-00000.parquet")
    parquet_of(dataset.select(range(2)), on_hub.root / layout / "test-00000.parquet")
    if ":" in name:
        parquet_of(dataset, on_hub.root / "datasets/me/test-set/small/train-00000.parquet")
    splits = open_source(f"hf+stream:{name}")
    assert [(split, len(source)) for split, source in splits.items()] == [
        ("train", 13),
        ("test", 2),
    ]
    assert_the_folder(splits["train"], photos)
    splits["train"]._held.clear()
    on_hub.down = True
    with pytest.raises(OSError, match=r"hf://datasets/me.*could not be read \(RuntimeError: no ro"):
        splits["train"].read(0)


def test_a_dataset_of_several_configs_needs_one(on_hub, photos):
    for config in ("large", "small"):
        parquet_of(dataset_of(photos), on_hub.root / f"datasets/me/x/{config}/train-0.parquet")
    for wrong in ("", ":tiny"):
        with pytest.raises(ValueError, match=r"have large, small; need hf\+stream:NAME:CONFIG"):
            open_source(f"hf+stream:me/x{wrong}")
    with pytest.raises(ValueError, match=r"Parquet files have none"):
        open_source("hf+stream:me/y")
    assert len(open_one("hf+stream:me/x:small")) == 13


# A run


def test_a_streamed_run_that_stops_goes_on_to_the_same_bits(tmp_path, parquet, monkeypatch):
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
    read, reads = huggingface.StreamedSource.read, []

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
    (one, wrong), (two, also) = (checkpoint.latest(out / "checkpoints") for out in (whole, parts))
    assert not wrong and not also
    assert_same(two, one)
