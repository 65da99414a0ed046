"""Atomic writes, locks, and files that grow while they are read."""

import errno
import fcntl
import json
import os
import re
import threading
from pathlib import Path

import pytest

from meanshift.runtime.files import JSONLTail, atomic_writer, exclusive_lock, write_text


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


def test_a_full_disk_is_reported_with_the_file(tmp_path, monkeypatch):
    def fail(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    path = tmp_path / "a.txt"
    with pytest.raises(OSError, match=rf"^{re.escape(str(path))}: .*No space left.*make room"):
        write_text(path, "new")


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


def lock(path):
    return exclusive_lock(path / ".lock", "is training in it", "another --out")


def test_a_second_lock_in_the_same_process_is_refused_and_the_first_one_stays(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("run")
    errors = []

    def second():
        try:
            with lock(tmp_path / "link"):
                pass
        except ValueError as error:
            errors.append(str(error))

    with lock(tmp_path / "run"):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
        second()
        child = os.fork()
        if not child:  # a child has no part in the lock
            second()
            os._exit(len(errors))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert len(errors) == 2 and all("this process already is training" in e for e in errors)
    second()
    assert len(errors) == 2


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOTSUP])
def test_a_disk_without_locks_is_used_with_a_warning(tmp_path, monkeypatch, code):
    def fail(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "lockf", fail)
    with pytest.warns(UserWarning, match="has no locks"), lock(tmp_path):
        assert f"process {os.getpid()}" in (tmp_path / ".lock").read_text()


def test_another_error_of_a_lock_is_raised(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "lockf", fail)
    with pytest.raises(OSError, match="Input/output"), lock(tmp_path):
        pass


@pytest.mark.parametrize("damage", [b"\0\0\0", b"\xff{", b"", b"[1]"])
def test_a_damaged_line_is_named_with_its_file_and_number(tmp_path, damage):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n')
    tail = JSONLTail(path)
    tail.read()
    with path.open("ab") as file:
        file.write(b'{"step": 3}\n' + damage + b'\n{"step": 5}\n')
    with pytest.raises(ValueError, match=rf"^{re.escape(str(path))}: line 4 is damaged"):
        tail.read()


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
