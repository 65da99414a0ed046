"""The contract of a source: subsets, fingerprints, and the order of an epoch."""

import os
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from meanshift.data import open_source
from meanshift.data.arrays import ArraySource
from meanshift.data.folder import FolderSource
from meanshift.data.source import Source, block_order
from meanshift.runtime import rng
from tests.support.sources import titles

PIXELS = np.random.default_rng(0).integers(0, 256, (12, 6, 8, 3), dtype=np.uint8)
LABELS = np.arange(12) % 3


@pytest.fixture
def flat(tmp_path, make_images):
    return make_images(tmp_path / "photos", {"": 3}, size=(6, 6))


# Subsets and fingerprints


def test_a_subset_is_the_chosen_images_in_the_chosen_order():
    source = ArraySource(PIXELS, LABELS, name="toy")
    subset = source.subset(torch.tensor([7, 2, 5]))
    assert titles(subset) == ["#7", "#2", "#5"]
    again = subset.subset(torch.tensor([2, 0, 1, 1]))
    chosen = [5, 7, 2, 2]
    assert np.array_equal(again.read_batch(torch.arange(4)).numpy(), PIXELS[chosen])
    assert np.array_equal(again.read(3).numpy(), PIXELS[2].transpose(2, 0, 1))
    assert again.labels.tolist() == LABELS[chosen].tolist()


def test_a_folders_fingerprint_sees_names_and_labels(tmp_path, make_images):
    make_images(tmp_path, {"a": 2, "b": 2})
    prints = [FolderSource(tmp_path).fingerprint(), FolderSource(tmp_path).fingerprint()]
    (tmp_path / "a/000.jpg").rename(tmp_path / "a/zzz.jpg")
    prints.append(FolderSource(tmp_path).fingerprint())
    (tmp_path / "a/zzz.jpg").rename(tmp_path / "b/zzz.jpg")
    prints.append(FolderSource(tmp_path).fingerprint())
    (tmp_path / "b/zzz.jpg").unlink()
    prints.append(FolderSource(tmp_path).fingerprint())
    assert prints[0] == prints[1]
    assert len(set(prints)) == 4


@pytest.mark.parametrize("part", [False, True], ids=["whole", "subset"])
def test_an_arrays_fingerprint_sees_pixels_labels_and_size(part):
    def fingerprint(pixels, labels):
        source = ArraySource(pixels, labels, name="toy")
        return (source.subset(torch.arange(8)) if part else source).fingerprint()

    other_pixels, other_labels = PIXELS.copy(), LABELS.copy()
    other_pixels[3, 0, 0, 0] ^= 1
    other_labels[3] = 1
    prints = [
        fingerprint(PIXELS, LABELS),
        fingerprint(other_pixels, LABELS),
        fingerprint(PIXELS, other_labels),
        fingerprint(PIXELS, None),
        fingerprint(PIXELS.transpose(0, 2, 1, 3), LABELS),
    ]
    assert len(set(prints)) == 5
    assert fingerprint(PIXELS.copy(), LABELS) == prints[0]


def test_the_fingerprint_of_a_subset_sees_which_images():
    source = ArraySource(PIXELS, None, name="toy")
    one, other = source.subset(torch.tensor([1, 2])), source.subset(torch.tensor([2, 1]))
    assert len({one.fingerprint(), other.fingerprint(), source.fingerprint()}) == 3


# Fingerprints of the content: what a cache of features depends on


def test_the_content_fingerprint_sees_a_pixel_where_the_other_reads_some_images():
    pixels = np.zeros((1500, 2, 2), np.uint8)
    source = ArraySource(pixels, None, name="toy")
    before = source.content_fingerprint(), source.fingerprint()
    pixels[1, 0, 0] = 1
    assert source.fingerprint() == before[1]
    assert source.content_fingerprint() != before[0]
    pixels[1, 0, 0] = 0
    assert source.content_fingerprint() == before[0]


def test_the_content_fingerprint_of_an_array_sees_shape_and_labels_and_not_the_layout():
    pixels = np.random.default_rng(0).integers(0, 256, (6, 4, 5, 3), dtype=np.uint8)

    def fingerprint(pixels, labels=None, name="toy"):
        return ArraySource(pixels, labels, name=name).content_fingerprint()

    first = fingerprint(pixels)
    transposed = np.ascontiguousarray(pixels.transpose(0, 2, 1, 3))
    assert fingerprint(pixels.reshape(6, 5, 4, 3)) != first
    assert fingerprint(transposed) != first
    assert fingerprint(pixels, np.arange(6)) != first
    assert fingerprint(pixels.astype(np.uint16)) != first
    assert fingerprint(transposed.transpose(0, 2, 1, 3), name="elsewhere") == first


