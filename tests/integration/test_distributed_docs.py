"""The files for schedulers in docs/distributed.md run, with replacements for the schedulers."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml

from meanshift.runtime import checkpoint

PAGE = Path(__file__).parents[2] / "docs" / "distributed.md"
TINY = (
    "--data.image_size 16 --encoder.width 0.125 --encoder.stem small-stride2 --encoder.name "
    "resnet10 --method.bank_size 64 --method.k 3 --train.batch_size 8 --optim.warmup_epochs 0 "
    "--train.log_every 1 --train.monitor_every 0 --train.snapshots 0 --train.device cpu "
    "--data.validation none --method.bank_layout sharded"
)
SRUN = """#!/bin/bash
# Start SLURM_NTASKS tasks, each with its number; exit with the largest exit code.
while [[ $1 == --* ]]; do shift; done
for task in $(seq 0 $((SLURM_NTASKS - 1))); do
    SLURM_PROCID=$task SLURM_LOCALID=$task "$@" &
    tasks="$tasks $!"
done
echo $tasks > "$TASKS"
largest=0
for task in $tasks; do wait $task; code=$?; ((code > largest)) && largest=$code; done
exit $largest
"""
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then echo 127.0.0.1; else echo "$@" >> "$REQUESTS"; fi
"""


def block(kind):
    """The only block of this kind on the page."""
    (text,) = re.findall(rf"```{kind}\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return text


def with_tiny_settings(text, data, out, epochs):
    command = r"pretrain imagenet-r50 --data DATA --out RUN --data\.workers 8"
    assert re.search(command, text)
    tiny = f"pretrain small --data {data} --out {out} --train.epochs {epochs} {TINY}"
    return re.sub(command, tiny, text)


@pytest.fixture
def images(tmp_path):
    rng = np.random.default_rng(0)
    path = tmp_path / "images.npz"
    np.savez(path, images=rng.integers(0, 256, (48, 16, 16, 3), dtype=np.uint8))
    return path


def environment(**variables):
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", **variables}


def logged_steps(run):
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line)["step"] for line in lines]


@pytest.fixture
def slurm(tmp_path):
    """The environment of a job of two tasks, with replacements for SLURM's programs."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    variables = environment(
        SLURM_NTASKS="2",
        SLURM_JOB_ID=str(os.getpid()),
        SLURM_JOB_NODELIST="n1",
        TASKS=str(tmp_path / "tasks"),
        REQUESTS=str(tmp_path / "requests"),
    )
    return {**variables, "PATH": f"{programs}:{variables['PATH']}"}


@pytest.mark.slow
def test_the_slurm_job_is_requeued_when_its_time_is_up_and_continues(images, slurm, tmp_path):
    run = tmp_path / "run"
    requests = tmp_path / "requests"
    script = tmp_path / "job.sh"
    script.write_text(with_tiny_settings(block("bash"), images, run, 40))
    command = ["bash", str(script)]
    job = subprocess.Popen(command, env=slurm, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while len(logged_steps(run)) < 5 and job.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    for task in (tmp_path / "tasks").read_text().split():  # as SLURM does minutes before the end
        os.kill(int(task), signal.SIGTERM)
    _, errors = job.communicate(timeout=60)
    assert job.returncode == 75, errors
    assert requests.read_text() == f"requeue {os.getpid()}\n"
    state, _ = checkpoint.latest(run / "checkpoints")
    assert state["step"] == logged_steps(run)[-1] < 240 and len(state["parts"]) == 2
    second = subprocess.run(
        command, env=slurm, capture_output=True, text=True, check=False, timeout=120
    )
    assert second.returncode == 0 and "finished" in second.stdout, second.stderr
    assert logged_steps(run) == list(range(1, 241))
    assert len(requests.read_text().splitlines()) == 1


@pytest.mark.slow
def test_the_pods_of_the_kubernetes_job_train_together(images, tmp_path):
    job = yaml.safe_load(block("yaml"))["spec"]
    (container,) = job["template"]["spec"]["containers"]
    *shell, script = [*container["command"], *container["args"]]
    outputs: list[tuple[str, str]] = []
    for attempt in range(3):  # another program may take the port before the pods do
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        run = tmp_path / f"run-{attempt}"
        command = with_tiny_settings(script, images, run, 2)
        command = command.replace("--nproc-per-node 8", "--nproc-per-node 1")
        command = command.replace("29500", port)
        pods = [
            subprocess.Popen(
                [*shell, command],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment(JOB_COMPLETION_INDEX=str(index), MASTER_ADDR="127.0.0.1"),
            )
            for index in range(job["completions"])
        ]
        try:
            outputs = [pod.communicate(timeout=90) for pod in pods]
        except subprocess.TimeoutExpired:
            for pod in pods:
                pod.terminate()
            for pod in pods:
                pod.communicate()
            continue
        break
    assert [pod.returncode for pod in pods] == [0, 0], outputs
    assert logged_steps(run) == list(range(1, 13))
    assert len(checkpoint.latest(run / "checkpoints")[0]["parts"]) == 2
