"""Tar shards, local or remote, give the images of the folder they were written from."""

import io
import json
import multiprocessing
import pickle
import shutil
import tarfile

import pytest
import torch
from torch.utils.data import Dataset

from meanshift.config.recipes import recipe
from meanshift.data import UnreadableSample, file_access, open_source, remote, shards
from meanshift.data.folder import FolderSource
from meanshift.data.loader import iterate
from meanshift.data.packed import pack
from meanshift.data.shards import ShardSource
from meanshift.runtime import checkpoint
from meanshift.training.loop import pretrain
from tests.support.exact import assert_same
from tests.support.sources import (
    assert_same_images,
    load_batches,
    open_one,
    serve_folder,
    titles,
)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "RETRY_DELAYS", (0.0, 0.0, 0.0))


def tar_of(path, members):
    """A plain tar of (name, bytes), in this order."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def samples(root):
    """The files of a folder of images as webdataset would write them, with their classes."""
    for file in sorted(root.rglob("*.jpg")):
        key = f"{file.parent.name}-{file.stem}"
        yield [(f"{key}.jpg", file.read_bytes()), (f"{key}.cls", file.parent.name.encode())]


@pytest.fixture
def photos(tmp_path, make_images):
    return make_images(tmp_path / "photos", {"a": 4, "b": 3})


@pytest.fixture
def sharded(tmp_path, photos):
    """The same images in three shards."""
    written = list(samples(photos))
    for number, start in enumerate(range(0, 7, 3)):
        members = [member for sample in written[start : start + 3] for member in sample]
        tar_of(tmp_path / f"tars/photos-{number:03d}.tar", members)
    return tmp_path / "tars"


# The layout


def test_shards_are_the_folder_they_were_written_from(sharded, photos):
    source = open_one(sharded)
    folder = FolderSource(photos)
    assert_same_images(source, folder)
    assert torch.equal(source.labels, folder.labels)
    assert source.classes == folder.classes == ["a", "b"]
    assert titles(source)[2:4] == ["photos-000.tar/a-002.jpg", "photos-001.tar/a-003.jpg"]


@pytest.mark.parametrize(
    "pattern",
    ["photos-{000..002}.tar", "photos-*.tar", "photos-{002,000,001}.tar", "photos-00[0-2].tar"],
)
def test_patterns_mean_the_same_shards_as_their_folder(sharded, pattern):
    assert titles(open_one(sharded / pattern)) == titles(open_one(sharded))


def test_one_shard_is_a_source(sharded):
    assert len(open_one(sharded / "photos-001.tar")) == 3


def test_a_pattern_that_misses_a_shard_names_it(sharded):
    with pytest.raises(ValueError, match=r"photos-003\.tar is missing"):
        open_source(str(sharded / "photos-{000..003}.tar"))
    with pytest.raises(ValueError, match=r"nothing there; need .*tar shards.*hf:NAME"):
        open_source(str(sharded / "video-*.tar"))
    with pytest.raises(ValueError, match="range of 1 to 100000"):
        open_source(str(sharded / "photos-{5..2}.tar"))


@pytest.mark.parametrize("layout", ["{}/x.tar", "{}-000.tar"])
def test_splits_by_folder_or_by_name(tmp_path, photos, layout):
    written = list(samples(photos))
    root = tmp_path / "tars"
    for split, part in (("train", written[:4]), ("val", written[4:6]), ("test", written[6:])):
        tar_of(root / layout.format(split), [member for sample in part for member in sample])
    splits = open_source(str(root))
    sizes = [(split, len(source)) for split, source in splits.items()]
    assert sizes == [("train", 4), ("val", 2), ("test", 1)]


def test_names_that_only_resemble_a_split_are_none(tmp_path, photos):
    for name in ("trains.tar", "valley.tar", "contest.tar"):
        tar_of(tmp_path / "tars" / name, next(samples(photos)))
    assert len(open_one(tmp_path / "tars")) == 3


def test_a_shard_of_no_split_beside_training_is_refused(tmp_path, photos):
    for name in ("train-0.tar", "more-0.tar"):
        tar_of(tmp_path / "tars" / name, next(samples(photos)))
    with pytest.raises(ValueError, match=r"more-0\.tar with none of train, val and test; rename"):
        open_source(str(tmp_path / "tars"))
    assert len(open_one(tmp_path / "tars/train-*.tar")) == 1


def test_an_archive_beside_images_leaves_the_folder_a_folder(photos):
    tar_of(photos / "original.tar", next(samples(photos)))
    with pytest.warns(UserWarning, match=r"left out 1 other files \(1 \.tar\)"):
        assert isinstance(open_one(photos), FolderSource)


def test_a_table_of_labels_is_not_for_shards(sharded, tmp_path):
    (tmp_path / "t.csv").write_text("file,label\na.jpg,a\n")
    with pytest.raises(ValueError, match="a CSV of labels is for folders"):
        open_source(str(sharded), labels=tmp_path / "t.csv")


# Labels and members


def test_numbers_are_classes_in_their_order_and_negative_ones_unknown(tmp_path, photos):
    image = next(samples(photos))[0][1]
    labels = ["10", "2", "-1", "10", " 02\n", ""]
    members = [
        member
        for index, label in enumerate(labels)
        for member in ((f"{index}.jpg", image), (f"{index}.cls", label.encode()))
    ]
    source = open_one(tar_of(tmp_path / "x.tar", members))
    assert source.classes == ["2", "10"]
    assert source.labels.tolist() == [1, 0, -1, 1, 0, -1]


def test_json_labels_where_there_is_no_cls(tmp_path, photos):
    image = next(samples(photos))[0][1]
    values = [{"label": "dog"}, {"cls": "cat"}, {"class": 7}, {"label": [1, 2]}, ["dog"], None]
    members = [
        member
        for index, value in enumerate(values)
        for member in ((f"{index}.json", json.dumps(value).encode()), (f"{index}.jpg", image))
    ]
    members += [("0.cls", b"bird"), ("9.json", b"{"), ("9.jpg", image)]
    source = open_one(tar_of(tmp_path / "x.tar", members))
    assert source.classes == ["7", "bird", "cat"]
    assert source.labels.tolist() == [1, 2, 0, -1, -1, -1, -1]


def test_without_labels_there_are_none(tmp_path, photos):
    source = open_one(tar_of(tmp_path / "x.tar", [next(samples(photos))[0]]))
    assert source.labels is None
    assert source.classes == []


def test_what_is_no_image_is_counted(tmp_path, photos):
    image = next(samples(photos))[0][1]
    members = [
        ("readme.txt", b"hello"),
        ("lonely.cls", b"3"),
        ("a/.hidden.jpg", b""),
        ("._x.jpg", b""),
        ("./a/x.left.JPG", image),
        ("b/x.png", image),
        ("b/x.txt", b"the caption of b/x.png"),
        ("c/x.heic", image),
        ("noend", b"1"),
    ]
    left_out = r"left out 3 other files \(1 \.txt, 1 \.heic, 1 without extension\)"
    with pytest.warns(UserWarning, match=left_out):
        source = open_one(tar_of(tmp_path / "x.tar", members))
    assert titles(source) == ["x.tar/a/x.left.JPG", "x.tar/b/x.png"]
    assert source.read(0).shape == source.read(1).shape == (3, 40, 48)


def test_the_first_image_of_a_key_counts(tmp_path, photos):
    one, two = [sample[0][1] for sample in samples(photos)][:2]
    path = tar_of(tmp_path / "x.tar", [("k.jpg", one), ("k.png", two), ("k.jpg", two)])
    with pytest.warns(UserWarning, match=r"2 images share their key .* the first is x.tar/k.png"):
        source = open_one(path)
    assert titles(source) == ["x.tar/k.jpg"]
    expected = FolderSource(photos).read(0)
    assert torch.equal(source.read(0), expected)


def test_shards_of_one_name_keep_their_paths_in_titles(tmp_path, photos):
    for part in ("one", "two"):
        tar_of(tmp_path / part / "x.tar", next(samples(photos)))
    assert len(set(titles(open_one(tmp_path / "*/x.tar")))) == 2


# Workers, packing, identity


def test_pickling_and_workers_change_nothing(sharded, photos):
    source = open_one(sharded)
    assert_same_images(pickle.loads(pickle.dumps(source)), FolderSource(photos))
    alone = load_batches(source, 0, 4, batch_size=3)
    assert len(alone) == 4
    for one, two in zip(alone, load_batches(source, 0, 4, batch_size=3, workers=2), strict=True):
        assert_same(vars(one), vars(two))


def test_shards_can_be_packed(sharded, photos, tmp_path):
    store = pack(open_source(str(sharded)), tmp_path / "out", name=str(sharded))["train"]
    assert_same_images(store, FolderSource(photos))
    assert store.classes == ["a", "b"]


def test_fingerprints_see_names_and_labels_and_content_fingerprints_the_bytes(tmp_path, photos):
    (image, label), (other_image, other_label), *_ = samples(photos)
    path = tar_of(tmp_path / "x.tar", [image, label])
    before = open_one(path)
    tar_of(path, [(image[0], other_image[1]), label])
    other = open_one(path)
    assert other.fingerprint() == before.fingerprint()
    assert other.content_fingerprint() != before.content_fingerprint()
    tar_of(path, [image, (label[0], b"zebra"), other_image, other_label])
    assert open_one(path).fingerprint() != before.fingerprint()
    moved = shutil.copytree(tmp_path, tmp_path / "moved") / "x.tar"
    assert open_one(moved).content_fingerprint() == open_one(path).content_fingerprint()


# The index


@pytest.fixture
def indexed(monkeypatch):
    """The shards whose index is built."""
    names = []
    build_index = shards._build_index

    def counted(file):
        names.append(file_access.base_name(file.address))
        return build_index(file)

    monkeypatch.setattr(shards, "_build_index", counted)
    return names


def test_a_shard_is_indexed_once_and_again_when_it_changes(sharded, photos, indexed):
    first = open_one(sharded)
    assert indexed == [f"photos-00{number}.tar" for number in range(3)]
    again = open_one(sharded)
    assert len(indexed) == 3
    assert titles(again) == titles(first)
    assert again.content_fingerprint() == first.content_fingerprint()
    assert torch.equal(again.labels, first.labels)
    assert_same_images(again, first)
    tar_of(sharded / "photos-001.tar", list(samples(photos))[6])
    assert len(open_one(sharded)) == 5
    assert indexed[3:] == ["photos-001.tar"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": "older"}'])
def test_a_damaged_index_is_built_again(sharded, tmp_path, indexed, content):
    open_one(sharded)
    for file in (tmp_path / "cache/meanshift/shards").iterdir():
        file.write_text(content)
    assert len(open_one(sharded)) == 7
    assert len(indexed) == 6


def test_an_index_that_cannot_be_written_is_no_error(sharded, tmp_path, indexed):
    (tmp_path / "cache").write_text("a file, no folder")
    for _ in range(2):
        assert len(open_one(sharded)) == 7
    assert len(indexed) == 6


# Damage


def test_a_corrupt_image_is_unreadable_and_the_others_are_not(tmp_path, photos):
    good = next(samples(photos))[0][1]
    path = tar_of(tmp_path / "x.tar", [("a.jpg", good[:300]), ("b.jpg", b""), ("c.jpg", good)])
    source = open_one(path)
    for index, title in enumerate(("x.tar/a.jpg", "x.tar/b.jpg")):
        with pytest.raises(UnreadableSample) as caught:
            source.read(index)
        assert caught.value.title == title
    assert source.read(2).shape == (3, 40, 48)


@pytest.mark.parametrize("where", ["data", "header", "boundary", "garbage"])
def test_the_complete_images_before_the_damage_are_used(sharded, photos, where):
    path = sharded / "photos-000.tar"
    with tarfile.open(path) as tar:
        third = tar.getmember("a-002.jpg")
    content = path.read_bytes()
    end = {"data": third.offset_data + 100, "header": third.offset + 100, "boundary": third.offset}
    content = content[: end.get(where, third.offset)]
    path.write_bytes(content + b"\xff" * 2048 if where == "garbage" else content)
    with pytest.warns(UserWarning, match=r"1 shards are cut short or damaged.*photos-000\.tar"):
        source = open_one(sharded)
    assert len(source) == 6
    expected = FolderSource(photos).subset(torch.tensor([0, 1, 3, 4, 5, 6]))
    assert_same_images(source, expected)
    with pytest.warns(UserWarning, match="cut short"):  # from the cached index too
        open_one(sharded)


@pytest.mark.parametrize("content", [b"", b"no tar", b"\xff" * 5000])
def test_a_file_that_is_no_tar_is_refused(tmp_path, content):
    (tmp_path / "x.tar").write_bytes(content)
    with pytest.raises(ValueError, match=r"x\.tar: not a tar file .* need plain tar shards"):
        open_source(str(tmp_path / "x.tar"))


def test_an_empty_tar_has_no_image(tmp_path):
    with pytest.raises(ValueError, match=r"no image in 1 shards; need members ending in .*\.jpg"):
        open_source(str(tar_of(tmp_path / "x.tar", [])))


@pytest.mark.parametrize("name", ["x.tar.gz", "x.tgz", "x.tar"])
@pytest.mark.parametrize("folder", [False, True])
def test_compressed_shards_are_refused_with_what_to_type(tmp_path, photos, name, folder):
    path = tmp_path / "tars" / name
    path.parent.mkdir()
    with tarfile.open(path, "w:gz") as tar:
        tar.add(photos)
    with pytest.raises(ValueError, match=rf"is compressed.*need a plain tar: type gunzip.*{name}"):
        open_source(str(path.parent if folder else path))


def test_a_truncated_or_deleted_shard_is_an_error_and_no_bad_image(sharded):
    source = open_one(sharded)
    (sharded / "photos-000.tar").write_bytes(b"")
    (sharded / "photos-002.tar").unlink()
    with pytest.raises(OSError, match=r"photos-000\.tar: ends before byte .* restore it"):
        source.read(0)
    with pytest.raises(OSError, match=r"photos-002\.tar"):
        source.read(6)


# At an address


def test_remote_shards_are_the_local_ones(sharded, photos):
    with serve_folder(sharded) as server:
        source = open_one(f"{server.address}/photos-{{000..002}}.tar?key=1")
        assert titles(source) == titles(open_one(sharded))
        assert_same_images(source, FolderSource(photos))
        assert source.labels.tolist() == [0, 0, 0, 0, 1, 1, 1]
        server.requests.clear()
        source.read(4)
        _, offset, size, _ = source.rows[4]
        assert server.requests == [("/photos-001.tar?key=1", f"bytes={offset}-{offset + size - 1}")]


def test_remote_shards_in_workers(sharded):
    with serve_folder(sharded) as server:
        source = open_one(f"{server.address}/photos-{{000..002}}.tar")
        remote = load_batches(source, 0, 4, batch_size=3, workers=2)
    for one, two in zip(remote, load_batches(open_one(sharded), 0, 4, batch_size=3), strict=True):
        assert_same(vars(one), vars(two))


def test_the_index_of_an_address_is_cached_until_it_changes(sharded, photos, indexed):
    with serve_folder(sharded) as server:
        for _ in range(2):
            assert len(open_one(f"{server.address}/photos-001.tar")) == 3
        assert len(indexed) == 1
        tar_of(sharded / "photos-001.tar", list(samples(photos))[6])
        assert len(open_one(f"{server.address}/photos-001.tar")) == 1
        assert len(indexed) == 2


@pytest.mark.parametrize("how", ["hang up", 503, 429])
def test_a_request_that_fails_twice_is_repeated(sharded, photos, how):
    with serve_folder(sharded) as server:
        source = open_one(f"{server.address}/photos-000.tar")
        server.requests.clear()
        server.fail = 2
        server.how = how
        image = source.read(0)
        assert len(server.requests) == 3
    assert torch.equal(image, FolderSource(photos).read(0))


def test_half_an_answer_is_requested_again(sharded, photos):
    with serve_folder(sharded) as server:
        source = open_one(f"{server.address}/photos-000.tar")
        server.half = 1
        assert torch.equal(source.read(0), FolderSource(photos).read(0))


def test_a_server_that_dies_is_an_error_and_no_bad_image(sharded):
    with serve_folder(sharded) as server:
        address = f"{server.address}/photos-000.tar"
        source = open_one(address)
        server.fail = 1000
        with pytest.raises(OSError, match=rf"{address}: could not be read .* check the address"):
            source.read(0)
    with pytest.raises(OSError, match=rf"{address}: could not be read .*Connect"):
        source.read(0)


class Images(Dataset):
    def __init__(self, source):
        self.source = source

    def __len__(self):
        return len(self.source)

    def __getitem__(self, index):
        return self.source.read(index)


def test_the_error_of_a_worker_names_the_address(sharded):
    with serve_folder(sharded) as server:
        source = open_one(f"{server.address}/photos-000.tar")
    with pytest.raises(OSError, match=r"photos-000\.tar: could not be read"):
        list(iterate(Images(source), workers=1))
    assert multiprocessing.active_children() == []


def test_an_address_with_nothing_behind_it_is_requested_once(sharded):
    with serve_folder(sharded) as server:
        with pytest.raises(OSError, match=r"nowhere\.tar: could not be read \(HTTP 404"):
            open_source(f"{server.address}/nowhere.tar")
        assert len(server.requests) == 1


def test_a_server_without_ranges_is_refused(sharded):
    with (
        serve_folder(sharded, ranges=False) as server,
        pytest.raises(OSError, match=r"ignores Range requests \(it answered 200\).*download"),
    ):
        open_source(f"{server.address}/photos-000.tar")


def test_a_remote_shard_that_changes_while_it_is_read_is_refused(sharded):
    with serve_folder(sharded) as server:
        source = open_one(f"{server.address}/photos-000.tar")
        with (sharded / "photos-000.tar").open("ab") as file:
            file.write(b"more")
        with pytest.raises(
            OSError, match=r"photos-000\.tar: is another file now than when it was opened"
        ):
            source.read(0)


# A run


@pytest.mark.filterwarnings("always:.*cannot be read")
@pytest.mark.parametrize("where", ["local", "remote"])
@pytest.mark.slow
def test_a_run_that_loses_its_shards_continues_to_the_same_bits(
    tmp_path, make_images, monkeypatch, where
):
    photos = make_images(tmp_path / "photos", {"a": 8, "b": 7}, size=(20, 24))
    members = [member for sample in samples(photos) for member in sample]
    members.insert(6, ("a-broken.jpg", b"no image"))
    for number, start in enumerate(range(0, len(members), 10)):
        tar_of(tmp_path / f"tars/x-{number}.tar", members[start : start + 10])
    with serve_folder(tmp_path / "tars") as server:
        specs = {"local": str(tmp_path / "tars"), "remote": f"{server.address}/x-{{0..3}}.tar"}
        settings = {
            "data.source": specs[where], "data.image_size": 16, "data.max_bad_fraction": 0.2,
            "data.workers": 0, "data.validation": 0.2, "encoder.width": 0.125,
            "encoder.stem": "small-stride2", "encoder.name": "resnet10", "method.bank_size": 6,
            "method.k": 2, "train.epochs": 3, "train.batch_size": 3, "optim.warmup_epochs": 1,
            "train.save_every": 0.3, "train.log_every": 1, "train.device": "cpu",
        }  # fmt: skip
        config = recipe("small").with_overrides(settings)
        whole = pretrain(config, tmp_path / "whole")
        reads = []
        lost = []
        read = ShardSource.read

        def failing(source, index):
            reads.append(index)
            if len(reads) in (17, 33):
                lost.append(len(reads))
                server.fail = 1000
                if where == "local":
                    raise OSError("x-1.tar: lost")
            return read(source, index)

        monkeypatch.setattr(ShardSource, "read", failing)
        for _ in range(2):
            with pytest.raises(OSError, match=r"x-\d\.tar: (lost|could not be read)"):
                pretrain(config, tmp_path / "parts")
            server.fail = 0
        parts = pretrain(config, tmp_path / "parts")
    assert lost == [17, 33]
    (one, damaged), (two, also) = (checkpoint.latest(out / "checkpoints") for out in (whole, parts))
    assert not damaged and not also
    assert_same(two, one)
    lines = (parts / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [
        json.loads(line)["step"] for line in (whole / "metrics.jsonl").read_text().splitlines()
    ]
