"""TensorBoard, Weights & Biases and MLflow themselves, without a network."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from meanshift.runtime import signals
from meanshift.runtime.run_directory import RunDirectory
from meanshift.training.loop import pretrain
from tests.support.forked import free_port
from tests.support.processes import (
    in_step,
    kill_in,
    make_photos,
    pretrain_command,
    read_lines,
    run_processes,
    start_processes,
    wait_for_lines,
)
from tests.support.toy_method import make_arrays, toy_config
from tests.support.trackers import (
    expected_values,
    line,
    mlflow_runs,
    mlflow_values,
    row_values,
    single_precision,
    start,
    tensorboard_values,
    wandb_records,
    wandb_values,
)
from tests.support.wandb_server import serve_wandb

pytestmark = [
    pytest.mark.extras,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # in the libraries
]
ALL = "tensorboard,wandb,mlflow"


@pytest.fixture(autouse=True)
def own_folders(tmp_path_factory, monkeypatch):
    """Caches in a folder of the test, and none of the variables of whoever runs it."""
    for name in os.environ:
        if name.startswith(("WANDB_", "MLFLOW_")):
            monkeypatch.delenv(name)
    caches = tmp_path_factory.mktemp("caches")
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(caches))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")


def check_all(run):
    """Each tracker has every value of metrics.jsonl once, in one run."""
    expected = expected_values(run)
    assert expected
    assert tensorboard_values(run) == single_precision(expected)
    assert wandb_values(run) == expected
    assert mlflow_values(run) == expected
    assert len(mlflow_runs(run)[1]) == 1
    assert len(list((run / "wandb").glob("*run-*"))) == 1


def test_each_has_the_lines_config_and_environment(tmp_path):
    config = toy_config(make_arrays(tmp_path), train__epochs=1, train__trackers=ALL)
    run = pretrain(config, tmp_path / "run")
    assert read_lines(run, "warnings.jsonl") == []
    check_all(run)
    (record,) = (record["run"] for record in wandb_records(run) if record["type"] == "run")
    assert record["run_id"] == (run / "tracker-id").read_text().strip()
    assert record["config"]["update"]["train"]["batch_size"] == 4
    assert "torch" in record["config"]["update"]["environment"]["versions"]
    (logged,) = mlflow_runs(run)[1]
    assert logged.info.status == "FINISHED" and logged.info.run_name == "run"
    assert logged.data.params["train.batch_size"] == "4"
    assert logged.data.params["train.trackers"] == ALL
    assert "torch" in json.loads(logged.data.tags["environment.versions"])
    files = {path.name for path in run.iterdir()}
    assert {"tensorboard", "wandb", "mlflow", "tracker-id"} <= files


def test_mlflow_sends_no_step_again_that_it_cannot_take_back(tmp_path):
    """Lines after the checkpoint, of a run that ended with an error and continues before them."""
    first = start(tmp_path, "mlflow")
    for step in (1, 2, 3):
        first.log(line(step, float(step)))
    first.close(finished=False)
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line(1, 1.0)) + "\n")
    second = start(tmp_path, "mlflow", **{"train.log_every": 7})
    for step in (2, 3, 4):
        second.log(line(step, float(step)))
    second.close(finished=True)
    losses = [value for value in mlflow_values(tmp_path) if value[0] == "train/loss"]
    assert losses == [("train/loss", step, float(step)) for step in (1, 2, 3, 4)]
    (run,) = mlflow_runs(tmp_path)[1]
    assert run.data.params["train.log_every"] == "20"  # as it began
    assert run.data.tags["train.log_every"] == "7"


def test_mlflow_gets_no_line_before_its_checkpoint(tmp_path):
    opened = start(tmp_path, "mlflow")
    opened.log(line(1, 1.0))
    assert mlflow_values(tmp_path) == []
    opened.saved()
    assert [value[:2] for value in mlflow_values(tmp_path)] == [
        ("train/epoch", 1),
        ("train/loss", 1),
    ]
    opened.close(finished=True)


@pytest.mark.parametrize(
    ("name", "obstacle"),
    [("tensorboard", "tensorboard"), ("wandb", "wandb"), ("mlflow", "mlflow/mlflow.db")],
)
def test_a_file_in_the_way_is_a_warning(tmp_path, name, obstacle):
    run = tmp_path / "run"
    config = toy_config(make_arrays(tmp_path), train__epochs=1)
    RunDirectory(run).begin(config, extra={})
    (run / obstacle).parent.mkdir(exist_ok=True)
    (run / obstacle).write_text("no database, and no folder" * 100)
    pretrain(config.with_overrides({"train.trackers": name}), run)
    (warning,) = read_lines(run, "warnings.jsonl")
    assert warning["message"].startswith(f"{name} failed (")
    assert read_lines(run)[-1]["step"] == 10


def test_a_closed_mlflow_server_is_a_warning(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    config = toy_config(make_arrays(tmp_path), train__epochs=1, train__trackers="mlflow")
    run = pretrain(config, tmp_path / "run")
    (warning,) = read_lines(run, "warnings.jsonl")
    assert "mlflow failed (MlflowException: API request" in warning["message"]
    assert not (run / "mlflow").exists()


def test_mlflow_uses_the_store_of_the_environment(tmp_path, monkeypatch):
    uri = f"sqlite:///{tmp_path / 'elsewhere.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    for step in (1, 2):
        opened = start(tmp_path / "run", "mlflow")
        opened.log(line(step, 1.0))
        opened.close(finished=True)
    client, (run,) = mlflow_runs(tmp_path, uri)
    assert client.get_experiment(run.info.experiment_id).name == "mine"
    assert len(client.get_metric_history(run.info.run_id, "train/loss")) == 2
    assert not (tmp_path / "run" / "mlflow").exists()


SERVICE_DIES = """
import sys
import wandb
from pathlib import Path
from tests.support.trackers import line, start

