"""Show that two versions of the program train to the same bits.

    python tools/compare_runs.py OLD_CLONE NEW_CLONE [--work DIR] [--only NAME]

Trains five configurations for 50 steps with each clone, in processes of their own with one thread,
and compares the logged losses and every tensor of the last checkpoint (weights, buffers, memory
bank and optimizer state) by their bytes. Names may differ between the versions: tensors are
compared as a multiset. The runs of a clone are kept in `--work` and used again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

STEPS = 50
RENAMED = {"--train.warmup_epochs": "--optim.warmup_epochs", "--data.held_out": "--data.validation"}
"""settings of the old version that have another name in the new one"""
BASE = "--train.epochs 1 --train.log_every 1 --train.snapshots 2 --train.precision float32".split()
CONFIGURATIONS: dict[str, tuple[str, int, list[str]]] = {
    # name: (recipe, processes, settings)
    "demo": ("sample-resnet10", 1, ["--method.k_schedule", "constant"]),
    "small": (
        "small-resnet18",
        1,
        ["--method.k_schedule", "constant", "--train.warmup_epochs", "0"],
    ),
    "k=1": ("cifar10-r18", 1, ["--method.k", "1"]),
    "symmetric": ("sample-resnet10", 1, ["--method.symmetric", "true", "--method.k_start", "3"]),
    "two processes": (
        "sample-resnet10",
        2,
        ["--method.k_start", "3", "--method.bank_layout", "sharded"],
    ),
}
SHRINK = {
    "demo": ["--train.batch_size", "32", "--method.bank_size", "512"],
    "small": "--train.batch_size 16 --method.bank_size 256 --data.image_size 48".split(),
    "cifar10-r18": "--train.batch_size 16 --encoder.width 0.25".split(),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--work", type=Path, default=Path("runs/compare"))
    parser.add_argument("--only", choices=CONFIGURATIONS, action="append")
    arguments = parser.parse_args()
    work = arguments.work.resolve()
    different = 0
    for name in arguments.only or CONFIGURATIONS:
        recipe, _, _ = CONFIGURATIONS[name]
        batch_size = int(SHRINK[recipe][1])
        data = make_data(work, recipe, STEPS * batch_size)
        old, new = (
            train(clone.resolve(), work / side / name.replace(" ", "-"), name, data)
            for side, clone in (("old", arguments.old), ("new", arguments.new))
        )
        losses = [metrics(run) for run in (old, new)]
        tensors = [digests(run) for run in (old, new)]
        same = losses[0] == losses[1] and tensors[0] == tensors[1]
        different += not same
        print(
            f"{name:14} {len(losses[0])} steps, last loss {losses[1][-1][0]:.9f}, "
            f"{sum(tensors[1].values())} tensors: {'the same bits' if same else 'DIFFERENT'}"
        )
        if not same:
            first = next(
                (i for i, pair in enumerate(zip(*losses, strict=False)) if pair[0] != pair[1]), None
            )
            print(
                f"  first different metrics at step {first}; tensors only in the old run "
                f"{sum((tensors[0] - tensors[1]).values())}, only in the new one "
                f"{sum((tensors[1] - tensors[0]).values())}"
            )
    return min(different, 1)


def make_data(work: Path, recipe: str, count: int) -> Path:
    """Arrays for the small-image recipes, a folder of JPEG files for `small`."""
    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 256, (count, 4, 4, 3), dtype=np.uint8)
    labels = rng.integers(0, 10, count)
    if recipe != "small":
        path = work / f"arrays-{count}.npz"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            images = coarse.repeat(8, 1).repeat(8, 2)
            np.savez(path, x_train=images, y_train=labels, x_test=images[:64], y_test=labels[:64])
        return path
    root = work / f"photos-{count}"
    if not root.exists():
        for index, (image, label) in enumerate(zip(coarse, labels, strict=True)):
            folder = root / "train" / f"class{label}"
            folder.mkdir(parents=True, exist_ok=True)
            height, width = 48 + index % 17, 48 + index % 23
            large = Image.fromarray(image).resize((width, height), Image.Resampling.BILINEAR)
            large.save(folder / f"{index:05d}.jpg")
    return root


def train(clone: Path, run: Path, name: str, data: Path) -> Path:
    recipe, processes, settings = CONFIGURATIONS[name]
    if (run / "finished").exists():
        return run
    command = [sys.executable, "-m", "meanshift"]
    if processes > 1:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={processes}", "-m", "meanshift"]
    command += ["pretrain", recipe, "--data", str(data), "--out", str(run), *BASE]
    command += [*SHRINK[recipe], *settings, "--data.held_out", "none"]
    if (clone / "meanshift" / "config" / "methods.py").exists():
        command = [RENAMED.get(word, word) for word in command]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(clone)}
    done = subprocess.run(
        command, cwd=clone, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{clone}: {name}: exit code {done.returncode}\n{done.stderr}")
    (run / "finished").touch()
    return run


def metrics(run: Path) -> list[tuple[float, ...]]:
    """Loss, agreement and purity of each step."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    names = ("loss", "agreement", "purity", "same_image")
    return [
        tuple(line.get(name, -1.0) for name in names) for line in lines if line["kind"] == "train"
    ]


def digests(run: Path) -> Counter[str]:
    """The tensors of the last checkpoint and of its parts, by their bytes."""
    found: Counter[str] = Counter()
    last = max((run / "checkpoints").glob("step-*[0-9].pt"), key=lambda path: path.name[:14])
    for path in (run / "checkpoints").glob(f"{last.name[:14]}*.pt"):
        state = torch.load(path, map_location="cpu", weights_only=True)
        kept = state if ".part-" in path.name else [state["method"], state["optimizer"]]
        for tensor in walk(kept):
            text = f"{tensor.dtype} {tuple(tensor.shape)} ".encode()
            found[hashlib.sha256(text + tensor.numpy().tobytes()).hexdigest()] += 1
    return found


def walk(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from walk(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from walk(item)


if __name__ == "__main__":
    sys.exit(main())
