"""Commands that read a run work from a directory that cannot be written to."""

import json
from pathlib import Path

import pytest

from meanshift.evaluation.predict import Classifier
from meanshift.viz.explorer.model import Explorer
from meanshift.viz.run_reader import Run
from tests.support.commands import read_run
from tests.support.explorer import wait_for
from tests.support.read_only import read_only


@pytest.fixture
def run(trained, tmp_path, monkeypatch):
    """A finished run that is read-only, and another working directory."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    before = read_run(trained)
    with read_only(trained):
        with pytest.raises(OSError, match=r"ead-only|ermission"):
            (trained / "x").write_text("")
        yield trained
        assert read_run(trained) == before


@pytest.mark.filterwarnings("always:.*cannot be written to")
def test_evaluate_puts_results_and_features_elsewhere(run, call, tmp_path):
    code, _, errors = call("evaluate", "knn", run, "--ks", "1")
    assert code == 0, errors
    (elsewhere,) = (tmp_path / "work/evaluations").iterdir()
    assert f"{run}: cannot be written to; evaluations/{elsewhere.name} is used" in errors
    (result,) = (elsewhere / "results").glob("knn*.json")
    assert "1-NN" in json.loads(result.read_text())["metrics"]
    assert list((elsewhere / "features").glob("*.npy"))


@pytest.mark.filterwarnings("ignore:.*cannot be written to")
def test_embed_and_export_write_only_what_they_are_asked_for(run, call, photos, tmp_path):
    out = tmp_path / "embeddings.npz"
    code, _, errors = call("embed", run, photos, "--out", out)
    assert code == 0 and out.exists(), errors
    assert call("export", run, "--out", tmp_path / "encoder.pt")[0] == 0


def test_a_report_elsewhere_is_written_and_the_default_one_names_the_option(run, call, tmp_path):
    code, _, errors = call("report", run, "--out", tmp_path / "report.html")
    assert code == 0 and (tmp_path / "report.html").stat().st_size > 10_000, errors
    code, _, errors = call("report", run)
    assert code != 0 and "report.html" in errors and "--out" in errors


@pytest.mark.filterwarnings("ignore:.*cannot be written to")
def test_the_explorer_shows_maps_and_searches(run):
    explorer = Explorer(Run(run))
    shown = wait_for(lambda: m if (m := explorer.map())["progress"] is None else None)
    assert shown["kind"] == "t-SNE" and not shown["note"]
    image = explorer.read_image("train", 0)
    found = wait_for(lambda: explorer.search(image, name="train", epoch=2, count=3))
    assert found[0]["index"] == 0
    labeling = explorer.labeling
    for index, label in enumerate("ab"):
        labeling.log.give([index], label, seen=index)
    wait_for(lambda: labeling.probe("snapshot"))
    assert labeling.folder.resolve().is_relative_to(Path.cwd() / "evaluations")
    assert Classifier.load(labeling.folder).load_encoder().output_dir == run.resolve()
