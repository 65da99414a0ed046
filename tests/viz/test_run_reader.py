"""Reading run directories: metrics, results, settings, names, damaged files."""

import json

import pytest

from meanshift.runtime.run_directory import RunDirectory
from meanshift.viz.run_reader import Run, differing_settings, group_name, open_runs
from tests.support.runs import knn_result, log_lines
from tests.support.three_views import MODULE


def test_series_are_by_epoch_and_contain_only_numbers(make):
    lines = [
        {"kind": "train", "step": 5, "epoch": 1, "loss": 2.0, "purity": float("nan")},
        {"kind": "monitor", "step": 10, "epoch": 1, "1-NN": 12},
        {"kind": "train", "step": 20, "epoch": 2, "loss": 1.0, "purity": None},
    ]
    run = Run(make(lines=lines))
    assert run.steps_per_epoch == 10 and run.epochs_done == 2 and not run.finished
    assert run.series("loss") == ([0.5, 2.0], [2.0, 1.0])
    assert run.series("1-NN") == ([1.0], [12.0])
    assert run.series("purity") == ([], [])
    assert len(run.records("train")) == 2
    (run.folder / "environment.json").unlink()
    assert Run(run.folder).steps_per_epoch == 10, "from the records"


def test_a_growing_file_is_read_on_and_a_rewritten_one_from_its_start(make):
    folder = make(lines=log_lines(loss=lambda e: e)[:2])
    run = Run(folder)
    path = folder / "metrics.jsonl"
    assert len(run.lines("metrics.jsonl")) == 2
    line = json.dumps({"kind": "train", "step": 30, "epoch": 3, "loss": 3.0})
    with path.open("a") as file:
        file.write(line[:20])
    assert len(run.lines("metrics.jsonl")) == 2
    with path.open("a") as file:
        file.write(line[20:] + "\n")
    assert run.series("loss") == ([1, 2, 3], [1, 2, 3])
    RunDirectory(folder).rewind(10)
    assert run.series("loss") == ([1], [1])
    rewound = path.read_text()
    with path.open("a") as file:
        file.write(line + "\n")
    assert len(run.lines("metrics.jsonl")) == 2
    path.write_text(rewound)  # truncated in place
    assert run.series("loss") == ([1], [1])
    assert run.lines("nothing.jsonl") == []


@pytest.mark.parametrize(
    "line", ['{"step": 20, "loss": 1e400}', '{"step": 1e400}', '{"step": 1%s}' % ("0" * 400), "7"]
)
def test_a_line_that_is_no_record_is_named(make, line):
    folder = make(lines=log_lines(loss=lambda e: e)[:1])
    run = Run(folder)
    assert len(run.lines("metrics.jsonl")) == 1
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(line + "\n")
    for read in (lambda: run.last_step, lambda: RunDirectory(folder).read("metrics.jsonl")):
        with pytest.raises(ValueError, match=r"metrics\.jsonl: line 2 is damaged"):
            read()


def test_results_that_are_broken_are_left_out(make):
    folder = make(results={**knn_result(3.0), "demo": {"rows": {}}})
    (folder / "results" / "torn.json").write_text('{"metrics": ')
    assert list(Run(folder).results) == ["knn"]


def test_groups_of_runs_have_names_of_their_own(make):
    groups = [
        [make("one"), make("two")],
        [make("a/run"), make("c/other")],
        [make("b/run"), make("d/other")],
        [make("a-run"), make("c-other")],
        [make("a"), make("run-c-other")],
    ]
    names = [group_name(open_runs(group)) for group in groups]
    assert names[0] == "one-two" and all(name.startswith("a-run-c-other-") for name in names[3:])
    assert len(set(names)) == len(groups)


def test_runs_in_folders_of_the_same_name_get_different_names(make, tmp_path):
    folders = [make("x/run"), make("y/run"), make("z")]
    assert [run.name for run in open_runs(folders)] == ["x/run", "y/run", "z"]
    folders = [make("a/x/run"), make("b/x/run"), make("b/y/run")]
    assert [run.name for run in open_runs(folders)] == ["a/x/run", "b/x/run", "y/run"]
    with pytest.raises(ValueError, match="not a run directory"):
        open_runs([tmp_path])


def test_differing_settings_leave_out_those_that_may_change_on_resume(make):
    folders = [
        make("a", train__log_every=5),
        make("b", method__k=7, train__device="auto"),
        make("c", train__seed=3),
    ]
    assert differing_settings(open_runs(folders)) == {
        "method.k": [5, 7, 5],
        "train.seed": [0, 0, 3],
    }


def test_settings_that_another_method_lacks_are_none(make):
    msf, other = open_runs([make("msf"), make("other", method__module=MODULE)])
    assert (msf.method, other.method) == ("msf", "three-views")
    assert msf.setting("method.k") == 5 and other.setting("method.k") is None
    assert [view.name for view in msf.views] == ["target", "online"]
    assert [(view.name, view.count) for view in other.views] == [("global", 1), ("local", 2)]
    differing = differing_settings([msf, other])
    assert differing["method.name"] == ["msf", "three-views"]
    assert differing["method.k"] == [5, None]
