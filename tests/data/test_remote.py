"""Folders, shards and Parquet at addresses are what they are on a disk; servers may fail."""

import io
import os
import pickle
import shutil
import signal
import sys
import tarfile
import time
import warnings

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from fsspec.registry import _registry
from PIL import Image

from meanshift.data import UnreadableSample, open_source, remote, remote_http
from meanshift.data.folder import FolderSource
from meanshift.data.remote import RemoteError, file_system, open_remote, read_ranges
from meanshift.data.remote_folder import list_remote
from meanshift.training.step import TrainStep
from meanshift.transforms.eval import eval_transform
from tests.support.exact import assert_same
from tests.support.processes import make_photos, outcome, pretrain_command, run_processes
from tests.support.signals import write_tones
from tests.support.sources import (
    assert_is_folder,
    assert_same_images,
    load_batches,
    open_one,
    serve_folder,
    titles,
)


@pytest.fixture(autouse=True)
def _quick_and_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "RETRY_DELAYS", (0.0, 0.0))


@pytest.fixture
def photos(tmp_path, make_images):
    root = make_images(tmp_path / "photos", {"a cat#1": 4, "b": 3})
    (root / "b" / ".hidden.jpg").write_bytes(b"")
    return root


@pytest.fixture
def memory():
    """An empty file system in memory; gives the address of a copy of a folder."""
    system = fsspec.filesystem("memory")

    def copy(root, name="copy"):
        system.put(str(root), f"/{name}", recursive=True)
        return f"memory://{name}"

    yield copy
    system.store.clear()
    system.pseudo_dirs[:] = [""]


@pytest.fixture
def server(photos):
    with serve_folder(photos) as running:
        yield running


