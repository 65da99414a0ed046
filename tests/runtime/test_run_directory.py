"""The run directory: new, continued or refused, and never half-written."""

import json
import os
import platform
import re
import subprocess
from pathlib import Path

import pytest

from meanshift.config import Config
from meanshift.config.schema import FORMAT
from meanshift.runtime import device, run_directory
from meanshift.runtime.run_directory import RunDirectory, environment


def begin(folder, **settings):
    overrides = {name.replace("__", "."): value for name, value in settings.items()}
    return RunDirectory(folder).begin(Config().with_overrides(overrides), extra={"device": "cpu"})


def environment_of(folder):
    return json.loads((folder / "environment.json").read_text())


def record_steps(run, name, steps):
    for step in steps:
        run.append(name, {"step": step, "loss": 1 / step})


def test_a_new_run_describes_itself(tmp_path):
    run = begin(tmp_path / "a" / "run", method__k=7)
    assert run.config.method.k == 7
    assert {"checkpoints", "snapshots", "results"} <= {p.name for p in run.folder.iterdir()}
    environment = environment_of(run.folder)
    assert environment["device"] == "cpu"
    assert environment["earlier"] == []
    assert {"date", "command", "python", "versions", "machine", "commit"} <= set(environment)


def test_the_same_settings_continue(tmp_path):
    begin(tmp_path, method__k=7).append("metrics.jsonl", {"step": 1})
    assert begin(tmp_path, method__k=7).read("metrics.jsonl") == [{"step": 1}]


def test_changed_settings_are_refused_with_the_list(tmp_path):
    begin(tmp_path)
    with pytest.raises(ValueError, match="other settings") as caught:
        begin(tmp_path, method__k=7, optim__lr=0.1, data__workers=3)
    message = str(caught.value)
    for part in (
        str(tmp_path),
        "--out",
        "method.k: 5 there, 7 now",
        "optim.lr: 0.05 there, 0.1 now",
    ):
        assert part in message
    assert "data.workers" not in message
    assert RunDirectory.open(tmp_path).config == Config()


def test_a_refused_run_leaves_no_trace(tmp_path):
    begin(tmp_path)
    before = environment_of(tmp_path)
    with pytest.raises(ValueError, match="other settings"):
        begin(tmp_path, train__seed=1)
    assert environment_of(tmp_path) == before


def test_a_resume_safe_change_is_accepted_and_written(tmp_path):
    begin(tmp_path)
    begin(tmp_path, data__workers=3, train__log_every=7)
    config = RunDirectory.open(tmp_path).config
    assert (config.data.workers, config.train.log_every) == (3, 7)


def test_a_folder_of_other_files_is_refused_and_unchanged(tmp_path):
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(ValueError, match=r"no config\.json") as caught:
        begin(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "--out" in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]


def test_an_empty_folder_is_accepted(tmp_path):
    assert begin(tmp_path).config == Config()


def test_open_refuses_what_is_not_a_run(tmp_path):
    with pytest.raises(ValueError, match="not a run directory") as caught:
        RunDirectory.open(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "meanshift pretrain" in str(caught.value)


def test_earlier_sessions_stay_in_the_environment(tmp_path):
    for name in ("one", "two", "three"):
        RunDirectory(tmp_path).begin(Config(), extra={"device": name})
    environment = environment_of(tmp_path)
    assert environment["device"] == "three"
    assert [session["device"] for session in environment["earlier"]] == ["one", "two"]
    assert all("earlier" not in session for session in environment["earlier"])


def test_records_are_read_as_they_were_written(tmp_path):
    run = begin(tmp_path)
    record_steps(run, "metrics.jsonl", [1, 2, 3])
    assert run.read("metrics.jsonl") == [{"step": s, "loss": 1 / s} for s in (1, 2, 3)]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
    assert run.read("missing.jsonl") == []


def test_a_warning_is_a_line_with_its_kind(tmp_path):
    run = begin(tmp_path)
    run.warn(4, "bad image", "cut off", file="x.jpg")
    expected = {"step": 4, "kind": "bad image", "message": "cut off", "file": "x.jpg"}
    assert run.read("warnings.jsonl") == [expected]


def test_a_half_written_last_line_is_ignored(tmp_path):
    run = begin(tmp_path)
    record_steps(run, "metrics.jsonl", [1, 2])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    assert [record["step"] for record in run.read("metrics.jsonl")] == [1, 2]


def test_rewind_deletes_the_records_after_the_step(tmp_path):
    run = begin(tmp_path)
    for name in ("metrics.jsonl", "warnings.jsonl"):
        record_steps(run, name, [1, 2, 3, 4])
    run.rewind(2)
    for name in ("metrics.jsonl", "warnings.jsonl"):
        assert [record["step"] for record in run.read(name)] == [1, 2]


def test_rewind_removes_a_half_line_so_that_the_next_line_is_whole(tmp_path):
    run = begin(tmp_path)
    record_steps(run, "metrics.jsonl", [1])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')
    run.rewind(1)
    record_steps(run, "metrics.jsonl", [2])
    assert [record["step"] for record in run.read("metrics.jsonl")] == [1, 2]


def test_rewind_does_not_change_other_lines(tmp_path):
    run = begin(tmp_path)
    record_steps(run, "metrics.jsonl", [1, 3, 7])
    before = (tmp_path / "metrics.jsonl").read_bytes()
    run.rewind(7)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_rewind_of_a_new_run_creates_no_files(tmp_path):
    begin(tmp_path).rewind(0)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_damaged_line_is_named(tmp_path):
    run = begin(tmp_path)
    record_steps(run, "metrics.jsonl", [1, 2])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write("{'step': 3}\n")
    for use in (lambda: run.read("metrics.jsonl"), lambda: run.rewind(2)):
        with pytest.raises(ValueError, match=r"metrics\.jsonl: line 3 is damaged .*delete this"):
            use()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no full device here")
def test_a_full_disk_names_the_file_that_grows(tmp_path):
    run = begin(tmp_path)
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"metrics\.jsonl: could not be written .*make room"):
        run.append("metrics.jsonl", {"step": 1})