opened = start(Path(sys.argv[1]), "wandb", warn=lambda kind, message: print(kind, message))
service = wandb.setup()._connection._proc._process
service.kill()
service.wait()
for step in range(1, 100):
    opened.log(line(step, 1.0))
    opened.saved()
opened.close(finished=True)
"""


def test_wandb_whose_service_dies_is_a_warning(tmp_path):
    """As when the system kills it for its memory."""
    process = subprocess.run(
        [sys.executable, "-c", SERVICE_DIES, str(tmp_path)], capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.count("tracker wandb failed (ConnectionResetError") == 1


@pytest.mark.slow
def test_killed_again_and_again_each_has_every_line_once_under_one_id(tmp_path):
    """Real processes, killed by SIGKILL: early, between two checkpoints, and late."""
    photos, run = make_photos(tmp_path / "photos"), tmp_path / "run"
    command = pretrain_command(photos, run, train__trackers=ALL)
    ids = set()
    for count in (3, 9, 17):
        with start_processes(1, command, tmp_path / f"killed-{count}", fresh=True) as group:
            wait_for_lines(run, count, group)
            group.signal(signal.SIGKILL)
            assert group.wait() == [-signal.SIGKILL], group.output
        ids.add((run / "tracker-id").read_text())
        ids |= {each.info.run_id for each in mlflow_runs(run)[1]}
    codes, group = run_processes(1, command, tmp_path / "last", fresh=True)
    assert codes == [0], group.output
    assert {warning["kind"] for warning in read_lines(run, "warnings.jsonl")} == {"bad image"}
    check_all(run)
    ids.add((run / "tracker-id").read_text())
    ids |= {each.info.run_id for each in mlflow_runs(run)[1]}
    assert len(ids) == 2  # ours, and that of MLflow
    assert expected_values(run)[-1][1] == 20
    with serve_wandb() as server:
        sync(run, server)
    check_uploaded(run, server)


def sync(run, server):
    """Upload what is not uploaded yet, as a user does."""
    folders = [str(path) for path in (run / "wandb").glob("offline-run-*")]
    subprocess.run(
        [sys.executable, "-m", "wandb", "sync", "--yes", *folders],
        env={**os.environ, **server.environment},
        cwd=run.parent,  # where the command writes its own log
        capture_output=True,
        check=True,
    )


def check_uploaded(run, server):
    """The server has every value once, under the id of the run."""
    ((name, rows),) = server.rows.items()
    assert name == (run / "tracker-id").read_text().strip()
    assert row_values(rows) == expected_values(run)


@pytest.mark.slow
def test_a_run_that_was_uploaded_and_goes_on_uploads_only_the_rest(tmp_path):
    run = tmp_path / "run"
    config = toy_config(make_arrays(tmp_path), train__epochs=1, train__trackers="wandb")
    with serve_wandb() as server:
        pretrain(config, run)
        sync(run, server)
        check_uploaded(run, server)
        pretrain(config.with_overrides({"train.epochs": 2}), run)
        sync(run, server)
        check_uploaded(run, server)
    assert len(list((run / "wandb").glob("offline-run-*"))) == 2


@pytest.mark.slow
def test_an_online_run_continues_after_the_rows_that_the_server_has(tmp_path, monkeypatch):
    """With the real library, and a stand-in for its server."""
    run = tmp_path / "run"
    config = toy_config(make_arrays(tmp_path), train__epochs=2, train__trackers="wandb")
    (tmp_path / "config.json").write_text(config.to_json())
    command = ["pretrain", "--config", str(tmp_path / "config.json"), "--out", str(run)]
    monkeypatch.setenv("WANDB_MODE", "online")
    with serve_wandb() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        stop = in_step((12,), lambda: os.kill(os.getpid(), signal.SIGTERM))
        codes, group = run_processes(1, command, tmp_path / "stopped", before={0: stop})
        assert codes == [signals.REQUEUE], group.output
        sent = len(server.rows[(run / "tracker-id").read_text().strip()])
        codes, group = run_processes(1, command, tmp_path / "killed", before={0: kill_in(15)})
        assert codes == [-signal.SIGKILL], group.output
        codes, group = run_processes(1, command, tmp_path / "last")
        assert codes == [0], group.output
    assert "tracker" not in {warning["kind"] for warning in read_lines(run, "warnings.jsonl")}
    ((_, rows),) = server.rows.items()
    assert row_values(rows) == expected_values(run)
    assert sent == 14 and server.offsets[:2] == [0, sent]


@pytest.mark.slow
def test_nothing_is_sent_by_default(tmp_path):
    """Every connection would go to this proxy."""
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        proxy.setblocking(False)
        address = f"http://127.0.0.1:{proxy.getsockname()[1]}"
        config = toy_config(make_arrays(tmp_path), train__epochs=1, train__trackers=ALL)
        (tmp_path / "config.json").write_text(config.to_json())
        program = ["-m", "meanshift", "pretrain", "--config", str(tmp_path / "config.json")]
        environment = {
            name: value
            for name, value in os.environ.items()
            if name not in ("WANDB_ERROR_REPORTING", "MLFLOW_DISABLE_TELEMETRY", "CI")
            and not name.startswith("PYTEST")
        }
        for scheme in ("http", "https", "all"):
            environment[f"{scheme}_proxy"] = environment[f"{scheme.upper()}_PROXY"] = address
        environment["NO_PROXY"] = environment["no_proxy"] = ""
        environment["PYTHONPATH"] = str(Path(__file__).parents[2])  # for `tests.support`
        subprocess.run(
            [sys.executable, *program, "--out", str(tmp_path / "run")],
            env=environment,
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=True,
        )
        with pytest.raises(BlockingIOError):
            proxy.accept()
    check_all(tmp_path / "run")
    assert {path.name for path in tmp_path.iterdir()} == {"images.npz", "config.json", "run"}