def tar_folder(root, path):
    """The images of a folder in one tar, with their classes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for number, file in enumerate(sorted(root.rglob("[!.]*.jpg"))):
            parts = {"jpg": file.read_bytes(), "cls": file.parent.name.encode()}
            for suffix, content in parts.items():
                member = tarfile.TarInfo(f"{number:03d}.{suffix}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return path


# In memory


@pytest.mark.parametrize("slash", ["", "/"])
def test_a_folder_at_an_address_is_the_folder(photos, memory, slash):
    source = open_one(memory(photos) + slash)
    assert_is_folder(source, photos)
    assert titles(source) == titles(FolderSource(photos))
    assert source.name == "memory://copy"
    assert_same_images(pickle.loads(pickle.dumps(source)), source)


def test_splits_labels_and_groups_of_a_folder_at_an_address(tmp_path, make_images, memory):
    root = tmp_path / "archive"
    make_images(root / "photos/Training", {"": 4})
    make_images(root / "photos/Testing", {"": 2})
    (root / "photos/labels.csv").write_text(
        "file,label\nTraining/000.jpg,x\nTraining/001.jpg,y\nTesting/000.jpg,x\n"
    )
    (root / "photos/groups.csv").write_text(
        "file,group\nTraining/000.jpg,p\nTraining/001.jpg,p\nTraining/002.jpg,q\n"
    )
    found = []
    for spec in (str(root), memory(root)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            splits = open_source(spec)
        messages = [str(warning.message).replace(spec, "ROOT") for warning in caught]
        found.append(
            [
                (name, titles(source), source.classes, source.labels, source.groups)
                for name, source in splits.items()
            ]
        )
        found[-1].append(messages)
    assert_same(found[1], found[0])
    assert found[0][0][3].tolist() == [0, 1, -1, -1]
    assert "Training/ is train (4 images)" in " ".join(messages)


def test_stacks_and_signals_at_an_address(tmp_path, memory):
    noise = np.random.default_rng(0)
    pages = [Image.fromarray(noise.integers(0, 255, (9, 8), np.uint8)) for _ in range(3)]
    (tmp_path / "stacks").mkdir()
    pages[0].save(tmp_path / "stacks/one.tif", save_all=True, append_images=pages[1:])
    for root in (tmp_path / "stacks", write_tones(tmp_path / "tones", count=2)):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*1 files are stacks of 3 images|.*groups are kept")
            ours, theirs = open_one(memory(root, root.name)), open_one(root)
        assert titles(ours) == titles(theirs)
        assert (ours.kind, ours.sampling_rate) == (theirs.kind, theirs.sampling_rate)
        ours.prefetch(range(len(ours)))
        assert_same_images(ours, theirs)


@pytest.mark.parametrize("spec", ["{}/*.tar", "{}", "{}/x-{{0..1}}.tar", "{}/x-[01].tar"])
def test_shards_at_an_address(photos, tmp_path, memory, spec):
    for number in range(2):
        tar_folder(photos, tmp_path / f"tars/x-{number}.tar")
    source = open_one(spec.format(memory(tmp_path / "tars")))
    local = open_one(tmp_path / "tars")
    assert titles(source) == titles(local)
    assert source.classes == local.classes
    source.prefetch([3, 9])
    assert_same_images(source, local)


def test_parquet_in_a_folder_at_an_address(photos, tmp_path, memory):
    images = [file.read_bytes() for file in sorted(photos.rglob("[!.]*.jpg"))]
    for split, part in (("train", images[:4]), ("test", images[4:])):
        (tmp_path / "parquet/data").mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"jpg": part}), tmp_path / f"parquet/data/{split}-0.parquet")
    for spec in ("{}", "{}/data/*.parquet"):
        splits = open_source("hf+stream:" + spec.format(memory(tmp_path / "parquet")))
        assert {name: len(source) for name, source in splits.items()} == {"train": 4, "test": 3}
    assert_same_images(splits["train"], FolderSource(photos).subset(torch.arange(4)))


def test_the_content_fingerprint_sees_a_rewritten_file(photos, memory):
    address = memory(photos)
    before = open_one(address)
    fsspec.filesystem("memory").pipe("/copy/b/000.jpg", (photos / "b/001.jpg").read_bytes())
    after = open_one(address)
    assert after.fingerprint() == before.fingerprint()
    assert after.content_fingerprint() != before.content_fingerprint()
    with pytest.raises(RemoteError, match=r"b/000\.jpg: has \d+ bytes now and had \d+ when"):
        before.read(4)


def test_a_file_that_is_gone_is_one_bad_image(photos, memory):
    source = open_one(memory(photos))
    fsspec.filesystem("memory").rm("/copy/b/000.jpg")
    for prefetched in (False, True):
        if prefetched:
            source.prefetch([3, 4])
        with pytest.raises(UnreadableSample, match="could not be read"):
            source.read(4)
        assert source.read(3).shape == (3, 40, 48)


# What is no address of images


def test_addresses_without_images(photos, memory):
    with pytest.raises(OSError, match=r"memory://none: could not be read \(FileNotFoundError"):
        open_source("memory://none")
    memory(photos)
    with pytest.raises(ValueError, match=r"no file matches, or its server lists no files"):
        open_source("memory://copy/*.tar")
    fsspec.filesystem("memory").pipe("/text/a.txt", b"a")
    with pytest.raises(ValueError, match=r"memory://text: no image found, but 1 other files"):
        open_source("memory://text")


@pytest.mark.parametrize(
    ("address", "module", "message"),
    [
        ("s3://bucket/x.tar", "s3fs", "s3:// needs s3fs; type: pip install s3fs"),
        ("gs://bucket/photos", "gcsfs", "gs:// needs .* pip install gcsfs"),
        ("https://host/x.tar", "aiohttp", r"https:// .* pip install 'meanshift\[remote\]'"),
        ("hf://datasets/a/b", "huggingface_hub", r"hf:// .* install 'meanshift\[huggingface\]'"),
        ("nope://host/x.tar", "fsspec.none", "fsspec knows no nope://; need a path, or an address"),
    ],
)
def test_a_missing_package_is_named(monkeypatch, address, module, message):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(_registry, address.partition(":")[0], raising=False)
    with pytest.raises(ValueError, match=message):
        open_source(address)


# Over HTTP


def test_a_folder_that_a_server_lists(photos, server):
    source = open_one(server.address)
    assert_is_folder(source, photos)
    assert titles(source) == titles(FolderSource(photos))
    server.requests.clear()
    again = open_one(server.address)
    assert len(server.requests) == 3  # one for each folder
    assert again.content_fingerprint() == source.content_fingerprint()
    os.utime(photos / "b/002.jpg", ns=(0, 0))
    assert open_one(server.address).content_fingerprint() != source.content_fingerprint()


def test_patterns_where_a_server_lists_its_files(photos, tmp_path):
    for number in range(2):
        tar_folder(photos, tmp_path / f"tars/x-{number}.tar")
    with serve_folder(tmp_path / "tars") as server:
        assert len(open_one(f"{server.address}/x-*.tar")) == 14
        assert len(open_one(f"{server.address}/")) == 14


def test_a_batch_is_requested_together(photos, server):
    source = open_one(server.address)
    assert source.sample_spec.channels == 3  # reads some
    server.requests.clear()
    server.most_at_once = 0
    server.latency = 0.05
    (batch,) = load_batches(source, 0, 1, batch_size=7)
    assert len(server.requests) == 7
    assert server.most_at_once == 7
    server.requests.clear()
    eval_transform(source, torch.arange(7), 16)
    assert len(server.requests) == 7
    server.latency = 0.0
    assert_same(vars(batch), vars(load_batches(FolderSource(photos), 0, 1, batch_size=7)[0]))


def test_no_more_requests_at_a_time_than_allowed(server, monkeypatch):
    monkeypatch.setattr(remote, "CONCURRENT", 2)
    server.latency = 0.02
    source = open_one(server.address)
    source.prefetch(range(7))
    assert server.most_at_once == 2


def test_workers_and_the_process_that_forked_them_read_at_once(photos, server):
    """The connections of this process outlive its forks, which drop their copies of them."""
    source = open_one(server.address)
    source.prefetch(range(7))
    loaded = load_batches(source, 0, 4, batch_size=3, workers=2)
    started = time.monotonic()
    source.prefetch(range(7))
    assert time.monotonic() - started < remote_http.TIMEOUT / 2
    assert_same_images(source, FolderSource(photos))
    local = load_batches(FolderSource(photos), 0, 4, batch_size=3)
    for one, two in zip(loaded, local, strict=True):
        assert_same(vars(one), vars(two))


def test_the_error_of_a_worker_names_the_file(server):
    source = open_one(server.address)
    server.fail = 1000
    with pytest.raises(OSError, match=r"/a%20cat%231/000\.jpg: could not be read"):
        source.read(0)
    with pytest.raises(OSError, match=r"\.jpg: could not be read"):
        load_batches(source, 0, 2, batch_size=3, workers=1)


@pytest.mark.parametrize("how", ["hang up", 500, 503])
def test_a_server_that_fails_is_no_bad_image(server, how):
    source = open_one(server.address)
    server.how = how
    server.fail = 2
    source.prefetch([0, 1])
    assert source.read(1).shape == (3, 40, 48)
    server.fail = 1000
    for prefetch in (False, True):
        if prefetch:
            source.prefetch([2, 3])
        with pytest.raises(RemoteError, match=r"002\.jpg: could not be read .* check the address"):
            source.read(2)
    server.fail = 0
    assert source.read(2).shape == (3, 40, 48)  # an error is raised once


@pytest.mark.parametrize("how", [404, 403])
def test_one_file_that_a_server_refuses_is_one_bad_image(server, how):
    source = open_one(server.address)
    server.how = how
    server.fail = 1
    server.fail_at = "/b/001"
    source.prefetch(range(7))
    with pytest.raises(UnreadableSample, match=f"could not be read .HTTP {how}"):
        source.read(5)
    assert source.read(6).shape == (3, 40, 48)
    assert len([path for path, _ in server.requests if "/b/001" in path]) == 1


def test_half_of_a_file_is_requested_again(photos, server):
    source = open_one(server.address)
    server.half = 2
    source.prefetch(range(7))
    assert_same_images(source, FolderSource(photos))


def test_a_folder_that_cannot_be_listed_is_an_error_and_not_left_out(server):
    server.how = 503
    server.fail = 1000
    server.fail_at = "/b"
    with pytest.raises(RemoteError, match=r"/b: could not be read \(HTTP 503"):
        open_source(server.address)


def test_whole_files_need_no_ranges(photos):
    with serve_folder(photos, ranges=False) as server:
        source = open_one(server.address)
        assert_is_folder(source, photos)
        assert source.content_fingerprint() == open_one(server.address).content_fingerprint()


def test_a_server_that_never_answers_is_an_error(server, monkeypatch):
    source = open_one(server.address)
    monkeypatch.setattr(remote_http, "TIMEOUT", 0.05)
    server.latency = 0.4
    with pytest.raises(RemoteError, match=r"could not be read \(SocketTimeoutError"):
        source.read(0)
    server.latency = 0.0


def test_a_shard_of_the_same_size_but_another_version_is_refused(photos, tmp_path):
    path = tar_folder(photos, tmp_path / "tars/x.tar")
    with serve_folder(path.parent) as server:
        source = open_one(f"{server.address}/x.tar")
        source.prefetch([0])
        source.read(0)
        os.utime(path, ns=(0, 0))
        with pytest.raises(RemoteError, match=r"x\.tar: is another file now .* start again"):
            source.read(1)
        with pytest.raises(OSError, match=r"x\.tar: is another file now"):
            load_batches(source, 0, 1, batch_size=3, workers=1)
        path.unlink()
        with pytest.raises(OSError, match=r"x\.tar: could not be read \(HTTP 404"):
            source.read(1)


def test_a_server_that_stops_to_support_ranges_is_refused(photos, tmp_path):
    path = tar_folder(photos, tmp_path / "tars/x.tar")
    with serve_folder(path.parent) as server:
        source = open_one(f"{server.address}/x.tar")
        server.ranges = False
        with pytest.raises(RemoteError, match=r"ignores Range requests \(it answered 200\)"):
            source.read(0)


def test_a_range_beyond_the_end_is_an_error_and_an_empty_one_is_empty(memory, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/x").write_bytes(b"abcdef")
    (file,) = open_remote([memory(tmp_path / "folder") + "/x"])
    whole, empty, beyond = read_ranges([(file, 1, 4), (file, 3, 0), (file, 4, 5)])
    assert (whole, empty) == (b"bcde", b"")
    assert isinstance(beyond, RemoteError) and "ends before byte 9" in str(beyond)
    with pytest.raises(RemoteError, match="ends before byte 9"):
        file.read_at(4, 5)


def test_options_come_from_the_configuration_of_fsspec(server, monkeypatch):
    options = {"client_kwargs": {"headers": {"Authorization": "Bearer x"}}}
    monkeypatch.setitem(fsspec.config.conf, "http", options)
    client = file_system(server.address).client_kwargs
    assert client["headers"] == {"Authorization": "Bearer x"}
    assert client["trust_env"] and client["timeout"].sock_read == remote_http.TIMEOUT
    assert len(open_one(server.address)) == 7


def test_a_listing_is_a_tree(server):
    root = list_remote(server.address)
    assert root.entries() == (["a cat#1", "b"], [])
    file = root / "b" / "001.jpg"
    assert file.is_file() and not file.is_dir() and file.parent == root / "b"
    assert (root / "b").is_dir() and file.suffix == ".jpg"
    assert str(file) == f"{server.address}/b/001.jpg"
    assert not (root / "b/.hidden.jpg").is_file()
    with pytest.raises(FileNotFoundError, match=r"none\.jpg: no such file when the folder"):
        (root / "none.jpg").stream()


# A run


@pytest.mark.slow
@pytest.mark.filterwarnings("always:.*cannot be read")
@pytest.mark.parametrize("kind", ["folder", "shards"])
def test_a_killed_run_over_http_continues_to_the_same_bits(tmp_path, kind):
    photos = make_photos(tmp_path / "photos")
    with tarfile.open(tmp_path / "photos/x.tar", "w") as tar:
        tar.add(photos, "")

    def kill_itself():
        step = TrainStep.__call__

        def changed(self, images, now):
            if now.step == 7:
                os.kill(os.getpid(), signal.SIGKILL)
            return step(self, images, now)

        TrainStep.__call__ = changed

    with serve_folder(photos) as server:
        spec = {"folder": f"{server.address}/", "shards": f"{server.address}/x.tar"}[kind]

        def command(out):
            return pretrain_command(spec, out, data__workers=2)

        for out, before in (("whole", {}), ("parts", {0: kill_itself}), ("parts", {})):
            log = tmp_path / "log"
            codes, group = run_processes(1, command(tmp_path / out), log, before=before)
            assert codes == [-signal.SIGKILL if before else 0], group.output
            shutil.rmtree(log)
    assert_same(outcome(tmp_path / "parts"), outcome(tmp_path / "whole"))
