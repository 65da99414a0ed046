"""Atomic writes, locks, and files that grow while they are read."""

import json
import os
from pathlib import Path

import pytest

from meanshift.runtime.files import JSONLTail, atomic_writer, write_text


def test_write_text_replaces_a_file(tmp_path):
    path = tmp_path / "a.txt"
    write_text(path, "ä")
    assert path.read_bytes() == "ä".encode()
    write_text(path, "b")
    assert path.read_bytes() == b"b"
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.parametrize(("owner", "call"), [(os, "fsync"), (Path, "replace")])
def test_a_failed_write_leaves_the_old_file_and_no_part(tmp_path, monkeypatch, owner, call):
    path = tmp_path / "a.txt"
    write_text(path, "old")

    def fail(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(owner, call, fail)
    with pytest.raises(OSError, match="no space"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_an_interrupted_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")

    def write():
        with atomic_writer(path) as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.bin"]


def test_two_writers_of_a_shared_file_do_not_disturb_each_other(tmp_path, monkeypatch):
    path = tmp_path / "a.bin"
    with atomic_writer(path, shared=True) as first:
        first.write(b"first")
        monkeypatch.setattr(os, "getpid", lambda: -1)
        with atomic_writer(path, shared=True) as second:
            second.write(b"second")
        assert path.read_bytes() == b"second"
    assert path.read_bytes() == b"first"


def test_a_tail_reads_added_lines_and_not_an_incomplete_one(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tail = JSONLTail(path)
    assert tail.read() == []
    with path.open("a") as file:
        for text, steps in (('{"step": 1}\n{"st', [1]), ('ep": 2}\n', [1, 2]), ("", [1, 2])):
            file.write(text)
            file.flush()
            assert [record["step"] for record in tail.read()] == steps


@pytest.mark.parametrize("more", [[], [{"step": 3}]])
def test_a_tail_reads_a_replaced_file_from_its_beginning(tmp_path, more):
    path = tmp_path / "metrics.jsonl"
    old = [{"step": 1}, {"step": 2}]
    new = [{"step": 1}, {"step": 9}, *more]
    tail = JSONLTail(path)
    for records in (old, new):
        write_text(path, "".join(json.dumps(record) + "\n" for record in records))
        assert tail.read() == records
