"""Cached features: extracted once, bit-identical, and never those of other weights or images."""

import copy
import json
import os
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from meanshift.data import Source, UnreadableSample, open_source
from meanshift.data.arrays import ArraySource
from meanshift.data.folder import FolderSource
from meanshift.models import feature_cache
from meanshift.models.feature_cache import cached_features, store_features
from meanshift.models.features import extract_features
from meanshift.models.weights import fingerprint
from meanshift.runtime import checksum, files

CPU = torch.device("cpu")
OPTIONS = {"image_size": 16, "resize": 0, "precision": torch.float32}


class Counting(nn.Module):
    """A small network that counts its calls and can fail in one of them."""

    def __init__(self, seed=0):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.body = nn.Sequential(
                nn.Conv2d(3, 6, 3, stride=2),
                nn.BatchNorm2d(6),
                nn.ReLU(),
                nn.AdaptiveAvgPool2d(1),
                nn.Flatten(),
            )
        self.calls = 0
        self.fails_in = 0
        self.error = RuntimeError("on purpose")

    def forward(self, view):
        self.calls += 1
        if self.calls == self.fails_in:
            raise self.error
        return self.body(view)


class Torn(Source):
    """Images in memory that are read one by one; some of them cannot be read."""

    def __init__(self, count, torn=()):
        self.name = "torn"
        self.labels = None
        self.classes = []
        random = np.random.default_rng(0)
        self.pixels = torch.from_numpy(random.integers(0, 256, (count, 3, 6, 7), dtype=np.uint8))
        self.torn = set(torn)

    def __len__(self):
        return len(self.pixels)

    def title(self, index):
        return f"#{index}"

    def read(self, index):
        if index in self.torn:
            raise UnreadableSample(self.title(index), "made so")
        return self.pixels[index]


def arrays(count=600, seed=0):
    """More than two batches of images."""
    random = np.random.default_rng(seed)
    pixels = random.integers(0, 256, (count, 8, 8, 3), dtype=np.uint8)
    return ArraySource(pixels, np.arange(count) % 3, name="toy")


def cache(network, source, folder, **options):
    """The cached rows, their indices, and how often the network was called for them."""
    calls_before = network.calls
    options = {"weights": fingerprint(network), **OPTIONS, **options}
    rows, indices = cached_features(network, source, folder=folder, device=CPU, **options)
    return rows, indices, network.calls - calls_before


def extract(network, source, **options):
    return extract_features(copy.deepcopy(network), source, device=CPU, **{**OPTIONS, **options})


def files_in(folder):
    """The suffixes of all files, hidden ones included, so that no partial file is overlooked."""
    return sorted(path.suffix for path in folder.iterdir()) if folder.exists() else []


def only(suffix, folder):
    (path,) = folder.glob(f"*{suffix}")
    return path


@pytest.fixture
def network():
    return Counting()


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run" / "features"


@pytest.fixture
def photos(tmp_path, make_images):
    return make_images(tmp_path / "photos", {"a": 3, "b": 2}, size=(20, 26))


# Extracted once, bit-identical


def test_features_are_extracted_once(network, folder):
    source = arrays()
    first, indices, calls = cache(network, source, folder)
    assert calls == 3
    again, indices_again, calls = cache(network, arrays(), folder)
    assert calls == 0
    assert torch.equal(first, again)
    assert torch.equal(indices, indices_again)
    assert indices.tolist() == list(range(600))
    assert files_in(folder) == [".json", ".npy"]


def test_cached_features_equal_extract_features(network, folder, photos):
    whole = arrays()
    for source in (whole, whole.subset(torch.arange(500, 3, -2)), FolderSource(photos), Torn(300)):
        rows, indices, calls = cache(network, source, folder)
        assert calls > 0
        assert rows.dtype == torch.float32
        assert rows.shape == (len(source), 6)
        assert torch.equal(rows, extract(network, source))
        assert torch.equal(indices, torch.arange(len(source)))


