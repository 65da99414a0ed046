"""The log of labels: kills, torn lines, two pages, two processes, other images."""

import csv
import io
import json
import multiprocessing
import os
import signal

import pytest

from meanshift.data import open_source
from meanshift.data.folder import FolderSource
from meanshift.viz.explorer.labels import Conflict, LabelLog
from tests.support.explorer import write_arrays


@pytest.fixture
def photos(tmp_path, make_images):
    return make_images(tmp_path / "photos", {"": 6}, size=(8, 8))


@pytest.fixture
def log(tmp_path, photos):
    return LabelLog(tmp_path / "labels/labels.jsonl", FolderSource(photos))


def again(log, source=None):
    """The log as another process reads it."""
    return LabelLog(log.path, source or log.source).read()


def test_labels_are_on_the_disk_and_can_be_undone(log):
    assert log.read().version == 0 and not log.path.exists()
    assert log.give([0, 2], "cat", seen=0).given == {0: "cat", 2: "cat"}
    log.give([2], "dog", seen=1)
    log.give([0], None, seen=2)
    labels = again(log)
    assert (labels.version, labels.given, labels.classes) == (3, {2: "dog"}, ["cat", "dog"])
    assert labels.undoable == {"id": 3, "label": None, "count": 1}
    assert log.undo(3).given == {0: "cat", 2: "dog"}
    assert log.undo(2).given == {0: "cat", 2: "cat"}  # what was there before
    assert log.undo(1).given == {}
    labels = again(log)
    assert labels.undoable is None and labels.version == 6 and labels.classes == []
    assert len(log.path.read_text().splitlines()) == 6  # nothing is ever removed


def test_every_record_is_synchronized_before_it_is_returned(log, monkeypatch):
    synchronized = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synchronized.append(fd), fsync(fd)))
    log.give([0], "cat", seen=0)
    first = len(synchronized)
    assert first >= 2  # the new file, its folder, and the line
    log.give([1], "cat", seen=1)
    assert len(synchronized) == first + 1


def test_a_torn_last_line_is_ignored_named_and_replaced(log):
    log.give([0], "cat", seen=0)
    log.give([1], "dog", seen=1)
    content = log.path.read_bytes()
    for end in range(content.index(b"\n") + 1, len(content)):
        log.path.write_bytes(content[:end])
        labels = again(log)
        assert labels.given == {0: "cat"} and labels.version == 1
        assert bool(labels.notes) == (end > content.index(b"\n") + 1)
    assert "last line is not complete" in labels.notes[0]
    assert log.give([2], "dog", seen=1).notes == []
    assert again(log).given == {0: "cat", 2: "dog"}


@pytest.mark.parametrize("line", [b"nonsense", b"[]", b'{"id": 2}', b'{"id": "x", "undo": 1}'])
def test_a_damaged_line_is_counted_and_the_others_are_used(log, line):
    log.give([0], "cat", seen=0)
    with log.path.open("ab") as file:
        file.write(line + b"\n")
    log.give([1], "dog", seen=1)
    labels = again(log)
    assert labels.given == {0: "cat", 1: "dog"}
    assert labels.notes == [f"{log.path}: line 2 is damaged and left out"]


def test_a_full_disk_leaves_the_log_as_it_was(log, monkeypatch):
    log.give([0], "cat", seen=0)
    before = log.path.read_bytes()

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"labels\.jsonl: could not be written"):
        log.give([1], "dog", seen=1)
    assert log.path.read_bytes() == before


def test_two_pages_do_not_overwrite_each_other(log):
    log.give([0], "cat", seen=0)
    log.give([1], "dog", seen=0)  # another page; another image
    with pytest.raises(Conflict, match=r"000\.jpg was labeled cat on another page"):
        log.give([2, 0], "dog", seen=0)
    assert again(log).given == {0: "cat", 1: "dog"}  # nothing of a refused label
    log.give([0], "cat", seen=0)  # the same label is no conflict
    log.give([0], "dog", seen=3)  # it was seen
    with pytest.raises(Conflict, match="nothing was undone"):
        log.undo(1)
    assert log.undo(4).given[0] == "cat"
    with pytest.raises(Conflict, match="was labeled cat"):  # an undo is a change, too
        log.give([0], "bird", seen=4)


