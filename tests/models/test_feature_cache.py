"""Features kept in a file: made once, the same bits, and never those of anything else."""

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
from meanshift.models import features as module
from meanshift.models.features import cached_features, extract_features
from meanshift.models.weights import fingerprint
from meanshift.runtime import run_directory

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
        self.calls, self.fails_in, self.error = 0, 0, RuntimeError("on purpose")

    def forward(self, view):
        self.calls += 1
        if self.calls == self.fails_in:
            raise self.error
        return self.body(view)


class Torn(Source):
    """Images in memory that are read one by one; some of them cannot be."""

    def __init__(self, count, torn=()):
        self.name, self.labels, self.classes = "torn", None, []
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


def keep(network, source, folder, **options):
    """The rows and whose they are, and how often the network was called for them."""
    before = network.calls
    options = {"weights": fingerprint(network), **OPTIONS, **options}
    rows, kept = cached_features(network, source, folder=folder, device=CPU, **options)
    return rows, kept, network.calls - before


def plainly(network, source, **options):
    return extract_features(copy.deepcopy(network), source, device=CPU, **{**OPTIONS, **options})


def files_in(folder):
    """Hidden ones too, so that nothing half-written is overlooked."""
    return sorted(path.suffix for path in folder.iterdir()) if folder.exists() else []


def the(suffix, folder):
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


# Made once, and the same bits


def test_features_are_extracted_once(network, folder):
    source = arrays()
    first, kept, calls = keep(network, source, folder)
    assert calls == 3
    again, kept_again, calls = keep(network, arrays(), folder)
    assert calls == 0
    assert torch.equal(first, again)
    assert torch.equal(kept, kept_again)
    assert kept.tolist() == list(range(600))
    assert files_in(folder) == [".json", ".npy"]


def test_the_bits_are_those_of_extract(network, folder, photos):
    whole = arrays()
    for source in (whole, whole.take(torch.arange(500, 3, -2)), FolderSource(photos), Torn(300)):
        rows, kept, calls = keep(network, source, folder)
        assert calls > 0
        assert rows.dtype == torch.float32 and rows.shape == (len(source), 6)
        assert torch.equal(rows, plainly(network, source))
        assert torch.equal(kept, torch.arange(len(source)))


def test_the_file_is_an_npy_that_anybody_reads(network, folder):
    rows, _, _ = keep(network, arrays(), folder)
    held = np.load(the(".npy", folder))
    assert held.dtype == np.float32 and held.flags.c_contiguous
    assert np.array_equal(held, rows.numpy())
    told = json.loads(the(".json", folder).read_text())
    assert told["weights"] == fingerprint(network)
    assert (told["source"], told["image_size"], told["bad"]) == ("toy", 16, {})


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's list of mappings")
def test_the_rows_are_mapped_and_not_read(network, folder):
    def mapped():
        return str(the(".npy", folder)) in Path("/proc/self/maps").read_text()

    for _ in range(2):  # fresh, and from the file
        rows, _, _ = keep(network, arrays(), folder)
        assert mapped()
        del rows
        assert not mapped()


def test_the_rows_are_those_of_the_file_and_not_of_a_second_extraction(network, folder):
    keep(network, arrays(), folder)
    held = np.load(the(".npy", folder), mmap_mode="r+")
    held[7, 2] = 12345
    held.flush()
    assert keep(network, arrays(), folder)[0][7, 2] == 12345


def test_writing_into_the_rows_leaves_the_file_alone(network, folder):
    for _ in range(2):
        rows, _, _ = keep(network, arrays(), folder)
        before = the(".npy", folder).read_bytes()
        kept = rows.clone()
        rows.zero_()
        assert the(".npy", folder).read_bytes() == before
        assert torch.equal(keep(network, arrays(), folder)[0], kept)


def test_workers_change_no_bit(network, tmp_path, photos):
    (photos / "a/001.jpg").write_bytes(b"")
    found = []
    for workers in (0, 2):
        with pytest.warns(UserWarning, match="1 of 5 images"):
            found.append(
                keep(network, FolderSource(photos), tmp_path / str(workers), workers=workers)
            )
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert found[0][2] == found[1][2] == 1
    kept = [the(".npy", tmp_path / str(workers)).read_bytes() for workers in (0, 2)]
    assert kept[0] == kept[1]


# The model is left as it was


def test_nothing_of_the_model_changes(network, folder):
    network.train()
    network.body[1].eval()
    before, modes = copy.deepcopy(network.state_dict()), [m.training for m in network.modules()]
    random = torch.get_rng_state()
    for _ in range(2):
        keep(network, arrays(), folder)
        assert all(torch.equal(a, before[name]) for name, a in network.state_dict().items())
        assert [m.training for m in network.modules()] == modes
        assert all(p.requires_grad and p.grad is None for p in network.parameters())
        assert torch.equal(torch.get_rng_state(), random)


