"""Accuracy by CPU time: the curve of a variant is the mean over its seeds."""

import json
from dataclasses import replace

import pytest

from meanshift.config.recipes import recipe
from meanshift.reproduce import plots
from meanshift.reproduce.claims import Measurement
from meanshift.reproduce.jobs import Job
from meanshift.reproduce.results import Hardware, StudyResult
from meanshift.reproduce.studies import STUDIES, Variant
from meanshift.viz.run_reader import Run


def make_run(folder, records, method="msf"):
    folder.mkdir()
    config = recipe("cifar10-cpu").with_overrides({"method.name": method})
    (folder / "config.json").write_text(config.to_json())
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    return Run(folder)


def record(kind, epoch, **metrics):
    return {"kind": kind, "step": 10 * epoch, "epoch": epoch, **metrics}


@pytest.fixture
def runs(tmp_path):
    """Two seeds of one variant, the second of which was monitored once more; one of another."""
    first = [
        record("monitor", 0, **{"20-NN": 30.0}),
        record("train", 1, cpu_seconds=60.0),
        record("train", 2, cpu_seconds=60.0),
        record("monitor", 2, **{"20-NN": 40.0}),
    ]
    second = [
        record("monitor", 0, **{"20-NN": 32.0}),
        record("train", 1, cpu_seconds=30.0),
        record("monitor", 1, **{"20-NN": 99.0}),
        record("train", 2, cpu_seconds=30.0),
        record("monitor", 2, **{"20-NN": 44.0}),
    ]
    old = [record("monitor", 0, **{"20-NN": 30.0}), record("train", 1, loss=1.0)]  # no CPU time
    return {
        "MSF": [make_run(tmp_path / "1", first), make_run(tmp_path / "2", second)],
        "BYOL": [make_run(tmp_path / "3", old)],
    }


def test_a_curve_is_the_mean_over_seeds_at_epochs_that_all_have(runs):
    drawing = plots.draw_cpu_time(runs, Hardware("", ""))
    (axes,) = drawing.figure.axes
    (line,) = axes.lines
    assert list(line.get_xdata()) == [0.0, 1.5] and list(line.get_ydata()) == [31.0, 42.0]
    assert "MSF 42.0 after 1.5 minutes" in drawing.text and "BYOL" not in drawing.text


def test_neither_labels_nor_a_dip_stretch_the_axis(runs, tmp_path):
    def curve(*accuracies):
        parts = [record("train", 1, cpu_seconds=9.0), record("train", 2, cpu_seconds=9.0)]
        monitored = [record("monitor", i, **{"20-NN": each}) for i, each in enumerate(accuracies)]
        return [monitored[0], parts[0], monitored[1], parts[1], monitored[2]]

    supervised = make_run(tmp_path / "4", curve(30.0, 80.0, 90.0), "supervised")
    dip = make_run(tmp_path / "5", curve(30.0, 10.0, 29.0), "pirl")
    drawing = plots.draw_cpu_time(
        {**runs, "Supervised": [supervised], "PIRL": [dip]}, Hardware("", "")
    )
    low, high = drawing.figure.axes[0].get_ylim()
    assert 10 < low < 29 and 42 < high < 80
    assert "Supervised 90.0 after 0.3 minutes" in drawing.text


def test_a_value_far_from_all_others_does_not_stretch_the_axis():
    values = [60.0, 61.0, 61.5, 62.0, 62.5, 63.0, 64.0, 55.0]
    low, high = plots._limits([*values, 1.0])
    assert 50 < low < 55 and 64 < high < 66
    assert plots._limits([1.0, *values[:5]])[0] < 1.0, "all of a few values are shown"
    low, high = plots._limits([5.0, 5.0])
    assert low < 5.0 < high


def test_a_study_without_an_axis_is_a_row_for_each_variant():
    table = {
        "MSF": {"20-NN": Measurement((60.0, 62.0), paper=64.0), "linear": Measurement((70.0,))},
        "BYOL": {"20-NN": Measurement((50.0, 52.0)), "linear": Measurement()},
    }
    study = replace(STUDIES["baseline"](()), columns=("20-NN", "linear"))
    drawing = plots.draw(StudyResult("baseline", study, table, {}))
    (axes,) = drawing.figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["MSF", "BYOL"]
    knn, linear = (each.lines[0].get_xdata() for each in axes.containers)
    assert list(knn) == [61.0, 51.0] and list(linear) == [70.0], "an unknown metric is not 0"
    (paper,) = [line for line in axes.lines if "the paper's" in str(line.get_label())]
    assert list(paper.get_xdata()) == [64.0]
    low, high = axes.get_xlim()
    assert 45 < low < 51 and 70 < high < 75


def test_runs_without_cpu_time_are_not_drawn(runs):
    assert plots.draw_cpu_time({"BYOL": runs["BYOL"], "none": []}, Hardware("", "")) is None


def make_job(folder, seed, hardware, cpu_seconds, accuracy=40.0):
    parts = [record("train", epoch, cpu_seconds=cpu_seconds / 2) for epoch in (1, 2)]
    monitored = [record("monitor", epoch, **{"20-NN": accuracy}) for epoch in (0, 2)]
    run = make_run(folder, [monitored[0], parts[0], parts[1], monitored[1]])
    environment = {
        "precision": f"torch.{hardware.precision}",
        "steps": 20,
        "machine": {"cpu": hardware.processor},
    }
    (folder / "environment.json").write_text(json.dumps(environment))
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "step-000000020.pt").touch()
    config = run.config.with_overrides({"train.seed": seed})
    return Job("", config, folder, {}, split="", images_seen=0)


def test_cpu_time_is_that_of_the_hardware_that_most_runs_have(tmp_path):
    """Times of different processors, or precisions, are not comparable; accuracies are."""
    study = replace(STUDIES["baseline"](()), variants=[Variant("MSF", {}), Variant("BYOL", {})])
    unnamed, epyc, slow = (
        Hardware("bfloat16", ""),
        Hardware("bfloat16", "EPYC"),
        Hardware("float32", "EPYC"),
    )
    jobs = {
        "MSF": [
            make_job(tmp_path / "1", 0, unnamed, 60.0),
            make_job(tmp_path / "2", 1, slow, 600.0, accuracy=50.0),
            make_job(tmp_path / "3", 2, epyc, 300.0, accuracy=60.0),
        ],
        "BYOL": [make_job(tmp_path / "4", 0, unnamed, 120.0)],
    }
    result = StudyResult.collect("baseline", study, jobs, has_test_split=True)
    assert result.timed_on == unnamed
    assert [result.cpu_minutes[title].values for title in jobs] == [(1.0,), (2.0,)]
    assert result.validation["MSF"].values == (40.0, 50.0, 60.0), "accuracies are of all runs"
    note = result.hardware_note()
    assert "2 in bfloat16 on a processor that was not recorded; 1 in float32 on EPYC; 1 in" in note
    runs = {title: [job.run for job in each] for title, each in jobs.items()}
    drawing = plots.draw_cpu_time(runs, result.timed_on)
    assert "MSF 50.0 after 1.0 minutes" in drawing.text, "of all seeds, at the time of one"
    del jobs["MSF"][1:]
    assert not StudyResult.collect("baseline", study, jobs, has_test_split=True).hardware_note()
