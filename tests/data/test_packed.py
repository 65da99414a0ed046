"""A store gives the images that it was packed from, also after a kill or a full disk."""

import json
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import time

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms.v2 import functional as TF

from meanshift import config
from meanshift.config.samples import RGB
from meanshift.data import UnreadableSample, open_source, train_and_validation
from meanshift.data import packed as packed_module
from meanshift.data.folder import FolderSource
from meanshift.data.packed import PackedSource, pack
from meanshift.models.encoder import build_backbone
from meanshift.models.features import extract_features
from meanshift.runtime import checkpoint, checksum
from tests.support.exact import assert_same
from tests.support.processes import limit_file_size, run_processes, start_processes
from tests.support.sources import load_batches, titles

RANDOM = np.random.default_rng(0)
PIXELS = RANDOM.integers(0, 256, (12, 6, 8, 3), dtype=np.uint8)


def packed(root, out, **options):
    return pack(open_source(str(root)), out, name=str(root), **options)


def files_of(out):
    return {path.name: path.read_bytes() for path in sorted(out.iterdir())}


def assert_alike(store, sources):
    """The same splits, names, labels and classes, in the same order."""
    assert list(store) == list(sources)
    for ours, theirs in zip(store.values(), sources.values(), strict=True):
        assert titles(ours) == titles(theirs)
        assert ours.classes == theirs.classes
        if theirs.labels is None:
            assert ours.labels is None
        else:
            assert torch.equal(ours.labels, theirs.labels)


def assert_same_pixels(store, sources):
    for ours, theirs in zip(store.values(), sources.values(), strict=True):
        for index in range(len(theirs)):
            rgb = theirs.with_spec(RGB).sample(index)
            assert torch.equal(ours.read(index), rgb), theirs.title(index)


@pytest.fixture
def broken(tmp_path, make_images):
    """Two classes of five images, of 40 x 48 and 30 x 44; the fourth is none."""
    root = make_images(tmp_path / "photos", {"a": 5})
    make_images(root, {"b": 5}, size=(30, 44))
    (root / "a" / "003.jpg").write_bytes(b"no image")
    return root


# Contents


def test_images_that_are_small_enough_do_not_change(tmp_path, make_images):
    root = make_images(tmp_path / "photos", {"pear": 9, "apple": 12})
    store = packed(root, tmp_path / "out", side=40)
    opened = open_source(str(tmp_path / "out"))
    for found in (store, opened):
        assert_alike(found, open_source(str(root)))
        assert_same_pixels(found, open_source(str(root)))
    assert isinstance(opened["train"], PackedSource) and not opened["train"].uniform
    assert sorted(files_of(tmp_path / "out")) == ["pack.json", "train.bin", "train.npz"]


@pytest.mark.parametrize("size", [(40, 48), (48, 40), (33, 97), (31, 200), (20, 20), (32, 64)])
def test_large_images_are_resized_as_torchvision_does(tmp_path, make_images, size):
    root = make_images(tmp_path / "photos", {"": 2}, size=size)
    store = packed(root, tmp_path / "out", side=32)["train"]
    for index in range(2):
        whole = open_source(str(root))["train"].read(index)
        small = TF.resize(whole, [32], antialias=True) if min(size) > 32 else whole
        assert torch.equal(store.read(index), small)
        assert min(store.read(index).shape[1:]) == min(32, *size)


def test_gray_and_cmyk_images_become_rgb(tmp_path):
    root = tmp_path / "photos"
    root.mkdir()
    gray = RANDOM.integers(0, 256, (50, 60), dtype=np.uint8)
    Image.fromarray(gray).save(root / "gray.png")
    Image.fromarray(RANDOM.integers(0, 256, (70, 60, 4), dtype=np.uint8), "CMYK").save(
        root / "print.jpg"
    )
    for side in (256, 32):
        store = packed(root, tmp_path / f"out-{side}", side=side)["train"]
        source = open_source(str(root))["train"].with_spec(RGB)
        for index, whole in enumerate(map(source.sample, range(2))):
            small = whole if side == 256 else TF.resize(whole, [32], antialias=True)
            assert torch.equal(store.read(index), small)
    whole = open_source(str(tmp_path / "out-256"))["train"]
    assert torch.equal(whole.read(0), torch.from_numpy(gray).expand(3, -1, -1))