def test_the_rows_do_not_depend_on_the_mode_of_the_network(network, tmp_path):
    rows = [keep(network.train(mode), arrays(), tmp_path / str(mode))[0] for mode in (True, False)]
    assert torch.equal(*rows)


# Nothing else is met in the file's place


def assert_made_anew(network, source, folder, others, **options):
    """Extracted, right, and beside what was there before, which is still believed."""
    rows, _, calls = keep(network, source, folder, **options)
    assert calls > 0
    assert torch.equal(rows, plainly(network, source, **options))
    assert not any(torch.equal(rows, other) for other in others)
    assert keep(network, source, folder, **options)[2] == 0
    return rows


def test_other_weights_have_other_features(network, folder):
    source = arrays()
    known = [keep(network, source, folder)[0]]
    known.append(assert_made_anew(Counting(1), source, folder, known))
    with torch.no_grad():
        network.body[0].bias[3] += 1
    known.append(assert_made_anew(network, source, folder, known))
    network.body[1].running_var[0] = 2  # buffers count as well
    assert_made_anew(network, source, folder, known)


def test_an_image_that_was_written_anew_has_other_features(network, folder, photos):
    known = [keep(network, FolderSource(photos), folder)[0]]
    Image.new("RGB", (26, 20), "red").save(photos / "b/001.jpg")
    rows = assert_made_anew(network, FolderSource(photos), folder, known)
    assert (rows != known[0]).any(1).tolist() == [False] * 4 + [True]


def test_a_source_that_stays_open_notices_too(network, folder, photos):
    source = FolderSource(photos)
    known = [keep(network, source, folder)[0]]
    Image.new("RGB", (26, 20), "red").save(photos / "b/001.jpg")
    assert_made_anew(network, source, folder, known)


def test_an_image_that_was_added_or_removed_is_noticed(network, folder, photos):
    known = [keep(network, FolderSource(photos), folder)[0]]
    (photos / "a/001.jpg").rename(photos / "a/009.jpg")
    known.append(assert_made_anew(network, FolderSource(photos), folder, known))
    (photos / "a/009.jpg").unlink()
    assert_made_anew(network, FolderSource(photos), folder, known)


def test_a_changed_pixel_of_an_array_is_noticed(network, folder):
    source = arrays()
    known = [keep(network, source, folder)[0]]
    source.pixels[599, 3, 3, 1] ^= 128
    rows = assert_made_anew(network, source, folder, known)
    assert (rows != known[0]).any(1).nonzero()[:, 0].tolist() == [599]


def test_a_cut_is_not_taken_for_another(network, folder):
    whole = arrays()
    known = [keep(network, whole, folder)[0]]
    for indices in (torch.arange(300), torch.arange(300, 600), torch.arange(299, -1, -1)):
        known.append(assert_made_anew(network, whole.take(indices), folder, known))


@pytest.mark.parametrize(
    "changed", [{"image_size": 18}, {"resize": 24}, {"precision": torch.bfloat16}], ids=str
)
def test_another_preparation_has_other_features(network, folder, photos, changed):
    source = FolderSource(photos)
    known = [keep(network, source, folder)[0]]
    assert_made_anew(network, source, folder, known, **changed)
    assert keep(network, source, folder)[2] == 0


def test_another_rule_of_preparation_has_other_features(network, folder, monkeypatch):
    keep(network, arrays(), folder)
    monkeypatch.setattr(module, "PREPARED", module.PREPARED + 1)
    assert keep(network, arrays(), folder)[2] == 3


def test_train_and_val_with_the_same_names_sizes_and_dates_are_kept_apart(
    network, folder, tmp_path
):
    random = np.random.default_rng(0)
    known = []
    for split in ("train", "val"):
        (tmp_path / split).mkdir()
        for index in range(3):  # uncompressed, so of one size; unpacked, so of the archive's date
            path = tmp_path / split / f"{index}.bmp"
            Image.fromarray(random.integers(0, 256, (9, 9, 3), dtype=np.uint8)).save(path)
            os.utime(path, (0, 0))
        known.append(assert_made_anew(network, FolderSource(tmp_path / split), folder, known))


def test_splits_of_a_named_dataset_are_kept_apart(network, folder, tmp_path, monkeypatch):
    """DTD has as many images of each class to train as to judge, in the same order."""
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
        known.append(assert_made_anew(network, splits[split], folder, known))
    Image.new("RGB", (20, 20), "red").save(inside / "images/woven/test1.jpg")
    rows = assert_made_anew(network, open_source("dtd")["test"], folder, known)
    assert (rows != known[1]).any(1).tolist() == [False, False, False, True]