def test_the_content_fingerprint_of_a_mapped_file_sees_that_it_was_rewritten(tmp_path):
    path = tmp_path / "a.npy"
    pixels = np.random.default_rng(0).integers(0, 256, (2500, 4, 5, 3), dtype=np.uint8)
    np.save(path, pixels)
    prints = [open_source(str(path))["train"].content_fingerprint() for _ in range(2)]
    assert prints[0] == prints[1]
    status = path.stat()
    pixels[1, 0, 0, 0] ^= 1  # an image that the fingerprint does not read
    np.save(path, pixels)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert open_source(str(path))["train"].content_fingerprint() != prints[0]


def test_the_content_fingerprint_of_a_folder_sees_rewritten_files(flat):
    prints = [FolderSource(flat).content_fingerprint(), FolderSource(flat).content_fingerprint()]
    status = (flat / "001.jpg").stat()
    Image.new("RGB", (6, 6), "red").save(flat / "001.jpg")
    prints.append(FolderSource(flat).content_fingerprint())
    os.utime(flat / "001.jpg", ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    prints.append(FolderSource(flat).content_fingerprint())
    content = bytearray((flat / "001.jpg").read_bytes())
    content[-10] ^= 1
    (flat / "001.jpg").write_bytes(content)  # of the same size, and now of the same date
    os.utime(flat / "001.jpg", ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    prints.append(FolderSource(flat).content_fingerprint())
    assert prints[0] == prints[1]
    assert len(set(prints)) == 4
    assert len({FolderSource(flat).fingerprint() for _ in range(2)}) == 1


def test_the_content_fingerprint_of_a_folder_does_not_depend_on_its_path(flat, tmp_path):
    shutil.copytree(flat, tmp_path / "copy")
    copy = FolderSource(tmp_path / "copy")
    assert copy.content_fingerprint() == FolderSource(flat).content_fingerprint()


def test_the_content_fingerprint_of_a_folder_survives_a_deleted_file(flat):
    source = FolderSource(flat)
    before = source.content_fingerprint()
    (flat / "001.jpg").unlink()
    assert source.content_fingerprint() == source.content_fingerprint() != before


def test_the_content_fingerprint_of_a_subset_sees_the_source_and_the_choice(flat):
    source = FolderSource(flat)
    subsets = [source.subset(torch.tensor(chosen)) for chosen in ([0, 1], [1, 0], [0, 2])]
    before = {part.content_fingerprint() for part in (source, *subsets)}
    assert len(before) == 4
    Image.new("RGB", (6, 6), "red").save(flat / "000.jpg")
    after = subsets[0].content_fingerprint()
    assert after not in before
    again = FolderSource(flat).subset(torch.tensor([0, 1]))
    assert after == again.content_fingerprint()


# The order of an epoch


class Blocks(Source):
    """Numbers in blocks."""

    name, labels, classes = "blocks", None, ()

    def __init__(self, sizes, window):
        self.sizes = torch.tensor(sizes)
        self.window = window
        self.block = torch.arange(len(sizes)).repeat_interleave(self.sizes)

    def __len__(self):
        return len(self.block)

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
    needed = [source.block[part].unique() for part in order.split(40)]
    assert [len(blocks) for blocks in needed] == [4] * 10
    mixed = [len(source.block[part].unique()) for part in order.split(10)]
    assert min(mixed) >= 2 and sum(mixed) / len(mixed) > 3
    neighbors = [bool((blocks.diff() == 1).all()) for blocks in needed]
    assert sum(neighbors) < 2  # the blocks are shuffled too
    other = {frozenset(source.block[part].tolist()) for part in source.order(0, 1).split(40)}
    assert other != {frozenset(blocks.tolist()) for blocks in needed}
    freely = rng.permutation(0, 0, 400)
    assert min(len(source.block[part].unique()) for part in freely.split(40)) > 15


def test_a_subset_of_blocks_keeps_the_order_of_the_source():
    source = Blocks([10] * 12, 3)
    indices = rng.choice(1, 120, 50, rng.SPLIT).flip(0)
    subset = source.subset(indices)
    order = subset.order(5, 2)
    assert order.sort().values.tolist() == list(range(50))
    chosen = set(indices.tolist())
    expected = [index for index in source.order(5, 2).tolist() if index in chosen]
    assert indices[order].tolist() == expected
    again = subset.subset(torch.arange(0, 50, 2))
    assert again.blockwise
    assert again.indices[again.order(5, 2)].tolist() == [i for i in order.tolist() if i % 2 == 0]


def test_without_blocks_the_order_is_a_permutation(flat):
    source = FolderSource(flat)
    assert torch.equal(source.order(3, 1), rng.permutation(3, 1, 3))
    assert torch.equal(source.subset(torch.tensor([2, 1])).order(3, 1), rng.permutation(3, 1, 2))
