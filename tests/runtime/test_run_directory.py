"""The run directory: begun, continued or refused, and never left half-written."""

import json
import os
from pathlib import Path

import pytest

from meanshift.config import Config
from meanshift.runtime.files import JSONLTail, write_text
from meanshift.runtime.run_directory import RunDirectory


def begin(folder, **settings):
    overrides = {name.replace("__", "."): value for name, value in settings.items()}
    return RunDirectory(folder).begin(Config().with_overrides(overrides), extra={"device": "cpu"})


def environment_of(folder):
    return json.loads((folder / "environment.json").read_text())


def record_steps(journal, name, steps):
    for step in steps:
        journal.append(name, {"step": step, "loss": 1 / step})


def test_a_new_run_says_what_it_is(tmp_path):
    journal = begin(tmp_path / "a" / "run", method__k=7)
    assert journal.config.method.k == 7
    assert {"checkpoints", "snapshots", "results"} <= {p.name for p in journal.folder.iterdir()}
    here = environment_of(journal.folder)
    assert here["device"] == "cpu" and here["earlier"] == []
    assert {"date", "command", "python", "versions", "machine", "commit"} <= set(here)


def test_the_same_settings_continue(tmp_path):
    begin(tmp_path, method__k=7).append("metrics.jsonl", {"step": 1})
    assert begin(tmp_path, method__k=7).read("metrics.jsonl") == [{"step": 1}]


def test_changed_settings_are_refused_with_the_list(tmp_path):
    begin(tmp_path)
    with pytest.raises(ValueError, match="other settings") as caught:
        begin(tmp_path, method__k=7, optim__lr=0.1, data__workers=3)
    message = str(caught.value)
    assert str(tmp_path) in message and "--out" in message
    assert "method.k: 5 there, 7 now" in message and "optim.lr: 0.05 there, 0.1 now" in message
    assert "data.workers" not in message
    assert RunDirectory.open(tmp_path).config == Config()


def test_a_refused_run_leaves_no_trace(tmp_path):
    begin(tmp_path)
    before = environment_of(tmp_path)
    with pytest.raises(ValueError, match="other settings"):
        begin(tmp_path, train__seed=1)
    assert environment_of(tmp_path) == before


def test_a_harmless_change_is_accepted_and_written(tmp_path):
    begin(tmp_path)
    begin(tmp_path, data__workers=3, train__log_every=7)
    config = RunDirectory.open(tmp_path).config
    assert (config.data.workers, config.train.log_every) == (3, 7)


def test_a_folder_of_other_files_is_refused_and_left_alone(tmp_path):
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(ValueError, match=r"no config\.json") as caught:
        begin(tmp_path)
    assert str(tmp_path) in str(caught.value) and "--out" in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]


def test_an_empty_folder_will_do(tmp_path):
    assert begin(tmp_path).config == Config()


def test_open_refuses_what_is_not_a_run(tmp_path):
    with pytest.raises(ValueError, match="not a run directory") as caught:
        RunDirectory.open(tmp_path)
    assert str(tmp_path) in str(caught.value) and "meanshift pretrain" in str(caught.value)


def test_earlier_sessions_stay_in_the_environment(tmp_path):
    for device in ("one", "two", "three"):
        RunDirectory(tmp_path).begin(Config(), extra={"device": device})
    here = environment_of(tmp_path)
    assert here["device"] == "three"
    assert [session["device"] for session in here["earlier"]] == ["one", "two"]
    assert all("earlier" not in session for session in here["earlier"])


def test_lines_come_back_as_they_were_written(tmp_path):
    journal = begin(tmp_path)
    record_steps(journal, "metrics.jsonl", [1, 2, 3])
    assert journal.read("metrics.jsonl") == [{"step": s, "loss": 1 / s} for s in (1, 2, 3)]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
    assert journal.read("missing.jsonl") == []


def test_a_warning_is_a_line_with_its_kind(tmp_path):
    journal = begin(tmp_path)
    journal.warn(4, "bad image", "cut off", file="x.jpg")
    expected = {"step": 4, "kind": "bad image", "message": "cut off", "file": "x.jpg"}
    assert journal.read("warnings.jsonl") == [expected]


def test_a_half_written_last_line_is_ignored(tmp_path):
    journal = begin(tmp_path)
    record_steps(journal, "metrics.jsonl", [1, 2])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    assert [record["step"] for record in journal.read("metrics.jsonl")] == [1, 2]


@pytest.mark.parametrize("more", [[], [{"step": 3}]])
def test_a_tail_reads_a_file_that_took_the_place_of_another_anew(tmp_path, more):
    path = tmp_path / "metrics.jsonl"
    old, new = [{"step": 1}, {"step": 2}], [{"step": 1}, {"step": 9}, *more]
    tail = JSONLTail(path)
    for records in (old, new):
        write_text(path, "".join(json.dumps(record) + "\n" for record in records))
        assert tail.read() == records


def test_rewind_drops_what_came_after_the_step(tmp_path):
    journal = begin(tmp_path)
    for name in ("metrics.jsonl", "warnings.jsonl"):
        record_steps(journal, name, [1, 2, 3, 4])
    journal.rewind(2)
    for name in ("metrics.jsonl", "warnings.jsonl"):
        assert [record["step"] for record in journal.read(name)] == [1, 2]


def test_rewind_removes_a_half_line_so_that_the_next_line_is_whole(tmp_path):
    journal = begin(tmp_path)
    record_steps(journal, "metrics.jsonl", [1])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')
    journal.rewind(1)
    record_steps(journal, "metrics.jsonl", [2])
    assert [record["step"] for record in journal.read("metrics.jsonl")] == [1, 2]


def test_rewind_keeps_the_bits_of_the_lines_it_keeps(tmp_path):
    journal = begin(tmp_path)
    record_steps(journal, "metrics.jsonl", [1, 3, 7])
    before = (tmp_path / "metrics.jsonl").read_bytes()
    journal.rewind(7)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_rewind_of_a_new_run_makes_no_files(tmp_path):
    begin(tmp_path).rewind(0)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_results_are_written_by_name(tmp_path):
    path = begin(tmp_path).save_result("knn", {"figures": {"1-NN": 50.0}})
    assert path == tmp_path / "results" / "knn.json"
    assert json.loads(path.read_text()) == {"figures": {"1-NN": 50.0}}


def test_write_atomically_replaces_a_text(tmp_path):
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
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["a.txt"]
