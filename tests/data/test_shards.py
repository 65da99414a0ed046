"""Tar shards give the images of the folder they were made from, near or far; damage is named."""

import io
import json
import pickle
import shutil
import tarfile
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from meanshift.config import Views
from meanshift.config.recipes import recipe
from meanshift.data import UnreadableSample, open_source, shards
from meanshift.data.folder import FolderSource
from meanshift.data.loader import batches
from meanshift.data.packed import pack
from meanshift.data.shards import ShardSource
from meanshift.data.source import Source, block_order
from meanshift.runtime import checkpoint, rng
from meanshift.training.loop import pretrain
from meanshift.transforms.augment import TwoViews
from tests.support.exact import assert_same


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(shards, "WAITS", (0.0, 0.0, 0.0))


def titles(source):
    return [source.title(index) for index in range(len(source))]


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
    held = list(samples(photos))
    for number, start in enumerate(range(0, 7, 3)):
        tar_of(
            tmp_path / f"tars/photos-{number:03d}.tar",
            [member for sample in held[start : start + 3] for member in sample],
        )
    return tmp_path / "tars"


def assert_same_images(ours, theirs):
    assert len(ours) == len(theirs)
    for index in range(len(theirs)):
        assert torch.equal(ours.read(index), theirs.read(index))


def open_one(spec):
    splits = open_source(str(spec))
    assert list(splits) == ["train"]
    return splits["train"]


# The layout


def test_shards_are_the_folder_they_were_made_from(sharded, photos):
    source, folder = open_one(sharded), FolderSource(photos)
    assert_same_images(source, folder)
    assert torch.equal(source.labels, folder.labels)
    assert source.classes == folder.classes == ["a", "b"]
    assert titles(source)[:4] == [
        "photos-000.tar/a-000.jpg", "photos-000.tar/a-001.jpg", "photos-000.tar/a-002.jpg",
        "photos-001.tar/a-003.jpg",
    ]  # fmt: skip


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
    held = list(samples(photos))
    root = tmp_path / "tars"
    for split, part in (("train", held[:4]), ("val", held[4:6]), ("test", held[6:])):
        tar_of(root / layout.format(split), [member for sample in part for member in sample])
    splits = open_source(str(root))
    assert {split: len(source) for split, source in splits.items()} == {
        "train": 4, "val": 2, "test": 1
    }  # fmt: skip
    assert list(splits) == ["train", "val", "test"]


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
    assert isinstance(open_one(photos), FolderSource)


def test_a_table_of_labels_is_not_for_shards(sharded, tmp_path):
    (tmp_path / "t.csv").write_text("file,label\na.jpg,a\n")
    with pytest.raises(ValueError, match="a CSV of labels is for folders"):
        open_source(str(sharded), labels=tmp_path / "t.csv")


# Labels and members


def test_numbers_are_classes_in_their_order_and_negative_ones_unknown(tmp_path, photos):
    image = next(samples(photos))[0][1]
    told = ["10", "2", "-1", "10", " 02\n", ""]
    members = [
        member
        for index, label in enumerate(told)
        for member in ((f"{index}.jpg", image), (f"{index}.cls", label.encode()))
    ]
    source = open_one(tar_of(tmp_path / "x.tar", members))
    assert source.classes == ["2", "10"]
    assert source.labels.tolist() == [1, 0, -1, 1, 0, -1]


def test_json_labels_where_there_is_no_cls(tmp_path, photos):
    image = next(samples(photos))[0][1]
    told = [{"label": "dog"}, {"cls": "cat"}, {"class": 7}, {"label": [1, 2]}, ["dog"], None]
    members = [
        member
        for index, held in enumerate(told)
        for member in ((f"{index}.json", json.dumps(held).encode()), (f"{index}.jpg", image))
    ]
    members += [("0.cls", b"bird"), ("9.json", b"{"), ("9.jpg", image)]
    source = open_one(tar_of(tmp_path / "x.tar", members))
    assert source.classes == ["7", "bird", "cat"]
    assert source.labels.tolist() == [1, 2, 0, -1, -1, -1, -1]


