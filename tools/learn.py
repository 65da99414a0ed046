"""What the recipe `demo` learns in a fixed number of CPU seconds: `make learn`.

One epoch is timed first, and each run then has as many epochs as fit into the seconds: a program
that becomes slower or learns worse ends below the floors, and the command fails. Every run takes
one thread in float32; two runs at a time, each with a seed of its own.

    python tools/learn.py --seconds 180 --seeds 3
"""

from __future__ import annotations

import argparse
import io
import os
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing import get_context
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

FLOORS = {"20-NN": 54.0, "1-NN": 47.0}
"""mean accuracies in % on the validation images that the recipe must reach"""
GAINS = {"20-NN": 1.5, "1-NN": 2.0}
"""points by which training must exceed the start, which alone is above the floors"""

Accuracies = dict[str, float]


def train(epochs: int, seed: int) -> tuple[float, dict[str, Accuracies]]:
    """Train the demo; return its CPU seconds and the accuracies of its starts and its end."""
    import torch

    from meanshift.config.recipes import recipe
    from meanshift.evaluation import knn
    from meanshift.evaluation.context import EvaluationContext
    from meanshift.models.weights import load_weights, starts
    from meanshift.training.loop import pretrain

    torch.set_num_threads(1)
    config = recipe("demo").with_overrides(
        {"train.epochs": epochs, "train.seed": seed, "train.precision": "float32"}
    )
    with tempfile.TemporaryDirectory() as folder:
        begin = time.process_time()
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            pretrain(config, Path(folder))
        seconds = time.process_time() - begin
        specs = {**starts(Path(folder)), "trained": folder}
        return seconds, {
            title: knn.evaluate(
                EvaluationContext(load_weights(spec), "sample", device="cpu")
            ).metrics
            for title, spec in specs.items()
        }


def seconds_per_epoch() -> float:
    """The CPU seconds that one more epoch costs."""
    return max(train(2, 0)[0] - train(1, 0)[0], 1e-3)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=180, help="CPU seconds per run [180]")
    parser.add_argument("--seeds", type=int, default=3, help="number of runs [3]")
    options = parser.parse_args()
    epochs = max(1, int(options.seconds / seconds_per_epoch()))
    print(f"{epochs} epochs fit into {options.seconds:.0f} CPU seconds", flush=True)
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        runs = [pool.submit(train, epochs, seed) for seed in range(options.seeds)]
        results = [run.result() for run in runs]
    means: dict[tuple[str, str], float] = {}
    for title in results[0][1]:
        for name in FLOORS:
            values = [accuracies[title][name] for _, accuracies in results]
            means[title, name] = statistics.mean(values)
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            print(f"{title}: {name} {means[title, name]:.1f} +- {spread:.1f}")
    print(f"CPU seconds: {', '.join(f'{seconds:.0f}' for seconds, _ in results)}")
    failures = [
        f"{name} {means['trained', name]:.1f} is below {needed:.1f}"
        for name, floor in FLOORS.items()
        if means["trained", name] < (needed := max(floor, means["PCA start", name] + GAINS[name]))
    ]
    print("; ".join(failures) or "passed")
    return int(bool(failures))


if __name__ == "__main__":
    raise SystemExit(main())