@pytest.mark.parametrize("size", [16, 24])
def test_stored_features_are_found_and_equal_those_of_an_extraction(network, tmp_path, size):
    source = arrays()
    features = extract(network, source, image_size=size)
    stored, extracted = tmp_path / "stored", tmp_path / "extracted"
    weights = fingerprint(network)
    store_features(features, source, weights=weights, folder=stored, image_size=size)
    rows, _, calls = cache(network, source, stored, image_size=size)
    assert calls == 0
    assert torch.equal(rows, features)
    cache(network, source, extracted, image_size=size)
    for path in extracted.iterdir():
        assert path.read_bytes() == (stored / path.name).read_bytes()


def test_the_file_is_a_plain_npy_file(network, folder):
    rows, _, _ = cache(network, arrays(), folder)
    array = np.load(only(".npy", folder))
    assert array.dtype == np.float32
    assert array.flags.c_contiguous
    assert np.array_equal(array, rows.numpy())
    metadata = json.loads(only(".json", folder).read_text())
    assert metadata["weights"] == fingerprint(network)
    assert (metadata["source"], metadata["image_size"], metadata["bad"]) == ("toy", 16, {})


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's list of mappings")
def test_the_rows_are_mapped_and_not_read(network, folder):
    def mapped():
        return str(only(".npy", folder)) in Path("/proc/self/maps").read_text()

    for _ in range(2):  # fresh, and from the file
        rows, _, _ = cache(network, arrays(), folder)
        assert mapped()
        del rows
        assert not mapped()


def test_the_rows_are_those_of_the_file_and_not_of_a_second_extraction(network, folder):
    cache(network, arrays(), folder)
    array = np.load(only(".npy", folder), mmap_mode="r+")
    array[7, 2] = 12345
    array.flush()
    metadata = checksum.read_json(only(".json", folder))
    metadata["rows"] = checksum.compute(only(".npy", folder))
    checksum.write_json(only(".json", folder), metadata)
    assert cache(network, arrays(), folder)[0][7, 2] == 12345


def test_writing_into_the_rows_leaves_the_file_alone(network, folder):
    for _ in range(2):
        rows, _, _ = cache(network, arrays(), folder)
        before = only(".npy", folder).read_bytes()
        copied = rows.clone()
        rows.zero_()
        assert only(".npy", folder).read_bytes() == before
        assert torch.equal(cache(network, arrays(), folder)[0], copied)


def test_workers_change_no_bit(network, tmp_path, photos):
    (photos / "a/001.jpg").write_bytes(b"")
    results = []
    for workers in (0, 2):
        source = FolderSource(photos)
        with pytest.warns(UserWarning, match="1 of 5 images"):
            results.append(cache(network, source, tmp_path / str(workers), workers=workers))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert results[0][2] == results[1][2] == 1
    contents = [only(".npy", tmp_path / str(workers)).read_bytes() for workers in (0, 2)]
    assert contents[0] == contents[1]


# The model does not change


def test_nothing_of_the_model_changes(network, folder):
    network.train()
    network.body[1].eval()
    before = copy.deepcopy(network.state_dict())
    modes = [m.training for m in network.modules()]
    random = torch.get_rng_state()
    for _ in range(2):
        cache(network, arrays(), folder)
        assert all(torch.equal(a, before[name]) for name, a in network.state_dict().items())
        assert [m.training for m in network.modules()] == modes
        assert all(p.requires_grad and p.grad is None for p in network.parameters())
        assert torch.equal(torch.get_rng_state(), random)


def test_the_rows_do_not_depend_on_the_mode_of_the_network(network, tmp_path):
    rows = [cache(network.train(mode), arrays(), tmp_path / str(mode))[0] for mode in (True, False)]
    assert torch.equal(*rows)


# A file of other weights, images or transforms is never used


def assert_extracted_again(network, source, folder, others, **options):
    """Features are extracted, correct, different from `others`, and then cached."""
    rows, _, calls = cache(network, source, folder, **options)
    assert calls > 0
    assert torch.equal(rows, extract(network, source, **options))
    assert not any(torch.equal(rows, other) for other in others)
    assert cache(network, source, folder, **options)[2] == 0
    return rows