def test_without_labels_there_are_none(tmp_path, photos):
    source = open_one(tar_of(tmp_path / "x.tar", [next(samples(photos))[0]]))
    assert source.labels is None
    assert source.classes == []


def test_what_is_no_image_is_passed_over(tmp_path, photos):
    image = next(samples(photos))[0][1]
    members = [
        ("readme.txt", b"hello"), ("lonely.cls", b"3"), ("a/.hidden.jpg", b""), ("._x.jpg", b""),
        ("./a/x.left.JPG", image), ("b/x.png", image), ("noend", b"1"),
    ]  # fmt: skip
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
    crop = TwoViews(Views(), seed=0, size=16).crop
    drawn = [
        list(batches(source, crop, batch_size=3, seed=1, start=0, stop=4, workers=workers))
        for workers in (0, 2)
    ]
    assert len(drawn[0]) == 4
    for one, two in zip(*drawn, strict=True):
        assert_same(vars(one), vars(two))


def test_shards_can_be_packed(sharded, photos, tmp_path):
    store = pack(open_source(str(sharded)), tmp_path / "out", name=str(sharded))["train"]
    assert_same_images(store, FolderSource(photos))
    assert store.classes == ["a", "b"]


def test_fingerprints_follow_names_and_labels_and_contents_the_bytes(tmp_path, photos):
    held = list(samples(photos))
    path = tar_of(tmp_path / "x.tar", held[0])
    before = open_one(path)
    tar_of(path, [(held[0][0][0], held[1][0][1]), held[0][1]])
    other = open_one(path)
    assert other.fingerprint() == before.fingerprint()
    assert other.content_fingerprint() != before.content_fingerprint()
    tar_of(path, [held[0][0], (held[0][1][0], b"zebra"), *held[1]])
    assert open_one(path).fingerprint() != before.fingerprint()
    moved = shutil.copytree(tmp_path, tmp_path / "moved") / "x.tar"
    assert open_one(moved).content_fingerprint() == open_one(path).content_fingerprint()


# The index


@pytest.fixture
def walks(monkeypatch):
    """The shards that are walked."""
    walked, walk = [], shards._walk

    def counted(file):
        walked.append(shards.base_name(file.address))
        return walk(file)

    monkeypatch.setattr(shards, "_walk", counted)
    return walked