@pytest.mark.parametrize(
    ("shape", "dtype", "found"),
    [
        ((4, 9, 9), np.uint16, "images of 1 channel, 16 bits or more"),
        ((4, 9, 9, 4), np.uint8, "images of 4 channels, 8 bits"),
        ((4, 9), np.float32, "vectors of 9 columns"),
    ],
)
def test_what_is_no_8_bit_rgb_or_gray_is_not_packed(tmp_path, shape, dtype, found):
    np.save(tmp_path / "a.npy", RANDOM.integers(0, 200, shape).astype(dtype))
    with pytest.raises(ValueError, match=rf"a\.npy: {found}.*; a store holds 8-bit RGB images"):
        packed(tmp_path / "a.npy", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_16_bit_image_among_8_bit_ones_keeps_its_place(tmp_path, make_images):
    root = make_images(tmp_path / "photos", {"": 3})
    Image.fromarray(np.full((9, 9), 4000, np.uint16)).save(root / "deep.png")
    with pytest.warns(UserWarning, match=r"1 of 4 images cannot .*deep\.png \(int32 values among"):
        packed(root, tmp_path / "out")


def test_unreadable_images_keep_their_places_and_reasons(tmp_path, broken):
    (broken / "b" / "001.jpg").write_bytes(b"")
    with pytest.warns(UserWarning, match=r"2 of 10 images cannot .*a/003\.jpg \(Unidentified"):
        store = packed(broken, tmp_path / "out")
    folder = open_source(str(broken))
    assert_alike(store, folder)
    for index in range(10):
        if index not in (3, 6):
            assert torch.equal(store["train"].read(index), folder["train"].read(index))
            continue
        with pytest.raises(UnreadableSample) as theirs:
            folder["train"].read(index)
        with pytest.raises(UnreadableSample) as ours:
            store["train"].read(index)
        assert ours.value.args == theirs.value.args


def test_a_store_of_nothing_but_unreadable_images_opens(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").write_bytes(b"no image")
    with pytest.warns(UserWarning, match="1 of 1 images cannot be read"):
        source = packed(tmp_path / "photos", tmp_path / "out")["train"]
    with pytest.raises(UnreadableSample, match=r"a\.jpg"):
        pickle.loads(pickle.dumps(source)).read(0)
    assert source.fingerprint()


def test_splits_stay_splits(tmp_path, make_images):
    root = make_images(tmp_path / "photos", {"train/a": 9, "train/b": 2, "val/a": 3, "val/b": 1})
    store = packed(root, tmp_path / "out", side=16)
    assert_alike(store, open_source(str(root)))
    assert [len(part) for part in open_source(str(tmp_path / "out")).values()] == [11, 4]
    train, validation = train_and_validation(str(tmp_path / "out"), "auto", seed=0)
    assert (len(train), len(validation)) == (11, 4)


def test_a_flat_folder_stays_without_labels(tmp_path, make_images):
    root = make_images(tmp_path / "photos", {"": 3})
    source = packed(root, tmp_path / "out")["train"]
    assert source.labels is None and source.classes == []


def test_labels_of_a_table_are_packed_and_unknown_ones_stay_unknown(tmp_path, make_images):
    root = make_images(tmp_path / "photos", {"": 4})
    (root / "labels.csv").write_text("file,label\n000.jpg,pear\n002.jpg,apple\n003.jpg,pear\n")
    with pytest.warns(UserWarning, match="labels 3 files"):
        store = packed(root, tmp_path / "out")
    assert store["train"].labels.tolist() == [1, -1, 0, 1]
    assert store["train"].classes == ["apple", "pear"]


def test_arrays_can_be_packed(tmp_path):
    labels = np.arange(12) % 3
    np.savez(tmp_path / "a.npz", x_train=PIXELS, y_train=labels, x_test=PIXELS[:4, ..., 0])
    store = packed(tmp_path / "a.npz", tmp_path / "out", workers=1)
    assert_alike(store, open_source(str(tmp_path / "a.npz")))
    assert_same_pixels(store, open_source(str(tmp_path / "a.npz")))
    assert store["test"].labels is None and store["test"].read(3).shape == (3, 6, 8)
    small = packed(tmp_path / "a.npz", tmp_path / "small", side=3)["test"].read(1)
    gray = torch.from_numpy(PIXELS[1, ..., 0]).expand(3, -1, -1)
    assert torch.equal(small, TF.resize(gray, [3], antialias=True))


def test_a_store_can_be_packed_again(tmp_path, broken):
    with pytest.warns(UserWarning, match="cannot be read"):
        packed(broken, tmp_path / "large")
    with pytest.warns(UserWarning, match=r"1 of 10 images .*photos/a/003\.jpg"):
        twice = packed(tmp_path / "large", tmp_path / "small", side=20)
    with pytest.warns(UserWarning, match="cannot be read"):
        once = packed(broken, tmp_path / "once", side=20)
    assert_alike(twice, once)
    assert files_of(tmp_path / "small")["train.bin"] == files_of(tmp_path / "once")["train.bin"]


def test_names_may_be_any_bytes(tmp_path, make_images):
    root = make_images(tmp_path / "photos", {"a": 1, "b": 1})
    odd = os.fsdecode(b"caf\xe9\n \xff.jpg")
    (root / "a" / "000.jpg").rename(root / "a" / odd)
    (root / "b").rename(root / os.fsdecode(b"\xfe"))
    store = packed(root, tmp_path / "out")
    assert_alike(open_source(str(tmp_path / "out")), open_source(str(root)))
    assert store["train"].title(0) == f"a/{odd}"


def test_reading_copies_nothing(tmp_path, make_images):
    source = packed(make_images(tmp_path / "photos", {"": 3}), tmp_path / "out")["train"]
    start = source.pixels.data_ptr()
    assert [source.read(i).data_ptr() - start for i in range(3)] == [0, 5760, 11520]
    assert source.read(1).stride() == (1, 144, 3)


def test_a_store_larger_than_the_memory_is_mapped(tmp_path, make_images):
    packed(make_images(tmp_path / "photos", {"": 2}), tmp_path / "out")
    with np.load(tmp_path / "out" / "train.npz") as index:
        arrays = dict(index)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    arrays["sizes"] = np.array([[40, 48], [2**20, memory // 2**20]], np.int32)  # three times of it
    del arrays["checksums"]  # the image would be read to the end
    np.savez(tmp_path / "out" / "train.npz", **arrays)
    try:
        os.truncate(tmp_path / "out" / "train.bin", 3 * (1920 + 2**20 * (memory // 2**20)))
    except OSError:
        pytest.skip("no files with holes here")
    source = PackedSource(tmp_path / "out", "train", side=256, classes=[])
    assert not source.read(1)[:, -1].any() and source.read(0).any()


# Fingerprints and workers


def test_fingerprints_distinguish_stores(tmp_path, make_images):
    root = make_images(tmp_path / "photos", {"a": 2, "b": 2})
    one = packed(root, tmp_path / "one", side=32)["train"]
    same = packed(root, tmp_path / "same", side=32)["train"]
    assert one.fingerprint() == same.fingerprint()
    others = [
        packed(root, tmp_path / "side", side=20)["train"],
        packed(root, tmp_path / "large", side=300)["train"],
        packed(root, tmp_path / "larger", side=301)["train"],
        open_source(str(root))["train"],
    ]
    make_images(root, {"a": 2, "b": 2}, seed=1)  # other images of the same names and sizes
    others.append(packed(root, tmp_path / "other", side=32)["train"])
    assert len({source.fingerprint() for source in (one, *others)}) == 6


def test_the_content_fingerprint_sees_that_the_store_was_rewritten(tmp_path, make_images):
    root = make_images(tmp_path / "photos", {"": 2})
    source = packed(root, tmp_path / "out")["train"]
    fingerprint = source.fingerprint()
    content_fingerprint = source.content_fingerprint()
    assert source.content_fingerprint() == content_fingerprint
    os.utime(tmp_path / "out" / "train.bin", (1, 1))
    assert source.content_fingerprint() != content_fingerprint
    assert source.fingerprint() == fingerprint


def _read_elsewhere(source, pipe):
    pipe.send((source.labels.tolist(), source.read(3).sum().item(), source.classes))


@pytest.mark.slow
def test_a_worker_maps_the_file_itself(tmp_path, make_images):
    root = make_images(tmp_path / "photos", {"a": 30, "b": 30}, size=(80, 80))
    source = packed(root, tmp_path / "out")["train"]
    source.classes = ["b", "a"]  # as `match_classes` does
    source.labels = 1 - source.labels
    assert len(pickle.dumps(source)) < 10_000 < len(source.pixels)
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    child = context.Process(target=_read_elsewhere, args=(source, theirs))
    child.start()
    assert ours.poll(60)
    assert ours.recv() == ([1] * 30 + [0] * 30, source.read(3).sum().item(), ["b", "a"])
    child.join()


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_crops_are_those_of_the_folder(tmp_path, broken, workers):
    with pytest.warns(UserWarning, match="cannot be read"):
        store = packed(broken, tmp_path / "out", side=40)["train"]
    ours = load_batches(store, 0, 9, batch_size=3, seed=0, workers=workers)
    theirs = load_batches(open_source(str(broken))["train"], 0, 9, batch_size=3, seed=0)
    assert any(batch.bad for batch in ours)
    assert_same([vars(batch) for batch in ours], [vars(batch) for batch in theirs])


def test_features_are_those_of_the_folder(tmp_path, make_images):
    root = make_images(tmp_path / "photos", {"a": 5, "b": 6})
    store = packed(root, tmp_path / "out", side=40)["train"]
    network, _ = build_backbone(config.Encoder(name="resnet10", stem="small-stride2", width=0.25))
    how = {"image_size": 32, "device": torch.device("cpu")}
    theirs = extract_features(network, open_source(str(root))["train"], **how)
    for workers in (0, 2):
        assert torch.equal(extract_features(network, store, workers=workers, **how), theirs)


@pytest.mark.filterwarnings("always:.*cannot be read")
@pytest.mark.slow
def test_runs_from_the_store_end_in_the_same_bits_as_from_the_folder(tmp_path, call, broken):
    assert call("pack", broken, tmp_path / "out", "--side", 40)[0] == 0
    settings = {
        "data.image_size": 16, "data.max_bad_fraction": 0.2, "encoder.width": 0.125,
        "encoder.stem": "small-stride2", "encoder.name": "resnet10", "method.bank_size": 6,
        "method.k": 2, "train.epochs": 2, "train.batch_size": 3, "optim.warmup_epochs": 1,
        "train.device": "cpu",
    }  # fmt: skip
    flags = [word for name, value in settings.items() for word in (f"--{name}", value)]
    states = []
    for data, workers in ((broken, 0), (tmp_path / "out", 0), (tmp_path / "out", 2)):
        run = tmp_path / f"run-{len(states)}"
        code, _, errors = call(
            "pretrain", "small", "--data", data, "--out", run, "--data.workers", workers, *flags
        )
        assert code == 0, errors
        state, _ = checkpoint.latest(run / "checkpoints")
        states.append({key: state[key] for key in state.keys() - {"config", "source"}})
    assert any(isinstance(value, dict) for value in states[0].values())
    assert_same(states[1], states[0])
    assert_same(states[2], states[0])


# Stopped and continued


def command(root, out, *more):
    return ["pack", str(root), str(out), *map(str, more)]


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """Images whose pixels are synchronized to the disk several times."""
    root = tmp_path_factory.mktemp("many")
    noise = np.random.default_rng(0)
    for split, count in (("train", 130), ("val", 45)):
        (root / split).mkdir()
        for index in range(count):
            pixels = noise.integers(0, 256, (400 + index % 3, 400, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / split / f"{index:03d}.jpg")
    (root / "train" / "050.jpg").write_bytes(b"no image")
    return root


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_killed_pack_continues_to_the_same_bytes(many, tmp_path, workers):
    with pytest.warns(UserWarning, match="1 of 175 images cannot be read"):
        packed(many, tmp_path / "whole", side=500)
    out = tmp_path / "out"
    part = out / "train.part"
    synced = 0
    for _ in range(2):
        words = command(many, out, "--side", 500, "--workers", workers)
        with start_processes(1, words, tmp_path / "output") as group:
            while not part.exists() or part.stat().st_size <= synced:
                assert group.processes[0].poll() is None, group.output
                time.sleep(0.001)
            group.signal(signal.SIGSTOP)
            with pytest.raises(ValueError, match="another process is packing into it; wait"):
                packed(many, out, side=500)
            group.signal(signal.SIGKILL)
            group.wait()
        assert not (out / "pack.json").exists()
        synced = part.stat().st_size
    assert 0 < part.read_bytes().count(b"\n") < 130
    with pytest.raises(ValueError, match=rf"out: unfinished; type meanshift pack {many} {out} --s"):
        open_source(str(out))
    read = []
    counted = open_source(str(many))
    for source in counted.values():
        source.read = lambda i, source=source: read.append(i) or type(source).read(source, i)
    with pytest.warns(UserWarning, match=r"1 of 175 images cannot .*050\.jpg"):
        pack(counted, out, name=str(many), side=500)
    assert len(read) < 175 - 30  # what is on the disk is not decoded again
    assert_same_store(out, tmp_path / "whole")


def assert_same_store(one, two):
    assert files_of(one).keys() == files_of(two).keys()
    for name, content in files_of(one).items():
        assert content == files_of(two)[name], name


class Stopped(Exception):
    pass


@pytest.fixture
def stopping(monkeypatch):
    """Names of files: a pack stops before it writes one of them."""
    stops = set()

    def stop_before(module, name):
        write = getattr(module, name)

        def stop(path, *arguments, **options):
            if path.name in stops:
                raise Stopped
            write(path, *arguments, **options)

        monkeypatch.setattr(module, name, stop)

    stop_before(packed_module, "_write")
    stop_before(checksum, "write_json")
    return stops


@pytest.mark.filterwarnings("ignore:.*cannot be read")
def test_a_pack_stopped_anywhere_continues_to_the_same_bytes(tmp_path, broken, stopping):
    """Files cut at random bytes stand for all that a dying machine can leave behind."""
    packed(broken, tmp_path / "whole")
    draw = random.Random(0)
    out = tmp_path / "out"
    first = ("unfinished.json", "train.npz", "pack.json")
    second = ("train.npz", "pack.json")
    for trial in range(30):
        shutil.rmtree(out, ignore_errors=True)
        for stop in (first[trial % 3], second[trial % 2]):
            stopping.add(stop)
            with pytest.raises(Stopped):
                packed(broken, out)
            for name in ("train.part", "train.bin"):
                if (out / name).exists():
                    os.truncate(out / name, draw.randint(0, (out / name).stat().st_size))
            stopping.clear()
        packed(broken, out)
        assert_same_store(out, tmp_path / "whole")


@pytest.mark.filterwarnings("ignore:.*cannot be read")
@pytest.mark.parametrize("lost", [1, 4])
def test_nothing_on_the_disk_is_decoded_twice_after_two_stops(tmp_path, broken, stopping, lost):
    part = tmp_path / "out" / "train.part"
    stopping.add("train.npz")
    for expected in (20, 1, 0):  # a new store also looks at all of them before
        source = open_source(str(broken))["train"]
        read = []
        source.read = lambda i, read=read: read.append(i) or FolderSource(broken).read(i)
        with pytest.raises(Stopped):
            pack({"train": source}, tmp_path / "out", name="photos")
        assert len(read) == expected
        if expected == 20:  # the last row loses its end
            os.truncate(part, part.stat().st_size - lost)


def test_workers_write_the_same_bytes(tmp_path, broken):
    for workers in (0, 2):
        with pytest.warns(UserWarning, match="cannot be read"):
            packed(broken, tmp_path / f"{workers}", side=20, workers=workers)
    assert_same_store(tmp_path / "0", tmp_path / "2")


def test_a_full_disk_loses_nothing(tmp_path, many):
    """A limit of the size of files stands for the disk: writes fail in the middle, for real."""
    out = tmp_path / "out"
    limited = {0: limit_file_size(40_000_000)}
    words = command(many, out, "--side", 500)
    codes, group = run_processes(1, words, tmp_path / "output", before=limited)
    assert codes == [2] and "Traceback" not in group.output
    assert f"{out}: the store could not be written ([Errno" in group.output
    assert "type the command again: it continues" in group.output
    rows = (out / "train.part").read_bytes().count(b"\n")
    assert rows >= 64  # 16 MiB are 35 images, and twice as many fit
    for store in (out, tmp_path / "whole"):
        with pytest.warns(UserWarning, match="cannot be read"):
            packed(many, store, side=500)
    assert_same_store(out, tmp_path / "whole")


# Refused


@pytest.mark.filterwarnings("always:.*cannot be read")
def test_a_finished_store_is_left_alone(tmp_path, call, broken):
    code, output, errors = call("pack", broken, tmp_path / "out", "--side", 20)
    assert code == 0 and "1 of 10 images cannot be read" in errors
    size = (tmp_path / "out" / "train.bin").stat().st_size
    assert f"out: 10 images, {size:,} bytes, 1 unreadable" in output
    assert f"meanshift pretrain small --data {tmp_path / 'out'} --out runs/x" in output
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    code, output, errors = call("pack", broken, tmp_path / "out", "--side", 20)
    assert code == 0 and "was finished: 10 images" in output and not errors
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}


@pytest.mark.parametrize("finished", [True, False])
def test_another_store_is_refused(tmp_path, make_images, finished):
    root = make_images(tmp_path / "photos", {"a": 2, "b": 2})
    out = tmp_path / "out"
    packed(root, out)
    if not finished:
        (out / "pack.json").rename(out / "unfinished.json")
    before = files_of(out)
    with pytest.raises(ValueError, match=r"packed with --side 256, now it is 64; choose another"):
        packed(root, out, side=64)
    make_images(root, {"a": 2, "b": 2}, seed=1)
    with pytest.raises(
        ValueError, match=r"from other images, labels or groups \(.*photos as it was"
    ):
        packed(root, out)
    assert files_of(out) == before


def test_other_names_of_classes_are_other_labels(tmp_path, make_images):
    root = make_images(tmp_path / "photos", {"": 2})
    (root / "labels.csv").write_text("file,label\n000.jpg,pear\n001.jpg,apple\n")
    packed(root, tmp_path / "out")
    (root / "labels.csv").write_text("file,label\n000.jpg,plum\n001.jpg,apple\n")
    with pytest.raises(ValueError, match="from other images, labels or groups"):
        packed(root, tmp_path / "out")


def test_a_moved_source_is_the_same(tmp_path, make_images):
    packed(make_images(tmp_path / "photos", {"": 2}), tmp_path / "out")
    (tmp_path / "photos").rename(tmp_path / "moved")
    packed(tmp_path / "moved", tmp_path / "out")


def test_what_is_no_store_is_not_written_into(tmp_path, call, make_images):
    root = make_images(tmp_path / "photos", {"a": 2})
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("words")
    code, _, errors = call("pack", root, other)
    assert code == 2 and "has files but no pack.json, so it is no store; need a new" in errors
    assert [path.name for path in other.iterdir()] == ["thesis.txt"]
    code, _, errors = call("pack", root, other / "thesis.txt")
    assert code == 2 and "is a file; need a new directory" in errors
    for inside in (root / "out", root, root / "a" / "x" / ".." / "y"):
        code, _, errors = call("pack", root, inside)
        assert code == 2 and f"inside {root}" in errors and f"as {root}-packed" in errors
    assert [path.name for path in root.iterdir()] == ["a"]


@pytest.mark.parametrize(("flag", "value"), [("--side", 0), ("--workers", -1)])
def test_bad_numbers_are_refused(tmp_path, call, make_images, flag, value):
    root = make_images(tmp_path / "photos", {"a": 2})
    code, _, errors = call("pack", root, tmp_path / "out", flag, value)
    assert code == 2 and f"{flag}: got {value}, need" in errors
    assert not (tmp_path / "out").exists()


def flip(path, place):
    content = bytearray(path.read_bytes())
    content[int(place * (len(content) - 1))] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("place", [0.0, 0.3, 1.0])
def test_a_damaged_image_is_named_and_the_others_are_read(tmp_path, make_images, place):
    store = packed(make_images(tmp_path / "photos", {"": 4}), tmp_path / "out")["train"]
    images = [store.read(index).clone() for index in range(4)]
    del store  # its pages would be damaged with the file
    flip(tmp_path / "out/train.bin", place)
    store = open_source(str(tmp_path / "out"))["train"]
    for index in range(4):
        if index == int(3.99 * place):
            with pytest.raises(UnreadableSample) as caught:
                store.read(index)
            assert caught.value.title == store.title(index)
            assert "train.bin: differs from its checksum; copy the store" in caught.value.reason
        else:
            assert torch.equal(store.read(index), images[index])


@pytest.mark.parametrize("name", ["pack.json", "train.npz"])
@pytest.mark.parametrize("place", [0, 0.05, 0.5, 1])
def test_a_damaged_index_is_named(tmp_path, make_images, name, place):
    packed(make_images(tmp_path / "photos", {"a": 2, "b": 2}), tmp_path / "out")
    flip(tmp_path / "out" / name, place)
    with pytest.raises(ValueError, match=rf"{name}: damaged .*copy the store again, or delete"):
        open_source(str(tmp_path / "out"))


def test_the_index_of_another_store_is_damage(tmp_path, make_images):
    for seed in (0, 1):
        root = make_images(tmp_path / f"photos{seed}", {"": 3}, seed=seed)
        packed(root, tmp_path / f"out{seed}")
    shutil.copy(tmp_path / "out1/train.npz", tmp_path / "out0/train.npz")
    with pytest.raises(ValueError, match=r"train\.npz: damaged"):
        open_source(str(tmp_path / "out0"))


def test_a_store_without_checksums_is_read(tmp_path, make_images):
    """As earlier versions wrote it."""
    store = packed(make_images(tmp_path / "photos", {"": 3}), tmp_path / "out")["train"]
    index = dict(np.load(tmp_path / "out/train.npz"))
    del index["checksums"]
    np.savez(tmp_path / "out/train.npz", **index)
    metadata = json.loads((tmp_path / "out/pack.json").read_text())
    del metadata["checksum"], metadata["indexes"]
    metadata["format"] = "meanshift pack 1"
    (tmp_path / "out/pack.json").write_text(json.dumps(metadata))
    assert_same_pixels(open_source(str(tmp_path / "out")), {"train": store})
    flip(tmp_path / "out/train.npz", 0.5)  # which zip notices
    with pytest.raises(ValueError, match=r"train\.npz: damaged"):
        open_source(str(tmp_path / "out"))


def test_a_store_cut_short_is_not_read(tmp_path, make_images):
    packed(make_images(tmp_path / "photos", {"": 2}), tmp_path / "out")
    os.truncate(tmp_path / "out" / "train.bin", 11_000)
    with pytest.raises(ValueError, match=r"train\.bin: has 11000 bytes, its index needs 11520; co"):
        open_source(str(tmp_path / "out"))


def test_stores_of_other_versions_are_refused(tmp_path, make_images):
    packed(make_images(tmp_path / "photos", {"": 2}), tmp_path / "out")
    path = tmp_path / "out" / "pack.json"
    metadata = json.loads(path.read_text())
    del metadata["checksum"]
    path.write_text(json.dumps({**metadata, "format": "meanshift pack 9"}))
    with pytest.raises(ValueError, match=r"has the format 'meanshift pack 9'; this version reads"):
        open_source(str(tmp_path / "out"))


def test_a_table_of_labels_is_not_for_stores(tmp_path, make_images):
    packed(make_images(tmp_path / "photos", {"": 2}), tmp_path / "out")
    with pytest.raises(ValueError, match="a CSV of labels is for folders of images"):
        open_source(str(tmp_path / "out"), labels=tmp_path / "labels.csv")


@pytest.mark.filterwarnings("ignore:.*left out 1 other")
@pytest.mark.parametrize("text", ["{}", "[1]", "nonsense", '{"format": 3}'])
def test_other_programs_may_leave_a_pack_json(tmp_path, make_images, text):
    root = make_images(tmp_path / "photos", {"a": 2, "b": 2})
    (root / "pack.json").write_text(text)
    assert len(open_source(str(root))["train"]) == 4
