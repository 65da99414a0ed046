"""What could not be tested without a GPU, in a few minutes on one: `make gpu-check`.

Trains short runs in float32, with autocast, with a gradient scaler, compiled, in two processes and
continued after a signal, looks for operations in a step that wait for the GPU, and measures the
speed. It prints a table to paste into an issue, and fails if a check does.

    python tools/gpu_check.py
    python tools/gpu_check.py --device cpu   # rehearse this script, at a tiny size
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

TOLERANCE = 0.05
"""difference of the last losses of two runs that take the same steps up to rounding"""

# images, epochs, and the settings of a run
GPU_SIZE = (12_800, 4, "--data.image_size 32 --train.batch_size 256 --method.bank_size 8192")
CPU_SIZE = (
    96, 2, "--data.image_size 16 --train.batch_size 16 --method.bank_size 64 --encoder.name conv3 "
    "--encoder.stem imagenet --encoder.width 0.125",
)  # fmt: skip


class Skipped(Exception):
    """A check that this machine cannot make."""


class Checks:
    """The checks, each a method that returns a note; they share the runs that they compare."""

    def __init__(self, device: str, folder: Path) -> None:
        self.device = device
        self.folder = folder
        images, self.epochs, size = GPU_SIZE if device == "cuda" else CPU_SIZE
        side = int(size.split()[1])
        pixels = np.random.default_rng(0).integers(0, 256, (images, side, side, 3), dtype=np.uint8)
        np.save(folder / "images.npy", pixels)
        self.settings = (
            size.split()
            + (
                f"--train.device {device} --train.epochs {self.epochs} --train.snapshots 0 "
                "--train.log_every 1 --train.monitor_every 0 --optim.lr 0.01 --data.validation none"
            ).split()
        )

    def float32(self) -> str:
        return self._compare("float32")

    def autocast(self) -> str:
        return self._compare("bfloat16", "--train.precision bfloat16")

    def scaler(self) -> str:
        if self.device == "cpu":
            raise Skipped("float16 needs a GPU")
        return self._compare("float16", "--train.precision float16")

    def compiled(self) -> str:
        return self._compare("compiled", "--train.compile True")

    def two_processes(self) -> str:
        if self.device == "cuda" and torch.cuda.device_count() < 2:
            raise Skipped("needs two GPUs")
        run = "-m torch.distributed.run --standalone --nproc-per-node 2 -m meanshift".split()
        return self._compare("two", "--train.batch_norm sync", launcher=run)

    def resume(self) -> str:
        """A run that is asked to stop after its first epoch and then continued."""
        command = self._command("parts")
        process = subprocess.Popen(command, env=_environment(), stderr=subprocess.DEVNULL)
        metrics = self.folder / "parts/metrics.jsonl"
        while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        code = process.wait()
        if code == 0:
            raise Skipped("the run had ended before the signal came")
        return f"stopped with code {code}; {self._compare('parts')}"

    def no_waits(self) -> str:
        """Steps in which the CPU must not wait for the GPU; torch raises an error where it does."""
        from meanshift.config.recipes import recipe
        from meanshift.training.session import open_session
        from meanshift.training.step import TrainStep

        flags = iter(self.settings)
        overrides = {flag.removeprefix("--"): next(flags) for flag in flags}
        config = recipe("cifar10-r18").with_overrides(
            overrides | {"data.source": str(self.folder / "images.npy")}
        )
        on_gpu = self.device == "cuda"
        with open_session(config, self.folder / "waits", torch.device(self.device)) as session:
            step = TrainStep(session)
            for images in session.batches():
                # The first steps make what is kept, such as constants and the optimizer's state.
                if on_gpu and images.step == 5:
                    torch.cuda.set_sync_debug_mode("error")
                output = step(images, session.schedule.progress(images.step))
                session.state.averages.add(output)
                session.state.embeddings.add(output.embeddings)
                if images.step == 11:
                    break
        if not on_gpu:
            raise Skipped("torch reports this for a GPU only")
        torch.cuda.set_sync_debug_mode("default")
        return f"7 steps; {torch.cuda.max_memory_allocated() / 1e6:,.0f} MB"

    def _command(self, name: str, more: str = "", launcher: list[str] | None = None) -> list[str]:
        data = ["--data", str(self.folder / "images.npy"), "--out", str(self.folder / name)]
        launcher = launcher or ["-m", "meanshift"]
        precision = [] if "precision" in more else ["--train.precision", "float32"]
        settings = [*self.settings, *precision, *more.split()]
        return [sys.executable, *launcher, "pretrain", "cifar10-r18", *data, *settings]

    def _compare(self, name: str, more: str = "", launcher: list[str] | None = None) -> str:
        """Train a run to its end; its last loss must be that of the run in float32."""
        done = subprocess.run(
            self._command(name, more, launcher),
            env=_environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(" ".join(done.stderr.split())[-300:])
        losses, speed = self._read(name)
        expected, _ = self._read("float32")
        if len(losses) != len(expected) or not abs(losses[-1] - expected[-1]) < TOLERANCE:
            raise RuntimeError(
                f"the last loss is {losses[-1]:.4f} after {len(losses)} steps, in float32 "
                f"{expected[-1]:.4f} after {len(expected)}"
            )
        return f"loss {losses[-1]:.4f}, {speed:,.0f} images/s"

    def _read(self, name: str) -> tuple[list[float], float]:
        """The losses of a run, and the images per second of its last epoch."""
        text = (self.folder / name / "metrics.jsonl").read_text()
        lines = [json.loads(line) for line in text.splitlines()]
        lines = [line for line in lines if line["kind"] == "train"]
        last = [line["images_per_second"] for line in lines if line["epoch"] == self.epochs]
        return [line["loss"] for line in lines], float(np.median(last))


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[1])}


def check(title: str, make: Callable[[], str]) -> tuple[bool, str]:
    """Make a check: whether it did not fail, and its row of the table."""
    begin = time.perf_counter()
    try:
        result, note = "passed", make()
    except Skipped as reason:
        result, note = "skipped", str(reason)
    except Exception as error:  # the other checks must still be made
        result, note = "**failed**", f"{type(error).__name__}: {error}"
    seconds = time.perf_counter() - begin
    note = note.replace("|", "/").replace("\n", " ")
    return result != "**failed**", f"| {title} | {result} | {seconds:.0f} | {note} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="[cuda]")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("torch finds no GPU here, so there is nothing to check; "
              "--device cpu rehearses this script", file=sys.stderr)  # fmt: skip
        return 1
    gpu = torch.cuda.get_device_name() if options.device == "cuda" else "none (a rehearsal)"
    print(f"GPU: {gpu}; torch {torch.__version__}, CUDA {torch.version.cuda}, "
          f"Python {platform.python_version()}, {platform.platform()}\n")  # fmt: skip
    print("| check | result | s | |\n| --- | --- | ---: | --- |")
    passed = True
    with tempfile.TemporaryDirectory() as folder:
        checks = Checks(options.device, Path(folder))
        for title, make in {
            "float32": checks.float32,
            "autocast (bfloat16)": checks.autocast,
            "gradient scaler (float16)": checks.scaler,
            "compiled": checks.compiled,
            "two processes": checks.two_processes,
            "stopped and continued": checks.resume,
            "no step waits for the GPU": checks.no_waits,
        }.items():
            ok, row = check(title, make)
            passed &= ok
            print(row, flush=True)
    return int(not passed)


if __name__ == "__main__":
    raise SystemExit(main())