def test_a_shard_is_walked_once_and_again_when_it_changes(sharded, photos, walks):
    first = open_one(sharded)
    assert walks == [f"photos-00{number}.tar" for number in range(3)]
    again = open_one(sharded)
    assert len(walks) == 3
    assert (titles(again), again.content_fingerprint()) == (titles(first), first.content_fingerprint())
    assert torch.equal(again.labels, first.labels)
    assert_same_images(again, first)
    tar_of(sharded / "photos-001.tar", list(samples(photos))[6])
    assert len(open_one(sharded)) == 5
    assert walks[3:] == ["photos-001.tar"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": "older"}'])
def test_a_damaged_index_is_made_anew(sharded, tmp_path, walks, content):
    open_one(sharded)
    for kept in (tmp_path / "cache/meanshift/shards").iterdir():
        kept.write_text(content)
    assert len(open_one(sharded)) == 7
    assert len(walks) == 6


def test_an_index_that_cannot_be_kept_is_no_error(sharded, tmp_path, walks):
    (tmp_path / "cache").write_text("a file, no folder")
    for _ in range(2):
        assert len(open_one(sharded)) == 7
    assert len(walks) == 6


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
def test_the_whole_images_before_a_cut_are_used(sharded, photos, where):
    path = sharded / "photos-000.tar"
    with tarfile.open(path) as tar:
        third = tar.getmember("a-002.jpg")
    content = path.read_bytes()
    end = {"data": third.offset_data + 100, "header": third.offset + 100, "boundary": third.offset}
    kept = content[: end.get(where, third.offset)]
    path.write_bytes(kept + b"\xff" * 2048 if where == "garbage" else kept)
    with pytest.warns(UserWarning, match=r"1 shards are cut short or damaged.*photos-000\.tar"):
        source = open_one(sharded)
    assert len(source) == 6
    expected = FolderSource(photos).subset(torch.tensor([0, 1, 3, 4, 5, 6]))
    assert_same_images(source, expected)
    with pytest.warns(UserWarning, match="cut short"):  # the kept index says it too
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


def test_a_shard_that_shrinks_or_goes_is_no_bad_image(sharded):
    source = open_one(sharded)
    (sharded / "photos-000.tar").write_bytes(b"")
    (sharded / "photos-002.tar").unlink()
    with pytest.raises(OSError, match=r"photos-000\.tar: ends before byte .* restore it"):
        source.read(0)
    with pytest.raises(OSError, match=r"photos-002\.tar"):
        source.read(6)


# At an address


@contextmanager
def serving(root, *, ranges=True):
    """A server of a folder's files: requests are noted, and the next `fail` of them fail."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.server.asked.append((self.path, self.headers.get("Range")))
            if self.server.fail > 0:
                self.server.fail -= 1
                if self.server.how == "hang up":
                    return
                self.send_error(self.server.how)
                return
            file = root / self.path.partition("?")[0].lstrip("/")
            if not file.is_file():
                self.send_error(404)
                return
            content, told = file.read_bytes(), self.headers.get("Range")
            size = len(content)
            self.send_response(206 if told and ranges else 200)
            if told and ranges:
                first, last = map(int, told.removeprefix("bytes=").split("-"))
                content = content[first : last + 1]
                span = f"bytes {first}-{first + len(content) - 1}/{size}"
                self.send_header("Content-Range", span)
            self.send_header("ETag", f'"{file.stat().st_mtime_ns}"')
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: len(content) // 2] if self.server.half else content)
            self.server.half = max(0, self.server.half - 1)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.asked, server.fail, server.how, server.half = [], 0, "hang up", 0
    server.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_streamed_shards_are_the_local_ones(sharded, photos):
    with serving(sharded) as server:
        source = open_one(f"{server.address}/photos-{{000..002}}.tar?key=1")
        assert titles(source) == titles(open_one(sharded))
        assert_same_images(source, FolderSource(photos))
        assert source.labels.tolist() == [0, 0, 0, 0, 1, 1, 1]
        server.asked.clear()
        source.read(4)
        _, offset, size, _ = source.rows[4]
        assert server.asked == [("/photos-001.tar?key=1", f"bytes={offset}-{offset + size - 1}")]


def test_streamed_shards_in_workers(sharded):
    with serving(sharded) as server:
        source = open_one(f"{server.address}/photos-{{000..002}}.tar")
        crop = TwoViews(Views(), seed=0, size=16).crop
        near, far = (
            list(batches(each, crop, batch_size=3, seed=1, start=0, stop=4, workers=workers))
            for each, workers in ((open_one(sharded), 0), (source, 2))
        )
    for one, two in zip(near, far, strict=True):
        assert_same(vars(one), vars(two))


def test_the_index_of_an_address_is_kept_until_it_changes(sharded, photos, walks):
    with serving(sharded) as server:
        for _ in range(2):
            assert len(open_one(f"{server.address}/photos-001.tar")) == 3
        assert len(walks) == 1
        tar_of(sharded / "photos-001.tar", list(samples(photos))[6])
        assert len(open_one(f"{server.address}/photos-001.tar")) == 1
        assert len(walks) == 2


@pytest.mark.parametrize("how", ["hang up", 503, 429])
def test_a_server_that_fails_twice_is_asked_again(sharded, photos, how):
    with serving(sharded) as server:
        source = open_one(f"{server.address}/photos-000.tar")
        server.asked.clear()
        server.fail, server.how = 2, how
        image = source.read(0)
        assert len(server.asked) == 3
    assert torch.equal(image, FolderSource(photos).read(0))


def test_half_an_answer_is_asked_for_again(sharded, photos):
    with serving(sharded) as server:
        source = open_one(f"{server.address}/photos-000.tar")
        server.half = 1
        assert torch.equal(source.read(0), FolderSource(photos).read(0))


def test_a_server_that_dies_is_an_error_and_no_bad_image(sharded):
    with serving(sharded) as server:
        address = f"{server.address}/photos-000.tar"
        source = open_one(address)
        server.fail = 1000
        with pytest.raises(OSError, match=rf"{address}: could not be read .* look at the address"):
            source.read(0)
    with pytest.raises(OSError, match=rf"{address}: could not be read .*refused"):
        source.read(0)


class Reads(Dataset):
    """The images of a source, for workers that end when they are told to."""

    def __init__(self, source):
        self.source = source

    def __len__(self):
        return len(self.source)

    def __getitem__(self, index):
        return self.source.read(index)


def test_the_error_of_a_worker_names_the_address(sharded):
    with serving(sharded) as server:
        source = open_one(f"{server.address}/photos-000.tar")
    with pytest.raises(OSError, match=r"photos-000\.tar: could not be read"):
        list(DataLoader(Reads(source), batch_size=None, num_workers=1))


def test_an_address_with_nothing_behind_it_is_not_asked_twice(sharded):
    with serving(sharded) as server:
        with pytest.raises(OSError, match=r"nowhere\.tar: could not be read \(HTTP 404"):
            open_source(f"{server.address}/nowhere.tar")
        assert len(server.asked) == 1


def test_a_server_without_ranges_is_refused(sharded):
    with (
        serving(sharded, ranges=False) as server,
        pytest.raises(OSError, match=r"ignores Range requests \(it answered 200\).*download"),
    ):
        open_source(f"{server.address}/photos-000.tar")


def test_a_remote_shard_that_changes_while_it_is_read_is_refused(sharded):
    with serving(sharded) as server:
        source = open_one(f"{server.address}/photos-000.tar")
        with (sharded / "photos-000.tar").open("ab") as file:
            file.write(b"more")
        with pytest.raises(OSError, match=r"photos-000\.tar: has \d+ bytes now and had \d+"):
            source.read(0)


# Orders


class Blocks(Source):
    """Numbers in blocks."""

    name, labels, classes = "blocks", None, ()

    def __init__(self, sizes, window):
        self.sizes, self.window = torch.tensor(sizes), window
        self.of = torch.arange(len(sizes)).repeat_interleave(self.sizes)

    def __len__(self):
        return len(self.of)

    def title(self, index):
        return f"#{index}"

    def read(self, index):
        return torch.full((3, 1, 1), index, dtype=torch.uint8)

    @property
    def blockwise(self):
        return True

    def order(self, seed, epoch):
        return block_order(seed, epoch, self.sizes, window=self.window)


@pytest.mark.parametrize("sizes", [[10] * 20, [1, 30, 0, 7, 7, 100, 2], [5], [0, 3]])
@pytest.mark.parametrize("window", [1, 3, 50])
def test_an_order_by_blocks_is_a_permutation_at_its_address(sizes, window):
    source = Blocks(sizes, window)
    order = source.order(3, 1)
    assert order.sort().values.tolist() == list(range(sum(sizes)))
    assert torch.equal(order, Blocks(sizes, window).order(3, 1))
    if len(source) > 100:
        assert not torch.equal(order, source.order(3, 2))
        assert not torch.equal(order, source.order(4, 1))


def test_an_order_by_blocks_needs_few_blocks_at_a_time_and_mixes_them():
    source = Blocks([10] * 40, 4)
    order = source.order(0, 0)
    needed = [source.of[part].unique() for part in order.split(40)]
    assert [len(blocks) for blocks in needed] == [4] * 10
    mixed = [len(source.of[part].unique()) for part in order.split(10)]
    assert min(mixed) >= 2 and sum(mixed) / len(mixed) > 3
    neighbors = [bool((blocks.diff() == 1).all()) for blocks in needed]
    assert sum(neighbors) < 2  # the blocks are shuffled too
    other = {frozenset(source.of[part].tolist()) for part in source.order(0, 1).split(40)}
    assert other != {frozenset(blocks.tolist()) for blocks in needed}
    freely = rng.permutation(0, 0, 400)
    assert min(len(source.of[part].unique()) for part in freely.split(40)) > 15


def test_a_cut_of_blocks_keeps_the_order_of_the_whole():
    source = Blocks([10] * 12, 3)
    indices = rng.choice(1, 120, 50, rng.SPLIT).flip(0)
    cut = source.subset(indices)
    order = cut.order(5, 2)
    assert order.sort().values.tolist() == list(range(50))
    kept = [index for index in source.order(5, 2).tolist() if index in set(indices.tolist())]
    assert indices[order].tolist() == kept
    again = cut.subset(torch.arange(0, 50, 2))
    assert again.blockwise
    assert again.indices[again.order(5, 2)].tolist() == [i for i in order.tolist() if i % 2 == 0]


def test_other_orders_stay_what_they_were(photos):
    source = FolderSource(photos)
    assert torch.equal(source.order(3, 1), rng.permutation(3, 1, 7))
    assert torch.equal(source.subset(torch.tensor([5, 1, 2])).order(3, 1), rng.permutation(3, 1, 3))


# A run


@pytest.mark.filterwarnings("always:.*cannot be read")
@pytest.mark.parametrize("where", ["near", "far"])
def test_a_run_that_loses_its_shards_goes_on_to_the_same_bits(
    tmp_path, make_images, monkeypatch, where
):
    photos = make_images(tmp_path / "photos", {"a": 8, "b": 7}, size=(20, 24))
    held = [member for sample in samples(photos) for member in sample]
    held.insert(6, ("a-broken.jpg", b"no image"))
    for number, start in enumerate(range(0, len(held), 10)):
        tar_of(tmp_path / f"tars/x-{number}.tar", held[start : start + 10])
    with serving(tmp_path / "tars") as server:
        places = {"near": str(tmp_path / "tars"), "far": f"{server.address}/x-{{0..3}}.tar"}
        settings = {
            "data.source": places[where], "data.image_size": 16, "data.max_bad_fraction": 0.2,
            "data.workers": 0, "data.validation": 0.2, "encoder.width": 0.125,
            "encoder.stem": "small-stride2", "encoder.name": "resnet10", "method.bank_size": 6,
            "method.k": 2, "train.epochs": 3, "train.batch_size": 3, "optim.warmup_epochs": 1,
            "train.save_every": 0.3, "train.log_every": 1, "train.device": "cpu",
        }  # fmt: skip
        config = recipe("small").with_overrides(settings)
        whole = pretrain(config, tmp_path / "whole")
        reads, lost, read = [], [], ShardSource.read

        def failing(source, index):
            reads.append(index)
            if len(reads) in (17, 33):
                lost.append(len(reads))
                server.fail = 1000
                if where == "near":
                    raise OSError("x-1.tar: lost")
            return read(source, index)

        monkeypatch.setattr(ShardSource, "read", failing)
        for _ in range(2):
            with pytest.raises(OSError, match=r"x-\d\.tar: (lost|could not be read)"):
                pretrain(config, tmp_path / "parts")
            server.fail = 0
        parts = pretrain(config, tmp_path / "parts")
    assert lost == [17, 33]
    (one, wrong), (two, also) = (checkpoint.latest(out / "checkpoints") for out in (whole, parts))
    assert not wrong and not also
    assert_same(two, one)
    lines = (parts / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [
        json.loads(line)["step"] for line in (whole / "metrics.jsonl").read_text().splitlines()
    ]
