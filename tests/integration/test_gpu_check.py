"""`make gpu-check`: it says that there is no GPU, and its script is rehearsed on the CPU."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path("tools/gpu_check.py").resolve()


def test_without_a_gpu_it_says_so_and_fails(monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    gpu_check = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gpu_check)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main() == 1
    assert "no GPU here" in capsys.readouterr().err
    passed, row = gpu_check.check("title", lambda: 1 / 0)
    assert not passed and row.startswith("| title | **failed** | 0 | ZeroDivisionError")


@pytest.mark.slow
def test_the_script_runs_on_the_cpu():
    done = subprocess.run(
        [sys.executable, SCRIPT, "--device", "cpu"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = [line.split(" | ")[1] for line in done.stdout.splitlines() if line.startswith("| ")]
    assert results[2:] == ["passed"] * 2 + ["skipped"] + ["passed"] * 3 + ["skipped"]