def test_other_weights_have_other_features(network, folder):
    source = arrays()
    known = [cache(network, source, folder)[0]]
    known.append(assert_extracted_again(Counting(1), source, folder, known))
    with torch.no_grad():
        network.body[0].bias[3] += 1
    known.append(assert_extracted_again(network, source, folder, known))
    network.body[1].running_var[0] = 2  # buffers count as well
    assert_extracted_again(network, source, folder, known)


def test_a_replaced_image_has_other_features(network, folder, photos):
    known = [cache(network, FolderSource(photos), folder)[0]]
    Image.new("RGB", (26, 20), "red").save(photos / "b/001.jpg")
    rows = assert_extracted_again(network, FolderSource(photos), folder, known)
    assert (rows != known[0]).any(1).tolist() == [False] * 4 + [True]


def test_an_open_source_notices_a_replaced_image(network, folder, photos):
    source = FolderSource(photos)
    known = [cache(network, source, folder)[0]]
    Image.new("RGB", (26, 20), "red").save(photos / "b/001.jpg")
    assert_extracted_again(network, source, folder, known)


def test_an_image_that_was_added_or_removed_is_noticed(network, folder, photos):
    known = [cache(network, FolderSource(photos), folder)[0]]
    (photos / "a/001.jpg").rename(photos / "a/009.jpg")
    known.append(assert_extracted_again(network, FolderSource(photos), folder, known))
    (photos / "a/009.jpg").unlink()
    assert_extracted_again(network, FolderSource(photos), folder, known)


def test_a_changed_pixel_of_an_array_is_noticed(network, folder):
    source = arrays()
    known = [cache(network, source, folder)[0]]
    source.pixels[599, 3, 3, 1] ^= 128
    rows = assert_extracted_again(network, source, folder, known)
    assert (rows != known[0]).any(1).nonzero()[:, 0].tolist() == [599]


def test_subsets_are_cached_separately(network, folder):
    whole = arrays()
    known = [cache(network, whole, folder)[0]]
    for indices in (torch.arange(300), torch.arange(300, 600), torch.arange(299, -1, -1)):
        known.append(assert_extracted_again(network, whole.subset(indices), folder, known))


@pytest.mark.parametrize(
    "changed", [{"image_size": 18}, {"resize": 24}, {"precision": torch.bfloat16}], ids=str
)
def test_another_transform_has_other_features(network, folder, photos, changed):
    source = FolderSource(photos)
    known = [cache(network, source, folder)[0]]
    assert_extracted_again(network, source, folder, known, **changed)
    assert cache(network, source, folder)[2] == 0


def test_another_version_of_the_transform_has_other_features(network, folder, monkeypatch):
    cache(network, arrays(), folder)
    monkeypatch.setattr(feature_cache, "TRANSFORM_VERSION", feature_cache.TRANSFORM_VERSION + 1)
    assert cache(network, arrays(), folder)[2] == 3


def test_a_file_of_another_format_is_not_used(network, folder, monkeypatch):
    cache(network, arrays(), folder)
    monkeypatch.setattr(feature_cache, "FORMAT", feature_cache.FORMAT + 1)
    assert cache(network, arrays(), folder)[2] == 3


def test_train_and_val_with_the_same_names_sizes_and_dates_are_distinct(network, folder, tmp_path):
    random = np.random.default_rng(0)
    known = []
    for split in ("train", "val"):
        (tmp_path / split).mkdir()
        for index in range(3):  # uncompressed, so of one size; unpacked, so of the archive's date
            path = tmp_path / split / f"{index}.bmp"
            Image.fromarray(random.integers(0, 256, (9, 9, 3), dtype=np.uint8)).save(path)
            os.utime(path, (0, 0))
        known.append(assert_extracted_again(network, FolderSource(tmp_path / split), folder, known))


