"""Batches depend on their address alone; workers change nothing and end with the loader."""

import multiprocessing
import os
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, _utils

from meanshift.data.arrays import ArraySource
from meanshift.data.folder import FolderSource
from meanshift.data.loader import iterate, steps_per_epoch
from tests.support.sources import load_batches, truncate_file
from tests.support.views import two_views

PIXELS = np.random.default_rng(0).integers(0, 256, (12, 6, 8, 3), dtype=np.uint8)
LABELS = np.arange(12) % 3
CROP = two_views(seed=3).crop


def tensors(batch):
    images = batch.images if isinstance(batch.images, list) else [batch.images]
    return [batch.ids, batch.labels, *images]


def assert_same_batches(some, others):
    assert len(some) == len(others) > 0
    for a, b in zip(some, others, strict=True):
        assert (a.step, a.epoch, a.bad) == (b.step, b.epoch, b.bad)
        assert all(torch.equal(x, y) for x, y in zip(tensors(a), tensors(b), strict=True))


def assert_images_of_ids(batch, source):
    assert torch.equal(batch.labels, source.labels[batch.ids])
    images = [source.read(int(index)) for index in batch.ids]
    expected = CROP(images, batch.epoch, batch.ids)
    assert all(torch.equal(a, b) for a, b in zip(batch.images, expected, strict=True))


@pytest.fixture
def folder(tmp_path, make_images):
    return FolderSource(make_images(tmp_path, {"a": 7, "b": 8}))


