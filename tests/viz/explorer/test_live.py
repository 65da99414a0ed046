"""The live state of a run: progress, curves, and which run it is."""

import json
import os
import shutil
import threading
import time

import pytest

from meanshift.runtime.run_directory import RunDirectory
from meanshift.viz.explorer.live import MAX_POINTS
from meanshift.viz.explorer.model import Explorer
from meanshift.viz.run_reader import Run
from tests.support.explorer import (
    get,
    log,
    post,
    serving_explorer,
    wait_for,
    write_arrays,
    write_live_run,
    write_live_snapshot,
)
from tests.support.three_views import MODULE


def test_the_state_of_a_run(port):
    state = get(port, "/api/run").json
    assert (state["name"], state["epochs_done"], state["epochs"]) == ("run", 2.0, 4)
    assert state["snapshot_epochs"] == [0, 2] and state["warnings"] == []
    assert [value for value, _ in state["colorings"]] == ["label", "purity", "cluster"]
    assert state["training"] is True  # its last line is recent
    assert state["seconds_left"] == pytest.approx(2 * 10 * 20 / 100)
    assert state["curves"]["loss"] == {"x": [1.0, 2.0], "y": [0.1, 0.05]}
    sources = [(source["name"], source["count"]) for source in state["sources"]]
    assert sources == [("train", 60), ("validation", 20)]
    chance = {"y": 35.0, "text": "chance 35.0"}  # 7 of the 20 validation images
    assert state["baselines"] == {"20-NN": [chance], "1-NN": [chance]}
    assert [band["text"] for band in state["rank_bands"]][:2] == ["collapsed", "low"]
    settings = dict(state["settings"])
    assert settings["method"] == "msf, k 5, bank 128,000, momentum 0.99"


def test_settings_that_a_method_lacks_are_not_shown(tmp_path):
    source = write_arrays(tmp_path / "p.npz")
    for name, expected in {
        "method__name": ("byol-asym", "byol-asym, k 1, momentum 0.99"),
        "method__module": (MODULE, "three-views"),
    }.items():
        value, method = expected
        folder = write_live_run(tmp_path / name, source, epochs=(0,), **{name: value})
        assert dict(Explorer(Run(folder)).state()["settings"])["method"] == method


def test_an_unchanged_run_gives_no_content_and_a_changed_one_its_new_state(tmp_path):
    folder = write_live_run(tmp_path / "run", write_arrays(tmp_path / "p.npz"), epochs=())
    with serving_explorer(Explorer(Run(folder))) as port:
        first = get(port, "/api/run").json
        assert first["snapshot_epochs"] == [] and first["epochs_done"] == 0
        assert not first["training"]
        assert "no snapshots" in get(port, "/api/map").error
        for path in (
            "/api/images",
            "/api/point/0",
            "/api/rank?epoch=0",
            "/api/prepare?epoch=0",
            "/api/colors?by=cluster&epoch=0",
        ):
            assert get(port, path).status == 404, path

        def since(version):
            return get(port, f"/api/run?since={version}")

        def has_tsne(epochs):
            answer = get(port, "/api/map").json
            return (answer["kind"] == "t-SNE" and set(answer["points"]) == epochs) or None

        assert since(first["version"]).status == 204 and since(first["version"]).body == b""
        log(folder, 1, loss=2.0)
        second = since(first["version"]).json
        assert second["curves"]["loss"]["y"] == [2.0] and second["training"]
        write_live_snapshot(folder, 0)
        third = since(second["version"]).json
        assert third["snapshot_epochs"] == [0]
        assert list(get(port, "/api/map").json["points"]) == ["0"]
        RunDirectory(folder).warn(1, "collapse", "collapse: no variety")
        fourth = since(third["version"]).json
        warning = {"kind": "collapse", "message": "collapse: no variety", "epoch": 0.1}
        assert fourth["warnings"] == [warning]
        write_live_snapshot(folder, 2)
        fifth = since(fourth["version"]).json
        assert fifth["snapshot_epochs"] == [0, 2]
        assert wait_for(lambda: has_tsne({"0", "2"}))
        epochs = [snapshot["epoch"] for snapshot in get(port, "/api/point/1").json["snapshots"]]
        assert epochs == [0, 2]
        old = time.time() - 3600
        os.utime(folder / "metrics.jsonl", (old, old))
        assert since(fifth["version"]).json["training"] is False
        log(folder, 40, loss=1.0)
        assert get(port, "/api/run").json["training"] is False  # it is finished


def test_another_run_started_in_the_same_folder_replaces_the_first(tmp_path):
    source = write_arrays(tmp_path / "p.npz")
    folder = write_live_run(tmp_path / "run", source)
    with serving_explorer(Explorer(Run(folder))) as port:
        old = get(port, "/api/run").json
        old_point = get(port, "/api/point/0").json
        assert len(get(port, "/api/images").json["indices"]) == 60
        shutil.rmtree(folder)
        write_live_run(folder, source, epochs=(0, 1), total=6, snapshot_images=30)
        new = get(port, f"/api/run?since={old['version']}").json
        assert (new["epochs"], new["snapshot_epochs"]) == (6, [0, 1])
        assert new["cache_key"] != old["cache_key"]
        assert len(get(port, "/api/images").json["indices"]) == 30
        snapshots = get(port, "/api/point/0").json["snapshots"]
        assert [snapshot["epoch"] for snapshot in snapshots] == [0, 1]
        assert snapshots[0]["rows"] != old_point["snapshots"][0]["rows"]