def test_splits_of_a_named_dataset_are_distinct(network, folder, tmp_path, monkeypatch):
    """DTD has as many images of each class to train as to test, in the same order."""
    random = np.random.default_rng(0)
    inside = tmp_path / "dtd" / "dtd"
    (inside / "labels").mkdir(parents=True)
    for split in ("train", "test"):
        names = [f"{name}/{split}{index}.jpg" for name in ("dotted", "woven") for index in range(2)]
        (inside / "labels" / f"{split}1.txt").write_text("\n".join(names))
        for name in names:
            path = inside / "images" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(random.integers(0, 256, (20, 20, 3), dtype=np.uint8)).save(path)
    monkeypatch.setenv("MEANSHIFT_DATA", str(tmp_path))
    splits, known = open_source("dtd"), []
    assert torch.equal(splits["train"].labels, splits["test"].labels)
    for split in ("train", "test"):
        known.append(assert_extracted_again(network, splits[split], folder, known))
    Image.new("RGB", (20, 20), "red").save(inside / "images/woven/test1.jpg")
    rows = assert_extracted_again(network, open_source("dtd")["test"], folder, known)
    assert (rows != known[1]).any(1).tolist() == [False, False, False, True]


# A damaged file is named and written again


def flip(path, place):
    content = bytearray(path.read_bytes())
    content[int(place * (len(content) - 1))] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "npy cut short by a row": lambda npy, _: npy.write_bytes(npy.read_bytes()[: -6 * 4]),
    "npy of a header alone": lambda npy, _: npy.write_bytes(npy.read_bytes()[:128]),
    "npy empty": lambda npy, _: npy.write_bytes(b""),
    "npy of other rows": lambda npy, _: np.save(npy, np.zeros((300, 6), np.float32)),
    "npy with a flipped bit in its header": lambda npy, _: flip(npy, 0),
    "npy with a flipped bit": lambda npy, _: flip(npy, 0.5),
    "npy with a flipped last bit": lambda npy, _: flip(npy, 1),
    "json empty": lambda _, metadata: metadata.write_bytes(b""),
    "json cut short": lambda _, metadata: metadata.write_bytes(metadata.read_bytes()[:100]),
    "json of something else": lambda _, metadata: metadata.write_text("[1, 2]"),
    "json without its checksum": lambda _, metadata: metadata.write_text(
        metadata.read_text().replace("meanshift-crc32", "meanshift-crc33")
    ),
    "json with a flipped first bit": lambda _, metadata: flip(metadata, 0),
    "json with a flipped bit": lambda _, metadata: flip(metadata, 0.8),
    "json of other weights": lambda _, metadata: checksum.write_json(
        metadata, {**checksum.read_json(metadata), "weights": "0123456789abcdef"}
    ),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_named_and_written_again(network, folder, damage):
    rows, _, _ = cache(network, arrays(300), folder)
    expected = rows.clone()
    content = only(".npy", folder).read_bytes()
    del rows  # its pages would be damaged with the file
    damage(only(".npy", folder), only(".json", folder))
    with pytest.warns(UserWarning, match=r"damaged \(.*\); the features are extracted again"):
        again, indices, calls = cache(network, arrays(300), folder)
    assert calls == 2
    assert torch.equal(again, expected)
    assert len(indices) == 300
    assert only(".npy", folder).read_bytes() == content
    assert cache(network, arrays(300), folder)[2] == 0


@pytest.mark.parametrize("suffix", [".npy", ".json"])
def test_a_missing_file_is_written_again(network, folder, suffix):
    cache(network, arrays(300), folder)
    only(suffix, folder).unlink()
    assert cache(network, arrays(300), folder)[2] == 2
    assert cache(network, arrays(300), folder)[2] == 0