# What is torn is made anew, and is no error


TORN = {
    "npy cut short by a row": lambda npy, _: npy.write_bytes(npy.read_bytes()[: -6 * 4]),
    "npy cut short by a byte": lambda npy, _: npy.write_bytes(npy.read_bytes()[:-1]),
    "npy of a header alone": lambda npy, _: npy.write_bytes(npy.read_bytes()[:128]),
    "npy of half a header": lambda npy, _: npy.write_bytes(npy.read_bytes()[:40]),
    "npy empty": lambda npy, _: npy.write_bytes(b""),
    "npy of text": lambda npy, _: npy.write_bytes(b"hello, I am text"),
    "npy of half a zip": lambda npy, _: npy.write_bytes(b"PK\x03\x04 torn"),
    "npy of other rows": lambda npy, _: np.save(npy, np.zeros((5, 6), np.float32)),
    "npy missing": lambda npy, _: npy.unlink(),
    "json missing": lambda _, beside: beside.unlink(),
    "json empty": lambda _, beside: beside.write_bytes(b""),
    "json cut short": lambda _, beside: beside.write_bytes(beside.read_bytes()[:100]),
    "json of bytes": lambda _, beside: beside.write_bytes(b"\xff\xfe\x00"),
    "json of null": lambda _, beside: beside.write_text("null"),
    "json of a list": lambda _, beside: beside.write_text("[1, 2]"),
    "json of something else": lambda _, beside: beside.write_text("{}"),
    "json with a list": lambda _, beside: beside.write_text('{"bad": []}'),
    "json with a number": lambda _, beside: beside.write_text('{"bad": {"3": 4}}'),
    "json with a word": lambda _, beside: beside.write_text('{"bad": {"x": ["a", "b"]}}'),
    "json with half a reason": lambda _, beside: beside.write_text('{"bad": {"3": ["a"]}}'),
    "json of other rows": lambda _, beside: beside.write_text('{"bad": {"3": ["a", "b"]}}'),
}


@pytest.mark.parametrize("tear", TORN.values(), ids=TORN)
def test_a_torn_file_is_made_anew(network, folder, tear):
    rows, _, _ = keep(network, arrays(300), folder)
    kept, content = rows.clone(), the(".npy", folder).read_bytes()
    del rows  # its pages would be torn with the file
    tear(the(".npy", folder), the(".json", folder))
    again, indices, calls = keep(network, arrays(300), folder)
    assert calls == 2
    assert torch.equal(again, kept) and len(indices) == 300
    assert the(".npy", folder).read_bytes() == content
    assert keep(network, arrays(300), folder)[2] == 0


