"""The files for schedulers in docs/scale.md, run as they stand there with stand-ins around them."""

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

PAGE = Path(__file__).parents[2] / "docs" / "scale.md"
TINY = (
    "--data.image_size 16 --encoder.width 0.125 --encoder.stem small-stride2 --encoder.name "
    "resnet10 --method.bank_size 64 --method.k 3 --train.batch_size 8 --optim.warmup_epochs 0 "
    "--train.log_every 1 --train.monitor_every 0 --train.snapshots 0 --train.device cpu "
    "--data.validation none --method.bank_layout sharded"
)
SRUN = """#!/bin/bash
# As many tasks as SLURM_NTASKS, each told its number; the largest exit code.
while [[ $1 == --* ]]; do shift; done
for task in $(seq 0 $((SLURM_NTASKS - 1))); do
    SLURM_PROCID=$task SLURM_LOCALID=$task "$@" &
    tasks="$tasks $!"
done
echo $tasks > "$TASKS"
code=0
for task in $tasks; do wait $task; one=$?; ((one > code)) && code=$one; done
exit $code
"""
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then echo 127.0.0.1; else echo "$@" >> "$ASKED"; fi
"""


def block(kind):
    (found,) = re.findall(rf"```{kind}\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return found


def with_tiny_settings(text, data, out, epochs):
    command = r"pretrain imagenet-r50 --data DATA --out RUN --data\.workers 8"
    assert re.search(command, text)
    given = f"pretrain small --data {data} --out {out} --train.epochs {epochs} {TINY}"
    return re.sub(command, given, text)


@pytest.fixture
def images(tmp_path):
    random = np.random.default_rng(0)
    np.savez(tmp_path / "p.npz", images=random.integers(0, 256, (48, 16, 16, 3), dtype=np.uint8))
    return tmp_path / "p.npz"


def environment(**more):
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", **more}


def steps(out):
    file = out / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line)["step"] for line in lines]


def test_the_file_for_slurm_is_requeued_when_its_time_is_up_and_goes_on(images, tmp_path):
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    out, asked, tasks = tmp_path / "run", tmp_path / "asked", tmp_path / "tasks"
    script = tmp_path / "job.sh"
    script.write_text(with_tiny_settings(block("bash"), images, out, 40))
    told = environment(
        SLURM_NTASKS="2", SLURM_JOB_ID=str(os.getpid()), SLURM_JOB_NODELIST="n1", TASKS=str(tasks),
        ASKED=str(asked),
    )  # fmt: skip
    told["PATH"] = f"{folder}:{told['PATH']}"
    started = subprocess.Popen(["bash", str(script)], env=told, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while len(steps(out)) < 5 and started.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    for task in tasks.read_text().split():  # as SLURM does some minutes before the end
        os.kill(int(task), signal.SIGTERM)
    _, said = started.communicate(timeout=60)
    assert started.returncode == 75, said
    assert asked.read_text() == f"requeue {os.getpid()}\n"
    saved, _ = checkpoint.latest(out / "checkpoints")
    assert saved["step"] == steps(out)[-1] < 240 and saved["parts"] == 2
    again = subprocess.run(
        ["bash", str(script)], env=told, capture_output=True, text=True, check=False, timeout=120
    )
    assert again.returncode == 0 and "finished" in again.stdout, again.stderr
    assert steps(out) == list(range(1, 241))
    assert len(asked.read_text().splitlines()) == 1


def test_the_job_for_kubernetes_joins_its_pods(images, tmp_path):
    job = yaml.safe_load(block("yaml"))["spec"]
    (container,) = job["template"]["spec"]["containers"]
    command = [*container["command"], *container["args"]]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    text = with_tiny_settings(command[-1], images, tmp_path / "run", 2)
    text = text.replace("--nproc-per-node 8", "--nproc-per-node 1").replace("29500", str(port))
    pods = [
        subprocess.Popen(
            [*command[:-1], text], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=environment(JOB_COMPLETION_INDEX=str(index), MASTER_ADDR="127.0.0.1"),
        )
        for index in range(job["completions"])
    ]  # fmt: skip
    said = [pod.communicate(timeout=150) for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], said
    assert steps(tmp_path / "run") == list(range(1, 13))
    assert checkpoint.latest(tmp_path / "run" / "checkpoints")[0]["parts"] == 2