def test_two_files_that_were_swapped_are_written_again(network, folder):
    rows = [cache(network, arrays(300, seed), folder)[0].clone() for seed in (0, 1)]
    one, other = sorted(folder.glob("*.npy"))
    for suffix in (".npy", ".json"):
        one.with_suffix(suffix).rename(folder / "aside")
        other.with_suffix(suffix).rename(one.with_suffix(suffix))
        (folder / "aside").rename(other.with_suffix(suffix))
    for seed in (0, 1):
        with pytest.warns(UserWarning, match="features of something else"):
            again = cache(network, arrays(300, seed), folder)[0]
        assert torch.equal(again, rows[seed])


@pytest.mark.parametrize("error", [RuntimeError("on purpose"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("fails_in", [1, 2, 3])
def test_an_interrupted_extraction_leaves_no_file(network, folder, fails_in, error):
    network.fails_in = fails_in
    network.error = error
    with pytest.raises(type(error)):
        cache(network.train(), arrays(), folder)
    assert network.training
    assert files_in(folder) == []
    network.fails_in = 0
    rows, _, calls = cache(network, arrays(), folder)
    assert calls == 3
    assert torch.equal(rows, extract(network, arrays()))


def test_files_left_by_a_kill_are_not_used(network, folder, monkeypatch):
    """Neither a part of the rows, nor all rows without their metadata."""
    cache(network, arrays(), folder)
    npy = only(".npy", folder)
    metadata = only(".json", folder)
    content = npy.read_bytes()
    stray = npy.with_name(f".{npy.name}.1.part")
    stray.write_bytes(content[:5000])
    npy.unlink()
    assert cache(network, arrays(), folder)[2] == 3
    assert files_in(folder) == [".json", ".npy", ".part"]
    stray.unlink()

    def killed(*_, **__):
        raise KeyboardInterrupt

    npy.unlink()
    with monkeypatch.context() as patched:
        patched.setattr(checksum, "write_json", killed)
        with pytest.raises(KeyboardInterrupt):
            cache(network, arrays(), folder)
    assert npy.exists()
    assert not metadata.exists()
    assert cache(network, arrays(), folder)[2] == 3
    assert npy.read_bytes() == content


def test_old_metadata_is_deleted_before_new_rows_are_written(network, folder):
    cache(network, arrays(), folder)
    only(".npy", folder).unlink()
    network.fails_in = network.calls + 2
    with pytest.raises(RuntimeError, match="on purpose"):
        cache(network, arrays(), folder)
    assert files_in(folder) == []


# A full disk


class Full:
    """A file on a disk that has room for so many writes."""

    def __init__(self, file, room):
        self.file = file
        self.room = room

    def __getattr__(self, name):
        return getattr(self.file, name)

    def write(self, content):
        self.room -= 1
        if self.room < 0:
            raise OSError(28, "No space left on device")
        return self.file.write(content)


@pytest.mark.parametrize(
    ("suffix", "room"), [(".npy", 0), (".npy", 1), (".npy", 3), (".npy", 4), (".json", 0)]
)
def test_a_full_disk_is_an_error_and_leaves_no_partial_file(
    network, folder, monkeypatch, suffix, room
):
    atomic_writer = files.atomic_writer

    @contextmanager
    def full(path, **options):
        with atomic_writer(path, **options) as file:
            yield Full(file, room if path.suffix == suffix else 99)

    with monkeypatch.context() as patched:
        patched.setattr(feature_cache, "atomic_writer", full)
        patched.setattr(checksum, "atomic_writer", full)
        with pytest.raises(OSError, match=r"No space left.*; make room, or") as caught:
            cache(network.train(), arrays(), folder)
    assert str(folder) in str(caught.value)
    assert not [path for path in folder.iterdir() if path.suffix != ".npy"]
    assert len(files_in(folder)) == (suffix == ".json")
    assert all(part.training for part in network.modules())
    rows, _, calls = cache(network, arrays(), folder)
    assert calls == 3
    assert torch.equal(rows, extract(network, arrays()))


def test_a_disk_that_is_full_from_the_start_is_an_error(network, folder, monkeypatch):
    def full(path, **_):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(feature_cache, "atomic_writer", full)
    with pytest.raises(OSError, match=r"\.npy: the features could not be written .*make room"):
        cache(network, arrays(), folder)
    assert files_in(folder) == []


# Unreadable images


@pytest.fixture(scope="module")
def untorn():
    return extract(Counting(), Torn(600))


@pytest.mark.parametrize(
    "torn",
    [
        [0],
        [599],
        [255, 256],
        range(256),
        range(256, 512),
        range(512, 600),
        [i for i in range(600) if i != 300],
        range(0, 600, 3),
    ],
    ids=["first", "last", "border", "batch 1", "batch 2", "batch 3", "all but one", "every third"],
)
def test_unreadable_images_have_no_row(network, folder, torn, untorn):
    source = Torn(600, torn)
    torn = list(torn)
    for expected in (3, 0):
        with pytest.warns(UserWarning, match=rf"torn: {len(torn)} of 600 images .*left out") as w:
            rows, indices, calls = cache(network, source, folder)
        assert len(w) == 1
        assert f"the first is #{torn[0]} (made so)" in str(w[0].message)
        assert calls == expected
        assert indices.tolist() == [index for index in range(600) if index not in set(torn)]
        torch.testing.assert_close(rows, untorn[indices], atol=1e-6, rtol=1e-6)
        assert np.array_equal(np.load(only(".npy", folder)), rows.numpy())


def test_rows_of_readable_images_equal_extract_features(network, folder):
    source = Torn(300, [2, 257])
    with pytest.warns(UserWarning, match="2 of 300 images"):
        rows, indices, _ = cache(network, source, folder)
    with pytest.warns(UserWarning, match="replaced by gray"):
        whole = extract(network, source)
    assert indices.tolist() == [index for index in range(300) if index not in (2, 257)]
    assert torch.equal(rows, whole[indices])


def test_the_header_has_one_length_whatever_the_count():
    lengths = {
        len(feature_cache._npy_header(count, 2048)) for count in (0, 1, 9, 10, 999, 10**6, 10**12)
    }
    assert len(lengths) == 1
    assert lengths.pop() % 64 == 0


def test_an_unreadable_file_is_counted_each_time(network, folder, photos):
    (photos / "a/002.jpg").write_bytes((photos / "a/002.jpg").read_bytes()[:200])
    for expected in (1, 0):
        with pytest.warns(UserWarning, match=r"1 of 5 images .*a/002\.jpg \(\w+"):
            rows, indices, calls = cache(network, FolderSource(photos), folder)
        assert calls == expected
        assert indices.tolist() == [0, 1, 3, 4]
        assert rows.shape == (4, 6)


def test_a_repaired_file_has_its_row(network, folder, photos):
    content = (photos / "a/002.jpg").read_bytes()
    (photos / "a/002.jpg").write_bytes(b"")
    with pytest.warns(UserWarning, match="1 of 5 images"):
        cache(network, FolderSource(photos), folder)
    (photos / "a/002.jpg").write_bytes(content)
    assert cache(network, FolderSource(photos), folder)[1].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.skipif(sys.platform == "win32", reason="links need rights there")
def test_a_link_that_leads_nowhere_is_an_unreadable_image(network, folder, photos):
    (photos / "b/000.jpg").unlink()
    (photos / "b/000.jpg").symlink_to(photos / "missing.jpg")
    source = FolderSource(photos)
    for expected in (1, 0):
        with pytest.warns(UserWarning, match=r"1 of 5 images .*b/000\.jpg"):
            _, indices, calls = cache(network, source, folder)
        assert calls == expected
        assert indices.tolist() == [0, 1, 2, 4]


def test_no_readable_image_is_an_error_and_writes_no_file(network, folder):
    for _ in range(2):
        with pytest.raises(ValueError, match=r"none of the 300 images can be read.*#0.*made so"):
            cache(network, Torn(300, range(300)), folder)
        assert files_in(folder) == []


def test_a_source_without_images_is_refused(network, folder):
    with pytest.raises(ValueError, match=r"toy: no images"):
        cache(network, arrays().subset(torch.arange(0)), folder)