@pytest.mark.parametrize("error", [RuntimeError("on purpose"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("fails_in", [1, 2, 3])
def test_what_was_stopped_in_the_middle_is_not_believed(network, folder, fails_in, error):
    network.fails_in, network.error = fails_in, error
    with pytest.raises(type(error)):
        keep(network.train(), arrays(), folder)
    assert network.training
    assert files_in(folder) == []
    network.fails_in = 0
    rows, _, calls = keep(network, arrays(), folder)
    assert calls == 3
    assert torch.equal(rows, plainly(network, arrays()))


def test_what_a_kill_leaves_behind_is_not_believed(network, folder, monkeypatch):
    """Neither a part of the rows, nor all of them without what is to be said of them."""
    keep(network, arrays(), folder)
    npy, beside = the(".npy", folder), the(".json", folder)
    content = npy.read_bytes()
    stray = npy.with_name(f".{npy.name}.1.part")
    stray.write_bytes(content[:5000])
    npy.unlink()
    assert keep(network, arrays(), folder)[2] == 3
    assert files_in(folder) == [".json", ".npy", ".part"]
    stray.unlink()

    def killed(*_):
        raise KeyboardInterrupt

    npy.unlink()
    with monkeypatch.context() as patched:
        patched.setattr(module, "write_atomically", killed)
        with pytest.raises(KeyboardInterrupt):
            keep(network, arrays(), folder)
    assert npy.exists() and not beside.exists()
    assert keep(network, arrays(), folder)[2] == 3
    assert npy.read_bytes() == content


def test_an_older_account_does_not_vouch_for_newer_rows(network, folder):
    keep(network, arrays(), folder)
    the(".npy", folder).unlink()
    network.fails_in = network.calls + 2
    with pytest.raises(RuntimeError, match="on purpose"):
        keep(network, arrays(), folder)
    assert files_in(folder) == []


# A full disc


class Full:
    """A file on a disc that has room for so many writes."""

    def __init__(self, file, room):
        self.file, self.room = file, room

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
def test_a_full_disc_is_named_and_nothing_torn_is_left(network, folder, monkeypatch, suffix, room):
    whole_file = run_directory.atomic_writer

    @contextmanager
    def full(path, **options):
        with whole_file(path, **options) as file:
            yield Full(file, room if path.suffix == suffix else 99)

    with monkeypatch.context() as patched:
        patched.setattr(module, "whole_file", full)
        patched.setattr(run_directory, "atomic_writer", full)
        with pytest.raises(OSError, match=r"No space left.*; make room, or") as caught:
            keep(network.train(), arrays(), folder)
    assert str(folder) in str(caught.value)
    assert not [path for path in folder.iterdir() if path.suffix != ".npy"]
    assert len(files_in(folder)) == (suffix == ".json")
    assert all(part.training for part in network.modules())
    rows, _, calls = keep(network, arrays(), folder)
    assert calls == 3
    assert torch.equal(rows, plainly(network, arrays()))


def test_a_disc_that_is_full_from_the_start_is_named(network, folder, monkeypatch):
    def full(path, **_):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(module, "whole_file", full)
    with pytest.raises(OSError, match=r"\.npy: the features could not be written .*make room"):
        keep(network, arrays(), folder)
    assert files_in(folder) == []


# Unreadable images


@pytest.fixture(scope="module")
def untorn():
    return plainly(Counting(), Torn(600))


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
    source, torn = Torn(600, torn), list(torn)
    for expected in (3, 0):
        with pytest.warns(UserWarning, match=rf"torn: {len(torn)} of 600 images .*left out") as w:
            rows, kept, calls = keep(network, source, folder)
        assert len(w) == 1
        assert f"the first is #{torn[0]} (made so)" in str(w[0].message)
        assert calls == expected
        assert kept.tolist() == [index for index in range(600) if index not in set(torn)]
        torch.testing.assert_close(rows, untorn[kept], atol=1e-6, rtol=1e-6)
        assert np.array_equal(np.load(the(".npy", folder)), rows.numpy())


def test_the_rows_that_are_left_have_the_bits_of_extract(network, folder):
    source = Torn(300, [2, 257])
    with pytest.warns(UserWarning, match="2 of 300 images"):
        rows, kept, _ = keep(network, source, folder)
    with pytest.warns(UserWarning, match="count as gray"):
        whole = plainly(network, source)
    assert kept.tolist() == [index for index in range(300) if index not in (2, 257)]
    assert torch.equal(rows, whole[kept])


def test_the_header_has_one_length_whatever_the_count():
    lengths = {len(module._header(count, 2048)) for count in (0, 1, 9, 10, 999, 10**6, 10**12)}
    assert len(lengths) == 1
    assert lengths.pop() % 64 == 0


def test_an_unreadable_file_is_counted_each_time(network, folder, photos):
    (photos / "a/002.jpg").write_bytes((photos / "a/002.jpg").read_bytes()[:200])
    for expected in (1, 0):
        with pytest.warns(UserWarning, match=r"1 of 5 images .*a/002\.jpg \(\w+"):
            rows, kept, calls = keep(network, FolderSource(photos), folder)
        assert calls == expected
        assert kept.tolist() == [0, 1, 3, 4]
        assert rows.shape == (4, 6)


def test_an_unreadable_file_that_was_mended_has_its_row(network, folder, photos):
    content = (photos / "a/002.jpg").read_bytes()
    (photos / "a/002.jpg").write_bytes(b"")
    with pytest.warns(UserWarning, match="1 of 5 images"):
        keep(network, FolderSource(photos), folder)
    (photos / "a/002.jpg").write_bytes(content)
    assert keep(network, FolderSource(photos), folder)[1].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.skipif(sys.platform == "win32", reason="links need rights there")
def test_a_link_that_leads_nowhere_is_an_unreadable_image(network, folder, photos):
    (photos / "b/000.jpg").unlink()
    (photos / "b/000.jpg").symlink_to(photos / "missing.jpg")
    source = FolderSource(photos)
    for expected in (1, 0):
        with pytest.warns(UserWarning, match=r"1 of 5 images .*b/000\.jpg"):
            _, kept, calls = keep(network, source, folder)
        assert calls == expected
        assert kept.tolist() == [0, 1, 2, 4]


def test_when_nothing_can_be_read_that_is_said_and_nothing_kept(network, folder):
    for _ in range(2):
        with pytest.raises(ValueError, match=r"none of the 300 images can be read.*#0.*made so"):
            keep(network, Torn(300, range(300)), folder)
        assert files_in(folder) == []


def test_a_source_without_images_is_refused(network, folder):
    with pytest.raises(ValueError, match=r"toy: no images"):
        keep(network, arrays().take(torch.arange(0)), folder)
