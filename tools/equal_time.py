"""Every method on the same data with the same encoder and optimizer, for equal CPU time.

    python -m tools.equal_time --data cifar10 --epochs 6 --out runs/equal-time

Each run takes one thread. Steps of the method and of the recipe `cifar10-cpu` are timed in turns,
and the run has as many epochs as cost what the given ones of the recipe cost: 6 epochs of
CIFAR-10 take about 10 minutes of a core with bfloat16 whose twin is busy. Encoder, optimizer and
batch size are those of the recipe; loss, heads and views are the method's own settings for small
images. Finished runs are found in the folder and not repeated.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch

from benchmarks.methods import MethodStep
from meanshift.config import METHODS, MSF, Config
from meanshift.config.recipes import recipe
from meanshift.data import open_source
from meanshift.evaluation import knn
from meanshift.evaluation.context import EvaluationContext
from meanshift.models.weights import load_weights, starts
from meanshift.ops.collapse import effective_rank
from meanshift.training.loop import pretrain

BASE = recipe("cifar10-cpu")
TEACHER = "meanshift:cifar10-small"


def configurations() -> dict[str, Config]:
    """The settings of each row of the table."""
    # the paper's loss; a bank and a search for small data, as the recipe cifar10-r18 has them
    paper = MSF(dim=256, hidden=512, bank_size=16_384, same_image="skip", search_filled_only=True)
    without = {"method.k": 1, "method.k_schedule": "constant"}
    table = {
        "msf, recipe cifar10-cpu": BASE,
        "msf, recipe cifar10-cpu, k=1": BASE.with_overrides(without),
        "msf": replace(BASE, method=paper),
        "byol-asym": replace(BASE, method=replace(paper, k=1)),
    }
    for name in METHODS:
        if name not in table:
            own = {"method.teacher": TEACHER} if name == "compress" else {}
            other = BASE.with_overrides({"method.name": name, **own})
            table[name] = replace(other, optim=BASE.optim)
            if hasattr(other.method, "fill_memory"):
                random = table[name].with_overrides({"method.fill_memory": False})
                table[f"{name}, random memory"] = random
    return table


def train(config: Config, folder: Path) -> float:
    """Train or continue a run; return its CPU seconds."""
    begin = time.process_time()
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        pretrain(config, folder)
    return time.process_time() - begin


def relative_cost(config: Config) -> float:
    """The time of a step relative to the recipe's, in float32; the two alternate."""
    source = open_source(config.data.source)["train"]
    base = BASE.with_overrides({"data.source": config.data.source})
    steps = [MethodStep(each, source) for each in (config, base)]
    ratios = []
    for turn in range(11):
        seconds = []
        for step in steps:
            begin = time.process_time()
            step.step()
            seconds.append(time.process_time() - begin)
        if turn > 1:  # the first ones allocate memory
            ratios.append(seconds[0] / seconds[1])
    return statistics.median(ratios)


def measure(weights: str, data: str) -> dict[str, float]:
    """The accuracies on the test images, and the rank of their features."""
    context = EvaluationContext(load_weights(weights), data, device="cpu")
    accuracies = knn.evaluate(context, ks=[1, 20]).metrics
    return {**accuracies, "rank": effective_rank(context.test.features)}


def run(title: str, config: Config, out: Path, epochs: int) -> None:
    """Train and measure one row, and write it; its CPU time is that of the last start."""
    torch.set_num_threads(1)
    config = config.with_overrides({"train.monitor_every": 0, "train.snapshots": 2})
    folder = out / "".join(letter if letter.isalnum() else "-" for letter in title)
    if (folder / "config.json").exists():  # stopped before: the same number of epochs
        epochs = Config.from_json((folder / "config.json").read_text()).train.epochs
    else:
        epochs = max(1, round(epochs / relative_cost(config)))
    config = config.with_overrides({"train.epochs": epochs})
    seconds = train(config, folder)
    images = len(open_source(config.data.source)["train"]) * config.train.epochs
    row = {"epochs": config.train.epochs, "images": images, "minutes": seconds / 60}
    row |= measure(str(folder), config.data.source)
    if title.startswith("msf, recipe cifar10-cpu"):
        named = starts(folder).items()
        row["starts"] = {name: measure(spec, config.data.source) for name, spec in named}
    (out / f"{folder.name}.json").write_text(json.dumps({"title": title, **row}, indent=2))
    print(f"{title}: 20-NN {row['20-NN']:.1f} after {row['minutes']:.1f} minutes", flush=True)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The finished rows as Markdown, the best first."""
    lines = ["| | 20-NN | 1-NN | rank | images seen | CPU minutes |", "| --- |" + " --: |" * 5]
    for row in sorted(rows, key=lambda row: -row["20-NN"]):
        seen, minutes = ("-", "-")
        if "images" in row:
            seen, minutes = f"{row['images']:,}", f"{row['minutes']:.1f}"
        accuracies = f"{row['20-NN']:.1f} | {row['1-NN']:.1f} | {row['rank']:.0f}"
        lines.append(f"| {row['title']} | {accuracies} | {seen} | {minutes} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="cifar10", help="images of one size, with labels")
    parser.add_argument("--epochs", type=int, default=6, help="epochs of the recipe [6]")
    parser.add_argument("--out", type=Path, default=Path("runs/equal-time"))
    parser.add_argument("--processes", type=int, default=2, help="runs side by side [2]")
    parser.add_argument("--only", nargs="*", help="some of the rows")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        waiting = []
        for title, config in configurations().items():
            name = "".join(letter if letter.isalnum() else "-" for letter in title)
            if (options.out / f"{name}.json").exists() or title not in (options.only or [title]):
                continue
            config = config.with_overrides({"data.source": options.data})
            waiting.append(pool.submit(run, title, config, options.out, options.epochs))
        for each in waiting:
            each.result()
    rows = [json.loads(path.read_text()) for path in sorted(options.out.glob("*.json"))]
    first = next((row["starts"] for row in rows if "starts" in row), {})
    rows += [{"title": title, **metrics} for title, metrics in first.items()]
    print(table(rows))


if __name__ == "__main__":
    main()
