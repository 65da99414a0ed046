"""Finished runs without weights: what a file of the archive keeps, and runs restored from it."""

import json

import pytest

from meanshift.config.recipes import recipe
from meanshift.reproduce import archive
from meanshift.reproduce.jobs import Job
from meanshift.reproduce.results import metric_of
from meanshift.viz.run_reader import Run


@pytest.fixture
def job(tmp_path):
    """A run that was trained for two epochs of three steps, and evaluated."""
    config = recipe("cifar10-cpu").with_overrides({"train.epochs": 2, "train.seed": 3})
    folder = tmp_path / "out" / "runs" / "msf-seed3"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "results").mkdir()
    (folder / "checkpoints" / "step-000000006.pt").write_bytes(b"weights")
    (folder / "config.json").write_text(config.to_json())
    environment = {
        "steps": 6,
        "source": "abc",
        "precision": "torch.float32",
        "directory": "/home/somebody",
        "command": ["/home/somebody/meanshift"],
        "machine": {"cores": 2, "system": "Linux of somebody"},
    }
    (folder / "environment.json").write_text(json.dumps(environment))
    records = [
        {"kind": "monitor", "step": 0, "epoch": 0, "20-NN": 30.0},
        {"kind": "train", "step": 2, "epoch": 1, "purity": 0.3, "cpu_seconds": 4.0},
        {"kind": "train", "step": 3, "epoch": 1, "purity": 0.6, "cpu_seconds": 2.0},
        {"kind": "train", "step": 6, "epoch": 2, "purity": 0.7, "cpu_seconds": 5.0, "k": 5},
        {"kind": "monitor", "step": 6, "epoch": 2, "20-NN": 40.0},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    warning = {"step": 2, "kind": "collapse", "message": "a warning"}
    (folder / "warnings.jsonl").write_text(json.dumps(warning) + "\n")
    card = {
        "protocol": "knn",
        "encoder": f"{folder}: msf, step 6",
        "command": ["/home/somebody/meanshift"],
    }
    result = {"metrics": {"20-NN": 41.23456789}, "card": card}
    (folder / "results" / "knn-test.json").write_text(json.dumps(result))
    return Job("MSF, seed 3", config, folder, {("", "knn"): ()}, "test", images_seen=6)


def restored_job(job, folder):
    return Job(job.title, job.config, folder, dict(job.evaluations), "test", images_seen=6)


def test_a_restored_run_has_the_settings_metrics_and_results(job, tmp_path):
    path = archive.store(job, tmp_path / "archive")
    (folder,) = archive.restore(tmp_path / "archive", tmp_path / "other")
    again = restored_job(job, folder)
    assert path.name == "msf-seed3.json" and folder.name == "msf-seed3"
    assert again.trained and again.archived and not job.archived and not list(again.commands())
    run = Run(folder)
    assert run.config == job.config
    assert run.epoch_means("purity") == pytest.approx({1: 0.4, 2: 0.7})
    assert run.epoch_means("purity") == pytest.approx(job.run.epoch_means("purity"))
    assert run.series("20-NN") == job.run.series("20-NN")
    assert run.warnings == job.run.warnings
    assert again.result("knn")["metrics"] == {"20-NN": 41.2346}
    assert archive.store(again, tmp_path / "archive") is None  # it would lose nothing, add nothing


def test_the_file_names_nothing_of_the_machine_but_its_size(job, tmp_path):
    text = archive.store(job, tmp_path / "archive").read_text()
    assert "somebody" not in text and str(tmp_path) not in text
    assert json.loads(text)["environment"]["machine"] == {"cores": 2}
    (result,) = json.loads(text)["results"].values()
    assert result["card"]["encoder"] == f"runs/{job.folder.name}: msf, step 6"


def test_cpu_seconds_of_an_epoch_are_a_sum_and_other_metrics_are_means(job):
    merged = archive.by_epoch(job.run.lines("metrics.jsonl"))
    train = [record for record in merged if record["kind"] == "train"]
    assert [record["cpu_seconds"] for record in train] == [6.0, 5.0]
    assert [record["step"] for record in train] == [3, 6]
    assert [record["kind"] for record in merged] == ["monitor", "train", "train", "monitor"]


def test_an_unfinished_run_is_not_archived(job, tmp_path):
    job.evaluations["", "linear"] = ("--cached",)  # not evaluated yet
    assert archive.store(job, tmp_path / "archive") is None
    del job.evaluations["", "linear"]
    (job.folder / "checkpoints" / "step-000000006.pt").unlink()  # not trained to the end
    assert archive.store(job, tmp_path / "archive") is None


def test_a_restored_run_gets_results_that_were_added_later(job, tmp_path):
    archive.store(job, tmp_path / "archive")
    (folder,) = archive.restore(tmp_path / "archive", tmp_path / "other")
    result = json.loads((job.folder / "results" / "knn-test.json").read_text())
    (job.folder / "results" / "linear-test.json").write_text(json.dumps(result))
    archive.store(job, tmp_path / "archive")
    archive.restore(tmp_path / "archive", tmp_path / "other")
    assert set(Run(folder).results) == {"knn-test", "linear-test"}
    (folder / "checkpoints").mkdir()  # it is trained again
    assert archive.restore(tmp_path / "archive", tmp_path / "other") == []


def test_a_restored_run_that_lacks_a_result_is_trained_again(job, tmp_path):
    archive.store(job, tmp_path / "archive")
    (folder,) = archive.restore(tmp_path / "archive", tmp_path / "other")
    again = restored_job(job, folder)
    again.evaluations["", "linear"] = ("--cached",)
    assert not again.archived and not again.trained
    assert [words[0] for words in again.commands()] == ["pretrain", "evaluate"]
    assert again.finished and metric_of(again, "20-NN") == pytest.approx(41.2346)


def test_random_weights_of_a_restored_run_are_evaluated_and_stored(job, tmp_path):
    path = archive.store(job, tmp_path / "archive")
    before = path.read_text()
    (folder,) = archive.restore(tmp_path / "archive", tmp_path / "other")
    again = restored_job(job, folder)
    assert archive.store(again, tmp_path / "archive") is None
    again.evaluations["random", "knn"] = ()
    assert again.archived and again.trained
    assert [words[:2] for words in again.commands()] == [["evaluate", "knn"]]
    result = json.loads((folder / "results" / "knn-test.json").read_text())
    result["metrics"]["20-NN"] = 12.0
    (folder / "results" / "knn-random-test.json").write_text(json.dumps(result))
    again = restored_job(again, folder)
    assert metric_of(again, "20-NN", "random") == 12.0
    archive.store(again, tmp_path / "archive")
    stored, old = json.loads(path.read_text()), json.loads(before)
    assert stored["results"].pop("knn-random-test")["metrics"]["20-NN"] == 12.0
    assert stored == old


def test_a_run_that_is_there_is_not_replaced(job, tmp_path):
    archive.store(job, tmp_path / "archive")
    assert archive.restore(tmp_path / "archive", tmp_path / "out") == []
    assert job.trained and not job.archived


def test_a_damaged_file_is_named_with_what_to_do(job, tmp_path):
    path = archive.store(job, tmp_path / "archive")
    for text in ("{", '{"config": {}}', "[]"):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"msf-seed3\.json: not the archive of a run.*move it"):
            archive.restore(tmp_path / "archive", tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("data/cifar10.npz", "cpu-cifar10"),
        ("My Photos/", "cpu-my-photos"),
        ("sample", "cpu-sample"),
    ],
)
def test_the_folder_is_named_after_scale_and_images(source, name):
    assert archive.folder_name("cpu", source) == name