@pytest.mark.parametrize(
    ("indices", "label", "message"),
    [
        ([], "cat", "no image is selected"),
        ([6], "cat", "got image 6, need 0 to 5"),
        ([-1], "cat", "got image -1"),
        ([0], "  ", "got 0 characters"),
        ([0], "x" * 101, "got 101 characters"),
        ([0], "cat|dog", "without ; and |"),
        ([0], "a\nb", "line breaks"),
        ([0], "\ud800", "line breaks"),
    ],
)
def test_what_cannot_be_a_label_is_refused(log, indices, label, message):
    with pytest.raises(ValueError, match=message.replace("|", r"\|")):
        log.give(indices, label, seen=0)
    assert not log.path.exists()


def give_many(path, photos, first):
    log = LabelLog(path, FolderSource(photos))
    for _ in range(20):
        log.give([first], f"name {first}", seen=10**6)


def test_two_processes_append_whole_lines(log, photos):
    context = multiprocessing.get_context("fork")
    workers = [
        context.Process(target=give_many, args=(log.path, photos, first)) for first in range(3)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    labels = again(log)
    assert labels.version == 60 and labels.notes == []
    lines = log.path.read_text().splitlines()
    assert [json.loads(line)["id"] for line in lines] == list(range(1, 61))


def give_and_die(path, photos):
    LabelLog(path, FolderSource(photos)).give([3], "cat", seen=0)
    os.kill(os.getpid(), signal.SIGKILL)


def test_labels_survive_a_kill_right_after_the_answer(log, photos):
    worker = multiprocessing.get_context("fork").Process(
        target=give_and_die, args=(log.path, photos)
    )
    worker.start()
    worker.join()
    assert worker.exitcode == -signal.SIGKILL
    assert again(log).given == {3: "cat"}
    log.give([1], "dog", seen=1)  # the lock has died with it


def test_images_that_were_added_do_not_move_labels(log, photos):
    log.give([0, 5], "cat", seen=0)
    (photos / "000.jpg").rename(photos / "aaa.jpg")  # now the last one: every index changes
    labels = again(log, FolderSource(photos))
    assert labels.given == {4: "cat"}  # 005.jpg
    (note,) = labels.notes
    assert "1 labels are of images that are not in" in note


def test_numbers_of_another_array_are_not_labeled(tmp_path):
    arrays = open_source(str(write_arrays(tmp_path / "a.npz")))["train"]
    other = open_source(str(write_arrays(tmp_path / "b.npz", count=50)))["train"]
    numbers = LabelLog(tmp_path / "n/labels.jsonl", arrays)
    numbers.give([3], "cat", seen=0)
    assert again(numbers).given == {3: "cat"}
    assert again(numbers, other).given == {} and again(numbers, other).left_out == 1


def test_the_export_is_what_labels_takes(tmp_path, make_images):
    counts = {"train/x": 3, "train/y": 3, "val/x": 3, "val/y": 3}  # the same names in both
    folder = make_images(tmp_path / "photos", counts, size=(8, 8))
    (folder / "train/x/000.jpg").rename(folder / 'train/x/=1, "a".jpg')
    source = open_source(str(folder))["train"]
    log = LabelLog(tmp_path / "labels.jsonl", source.subset(source.labels.new_tensor([1, 2, 4])))
    log.give([1], "cat, small", seen=0)
    log.give([0, 2], 'the "dog"', seen=1)
    table = tmp_path / "export.csv"
    table.write_text(log.as_csv(), newline="")
    rows = list(csv.reader(io.StringIO(log.as_csv())))
    assert rows[0] == ["file", "label"] and len(rows) == 4
    with pytest.warns(UserWarning, match="labels 3 files, 3 of them among the 12"):
        labeled = open_source(str(folder), labels=table)["train"]
    names = {
        labeled.title(i): labeled.classes[label]
        for i, label in enumerate(labeled.labels.tolist())
        if label >= 0
    }
    titles = [log.source.title(i) for i in range(3)]
    assert names == dict(zip(titles, ['the "dog"', "cat, small", 'the "dog"'], strict=True))
    assert 'x/=1, "a".jpg' in names