@pytest.mark.parametrize("content", ["", "[1]", "7"])
def test_a_damaged_environment_is_named_before_anything_is_written(tmp_path, content):
    run = begin(tmp_path)
    (tmp_path / "environment.json").write_text(content)
    before = (tmp_path / "config.json").read_bytes()
    for use in (lambda: run.environment, lambda: begin(tmp_path, train__log_every=7)):
        with pytest.raises(ValueError, match=r"environment\.json: damaged .*move it away"):
            use()
    assert (tmp_path / "config.json").read_bytes() == before


@pytest.mark.parametrize(
    ("folder", "tracked", "named"),
    [("", True, True), ("", False, False), ("lib", True, False), (".venv/lib", False, False)],
)
def test_only_a_commit_of_the_program_itself_is_recorded(
    tmp_path, monkeypatch, folder, tracked, named
):
    def git(*words):
        options = ["-c", "user.name=a", "-c", "user.email=a@b"]
        command = ["git", "-C", str(tmp_path), *options, *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    package = tmp_path / folder / "meanshift" / "runtime"
    package.mkdir(parents=True)
    (package / "run_directory.py").touch()
    git("init")
    if tracked:
        git("add", ".")
    git("commit", "--allow-empty", "-m", "a commit")
    monkeypatch.setattr(run_directory, "__file__", str(package / "run_directory.py"))
    assert run_directory._commit() == (git("rev-parse", "HEAD") if named else None)


def test_results_are_written_by_name(tmp_path):
    path = begin(tmp_path).save_result("knn", {"metrics": {"1-NN": 50.0}})
    assert path == tmp_path / "results" / "knn.json"
    assert json.loads(path.read_text()) == {"metrics": {"1-NN": 50.0}}


def test_a_process_that_does_not_write_changes_nothing(tmp_path):
    run = RunDirectory(tmp_path / "run", writes=False)
    with run.lock():
        run.begin(Config(), extra={})
        run.append("metrics.jsonl", {"step": 1})
        run.warn(1, "kind", "message")
        run.flush()
        run.rewind(0)
    assert not run.folder.exists()


def test_a_second_process_in_the_same_directory_is_refused(tmp_path):
    run = RunDirectory(tmp_path)
    with run.lock():
        message = in_child(lambda: lock_error(run))
    assert re.search(rf"process {os.getpid()} on \S+ is training in it; .*another --out", message)
    assert in_child(lambda: lock_error(run)) == ""


def lock_error(run):
    try:
        with run.lock():
            return ""
    except ValueError as error:
        return str(error)


def in_child(work):
    """The text that a function returns in a child process: locks are those of a process."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.write(write, work().encode())
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read) as pipe:
        return pipe.read()


@pytest.mark.parametrize(
    ("version", "action"),
    [(FORMAT + 1, "install a newer meanshift"), (FORMAT - 1, "train it again"), ("x", "train it")],
)
def test_a_config_of_another_format_is_refused_with_what_to_do(tmp_path, version, action):
    begin(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": version}))
    before = path.read_bytes()
    for use in (lambda: RunDirectory.open(tmp_path).config, lambda: begin(tmp_path)):
        with pytest.raises(ValueError, match=action) as caught:
            use()
        assert str(caught.value).startswith(f"{path}: has format {version}, this version reads")
    assert path.read_bytes() == before


def test_the_environment_names_the_processor(monkeypatch, tmp_path):
    assert environment()["machine"]["cpu"]
    cpuinfo = tmp_path / "cpuinfo"
    processor = "cpu family\t: 6\nmodel\t\t: 85\nmodel name\t: Some CPU\nflags\t\t: fpu\n"
    cpuinfo.write_text(f"processor\t: 0\n{processor}\nprocessor\t: 1\n{processor}\n")
    monkeypatch.setattr(device, "Path", lambda _: cpuinfo)
    assert device.processor_name() == "Some CPU, family 6, model 85"
    cpuinfo.write_text("model name\t: Other\n\n")
    assert device.processor_name() == "Other"
    cpuinfo.write_text("processor\t: 0\nFeatures\t: fp asimd\n")  # as on ARM
    assert device.processor_name() == (platform.processor() or platform.machine())