def test_a_run_started_again_with_the_same_settings_is_another(tmp_path):
    folder = write_live_run(tmp_path / "run", write_arrays(tmp_path / "p.npz"), epochs=(0,))
    path = folder / "environment.json"
    environment = json.loads(path.read_text())
    path.write_text(json.dumps({**environment, "date": "2001-01-01"}))
    explorer = Explorer(Run(folder))
    path.write_text(json.dumps(environment))
    other = explorer.current()
    assert other is not explorer and other.cache_key != explorer.cache_key


def test_a_continued_run_is_the_same_run(tmp_path):
    folder = write_live_run(tmp_path / "run", write_arrays(tmp_path / "p.npz"))
    explorer = Explorer(Run(folder))
    key = explorer.state()["cache_key"]
    path = folder / "environment.json"
    source = json.loads(path.read_text())["source"]
    RunDirectory(folder).begin(Run(folder).config, extra={"steps": 40, "source": source})
    log(folder, 30, loss=0.5)
    environment = json.loads(path.read_text())
    path.write_text(json.dumps({**environment, "date": "2999-01-01"}))
    assert len(environment["earlier"]) == 1
    assert explorer.current() is explorer and explorer.state()["cache_key"] == key
    assert Explorer(Run(folder)).cache_key == key and explorer.state()["epochs_done"] == 3


def test_a_run_continued_with_a_resume_safe_setting_is_the_same_run(tmp_path):
    folder = write_live_run(tmp_path / "run", write_arrays(tmp_path / "p.npz"))
    explorer = Explorer(Run(folder))
    RunDirectory(folder).begin(Run(folder).config.with_overrides({"data.workers": 3}), extra={})
    assert explorer.current() is explorer
    assert Explorer(Run(folder)).cache_key == explorer.cache_key


def test_a_long_curve_is_thinned_and_keeps_its_ends(tmp_path):
    source = write_arrays(tmp_path / "p.npz")
    folder = write_live_run(tmp_path / "run", source, epochs=(), total=1000)
    lines = [
        json.dumps({"kind": "train", "step": step, "epoch": 1, "loss": step, "odd": None})
        for step in range(1, 5001)
    ]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    curves = Explorer(Run(folder)).state()["curves"]
    loss = curves["loss"]["y"]
    assert list(curves) == ["loss"] and len(loss) == MAX_POINTS
    assert loss[0] == 1 and loss[-1] == 5000 and loss == sorted(loss)


def test_many_threads_read_each_line_once(run):
    explorer = Explorer(Run(run))
    states = []
    threads = [threading.Thread(target=lambda: states.append(explorer.state())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(state["curves"]["loss"]["x"]) for state in states] == [2] * 8


def test_a_training_that_died_is_not_shown_as_training(tmp_path):
    folder = write_live_run(tmp_path / "run", write_arrays(tmp_path / "p.npz"))
    for step in range(1, 5):
        log(folder, step, loss=1.0, seconds=5.0 * step, images_per_second=100.0)
    explorer = Explorer(Run(folder))
    assert explorer.state()["training"] is True
    version = explorer.live.version()
    long_ago = time.time() - 120  # lines came every 5 seconds
    os.utime(folder / "metrics.jsonl", (long_ago, long_ago))
    state = explorer.state()
    assert state["training"] is False and state["seconds_silent"] > 119
    assert explorer.live.version() != version


def test_a_stray_file_is_no_snapshot(tmp_path):
    folder = write_live_run(tmp_path / "run", write_arrays(tmp_path / "p.npz"))
    for name in ("7.pt", "epoch-12.pt"):
        shutil.copy(folder / "snapshots/epoch-0000.pt", folder / "snapshots" / name)
    assert Run(folder).snapshot_epochs == [0, 2]


def test_a_folder_whose_name_is_not_unicode_can_be_explored(tmp_path):
    folder = write_live_run(tmp_path / os.fsdecode(b"caf\xe9"), write_arrays(tmp_path / "p.npz"))
    assert Explorer(Run(folder)).cache_key


def test_a_stop_is_requested_by_a_file_and_reported_when_the_run_has_saved(tmp_path):
    folder = write_live_run(tmp_path / "run", write_arrays(tmp_path / "p.npz"), epochs=())
    request = folder / "stop-requested"
    with serving_explorer(Explorer(Run(folder))) as port:
        refused = post(port, "/api/stop-training")
        assert refused.status == 400 and "nothing trains" in refused.error
        log(folder, 10, loss=1.0)
        (folder / "checkpoints" / "step-00000008.pt").touch()
        os.utime(folder / "checkpoints" / "step-00000008.pt", (1, 1))
        os.utime(folder / "environment.json", (1, 1))
        assert get(port, "/api/stop-training", "POST").status == 403  # without an origin
        assert get(port, "/api/stop-training").status == 405 and not request.exists()
        before = get(port, "/api/run").json
        assert before["training"] and before["stop"] is None

        assert post(port, "/api/stop-training").status == 200
        assert request.exists()
        asked = get(port, f"/api/run?since={before['version']}").json
        assert asked["training"] and asked["stop"] == "requested"

        (folder / "checkpoints" / "step-00000012.pt").touch()
        request.unlink()
        stopped = get(port, f"/api/run?since={asked['version']}").json
        assert stopped["stop"] == 12 and not stopped["training"]

        log(folder, 40, loss=0.5)  # it was the last step
        assert get(port, "/api/run").json["stop"] is None
        RunDirectory(folder).rewind(12)

        (folder / "environment.json").touch()  # the run was continued
        again = get(port, f"/api/run?since={stopped['version']}").json
        assert again["stop"] is None and again["training"]

        request.touch()
        os.utime(folder / "metrics.jsonl", (1, 1))  # it was killed before it looked
        assert get(port, "/api/run").json["stop"] is None