@pytest.mark.parametrize("kind", ["folder", "arrays"])
def test_any_start_gives_the_same_batches(folder, kind):
    source = folder if kind == "folder" else ArraySource(PIXELS, LABELS, name="toy")
    from_zero = load_batches(source, 0, 8)
    assert [(b.step, b.epoch) for b in from_zero] == [(s, s // 3) for s in range(8)]
    for start in (1, 3, 4, 7):
        assert_same_batches(load_batches(source, start, 8), from_zero[start:])


def test_workers_change_nothing(folder):
    truncate_file(folder.root / "a/003.jpg")
    alone = load_batches(folder, 2, 6)
    assert_same_batches(load_batches(folder, 2, 6, workers=2), alone)
    assert any(batch.bad for batch in alone)


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_leave_the_global_generator_alone(folder, workers):
    before = torch.get_rng_state()
    load_batches(folder, 0, 3, workers=workers)
    assert torch.equal(torch.get_rng_state(), before)


def test_whole_batches_visit_each_image_at_most_once(folder):
    epochs = [torch.cat([b.ids for b in load_batches(folder, 3 * e, 3 * e + 3)]) for e in range(4)]
    for ids in epochs:
        assert len(ids) == len(set(ids.tolist())) == 12
    assert len({tuple(ids.tolist()) for ids in epochs}) == 4
    assert set(torch.cat(epochs).tolist()) == set(range(15))


def test_batches_contain_the_images_of_their_ids(folder):
    for batch in load_batches(folder, 0, 3):
        assert_images_of_ids(batch, folder)
    arrays = ArraySource(PIXELS, LABELS, name="toy")
    for batch in load_batches(arrays, 0, 3):
        assert np.array_equal(batch.images.numpy(), PIXELS[batch.ids])
        assert batch.labels.tolist() == LABELS[batch.ids].tolist()


def test_the_seed_decides_the_order(folder):
    orders = [
        torch.cat([batch.ids for batch in load_batches(folder, 0, 3, seed=seed)]).tolist()
        for seed in (3, 4)
    ]
    assert orders[0] != orders[1]


def test_an_unreadable_image_is_replaced_by_the_same_one_each_time(folder):
    index = 5
    clean = torch.cat([batch.ids for batch in load_batches(folder, 0, 15)])
    path = truncate_file(folder.root / folder.title(index))
    replacements = set()
    loaded = load_batches(folder, 0, 15)
    for batch, expected in zip(loaded, clean.split(4), strict=True):
        replaced = expected == index
        assert torch.equal(batch.ids[~replaced], expected[~replaced])
        replacements |= set(batch.ids[replaced].tolist())
        assert [title for title, _ in batch.bad] == [str(path)] * int(replaced.sum())
        assert_images_of_ids(batch, folder)
    assert (clean == index).sum() > 1
    assert len(replacements) == 1
    assert index not in torch.cat([batch.ids for batch in loaded])


def test_when_nothing_can_be_read_every_file_is_named(tmp_path):
    for index in range(4):
        (tmp_path / f"{index}.jpg").write_bytes(b"")
    (batch,) = load_batches(FolderSource(tmp_path), 0, 1)
    assert {title.split("/")[-1] for title, _ in batch.bad} == {f"{i}.jpg" for i in range(4)}


def test_too_few_images_for_a_batch_are_refused(folder):
    with pytest.raises(ValueError, match=r"15 images do not fill one batch of 16; use --train"):
        load_batches(folder, 0, 1, batch_size=16)
    assert len(load_batches(folder, 0, 1, batch_size=15)) == 1


def test_a_batch_moves_without_its_ids(folder):
    batch = load_batches(folder, 0, 1)[0]
    moved = batch.to(torch.device("meta"))
    assert moved.labels.is_meta and all(crops.is_meta for crops in moved.images)
    assert not moved.ids.is_meta


# Incomplete batches


def make_eleven(kind, root, make_images):
    if kind == "folder":
        return FolderSource(make_images(root, {"a": 5, "b": 6}, size=(6, 6)))
    pixels = np.random.default_rng(0).integers(0, 256, (11, 6, 6, 3), dtype=np.uint8)
    return ArraySource(pixels, np.arange(11) % 2, name="toy")


@pytest.fixture(params=["folder", "arrays"])
def eleven(request, tmp_path, make_images):
    """A source of eleven images."""
    return make_eleven(request.param, tmp_path / "eleven", make_images)


@pytest.mark.parametrize("batch_size", [1, 4, 5, 10, 11, 20])
def test_with_incomplete_batches_an_epoch_has_each_image_once(eleven, batch_size):
    steps = steps_per_epoch(eleven, batch_size, partial=True)
    assert steps == -(-11 // batch_size)
    loaded = load_batches(eleven, 0, 3 * steps, batch_size=batch_size, partial=True)
    assert [batch.epoch for batch in loaded] == [step // steps for step in range(3 * steps)]
    orders = []
    for epoch in range(3):
        part = loaded[epoch * steps : (epoch + 1) * steps]
        orders.append(torch.cat([batch.ids for batch in part]).tolist())
        assert sorted(orders[-1]) == list(range(11))
        sizes = [len(batch.ids) for batch in part]
        assert sizes == [batch_size] * (steps - 1) + [11 - batch_size * (steps - 1)]
        assert all(len(rows) == len(batch.ids) for batch in part for rows in tensors(batch))
    assert len(set(map(tuple, orders))) == 3


def test_incomplete_batches_contain_the_images_of_their_ids(eleven):
    for batch in load_batches(eleven, 0, 6, partial=True):
        if eleven.uniform:
            assert torch.equal(batch.labels, eleven.labels[batch.ids])
            assert torch.equal(batch.images, eleven.read_batch(batch.ids))
        else:
            assert_images_of_ids(batch, eleven)


def test_a_start_in_the_middle_gives_the_same_incomplete_batches(eleven):
    whole = load_batches(eleven, 0, 8, partial=True)
    assert [len(batch.ids) for batch in whole] == [4, 4, 3, 4, 4, 3, 4, 4]
    for start in (1, 2, 3, 5, 7):
        assert_same_batches(load_batches(eleven, start, 8, partial=True), whole[start:])


def test_workers_change_nothing_of_incomplete_batches(tmp_path, make_images):
    source = make_eleven("folder", tmp_path, make_images)
    alone = load_batches(source, 1, 6, partial=True)
    assert_same_batches(load_batches(source, 1, 6, partial=True, workers=2), alone)


def test_whole_batches_are_the_same_with_and_without_the_incomplete_one(eleven):
    with_it = load_batches(eleven, 0, 3, partial=True)
    assert_same_batches(with_it[:2], load_batches(eleven, 0, 2))
    assert steps_per_epoch(eleven, 4) == 2


def test_a_batch_larger_than_the_source_is_the_whole_source(eleven):
    with pytest.raises(ValueError, match="11 images do not fill one batch of 12"):
        load_batches(eleven, 0, 1, batch_size=12)
    (batch,) = load_batches(eleven, 0, 1, batch_size=12, partial=True)
    assert sorted(batch.ids.tolist()) == list(range(11))


# Workers


class Numbers(Dataset):
    """Ten numbers: one item raises an error, another takes forever."""

    def __init__(self, error_at=None, hang_at=None):
        self.error_at = error_at
        self.hang_at = hang_at

    def __len__(self):
        return 10

    def __getitem__(self, index):
        if index == self.error_at:
            raise OSError(f"number {index} is lost")
        if index == self.hang_at:
            time.sleep(3600)
        return index, (os.getpid(), "text")


@pytest.mark.parametrize("workers", [0, 2])
def test_items_come_unchanged_and_in_order(workers):
    items = list(iterate(Numbers(), [3, 1, 2], workers=workers))
    assert [index for index, _ in items] == [3, 1, 2]
    assert all(isinstance(pair, tuple) for _, pair in items)
    assert {pid == os.getpid() for _, (pid, _) in items} == {workers == 0}
    assert len(list(iterate(Numbers(), workers=workers))) == 10


def test_no_worker_is_left_after_the_last_item():
    list(iterate(Numbers(), workers=2))
    assert multiprocessing.active_children() == []


def test_no_worker_is_left_after_an_error_in_a_worker():
    with pytest.raises(OSError, match="number 4 is lost") as caught:
        list(iterate(Numbers(error_at=4), workers=2))
    assert caught.traceback  # whose frames refer to the loader, as those of any error do
    assert multiprocessing.active_children() == []


def test_no_worker_is_left_after_an_error_between_items():
    def consume():
        for index, _ in iterate(Numbers(), workers=2):
            _ = 1 / (index - 3)

    with pytest.raises(ZeroDivisionError) as caught:
        consume()
    assert caught.traceback
    assert multiprocessing.active_children() == []


def test_no_worker_is_left_when_the_generator_is_closed():
    items = iterate(Numbers(), workers=2)
    next(items)
    assert len(multiprocessing.active_children()) == 2
    items.close()
    assert multiprocessing.active_children() == []


def test_a_worker_that_hangs_and_ignores_signals_is_killed(monkeypatch):
    monkeypatch.setattr(_utils, "MP_STATUS_CHECK_INTERVAL", 0.2)  # patience at the end, seconds
    items = iterate(Numbers(hang_at=1), workers=2)
    assert next(items)[0] == 0
    items.close()
    assert multiprocessing.active_children() == []


@pytest.mark.slow
def test_a_program_ends_although_something_still_refers_to_the_loader():
    """The workers ignore SIGTERM, so an exit that only asks them to end would wait forever."""
    code = """
        from meanshift.data.loader import iterate
        items = iterate(range(10), workers=2)
        next(items)
        cycle = [items]
        cycle.append(cycle)
        raise SystemExit(3)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (3, "")
