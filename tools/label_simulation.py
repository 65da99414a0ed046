"""Accuracy after few labels: those that the live page proposes against random ones.

    python tools/label_simulation.py runs/photos runs/cifar10 --out evaluations/labels

A simulated person gives each proposed image its true label, batch by batch, as on the page: the
training images are proposed, and the probe is tested on the test images. The mean and the std are
over three seeds, of the clusters or of the random choice.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from meanshift.evaluation.context import EvaluationContext
from meanshift.evaluation.label_probe import Probe, fit_probe
from meanshift.evaluation.linear_probe import Standardize
from meanshift.models.weights import load_weights
from meanshift.ops.active_learning import BATCH, propose
from meanshift.runtime import rng

COUNTS = (10, 30, 100)
SEEDS = (0, 1, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", help="as `meanshift evaluate` takes them")
    parser.add_argument("--out", type=Path, help="folder for the features [those of the runs]")
    args = parser.parse_args()
    print("| run | images | labels | proposed | random |\n| --- | --- | --- | --- | --- |")
    for run in args.runs:
        out = None if args.out is None else args.out / Path(run).name
        context = EvaluationContext(load_weights(run), output_dir=out)
        proposed, random = (
            [simulate(context, seed, proposes=proposes) for seed in SEEDS]
            for proposes in (True, False)
        )
        for i, count in enumerate(COUNTS):
            cells = (summary([trial[i] for trial in trials]) for trials in (proposed, random))
            row = [run, f"{len(context.train.labels):,}", str(count), *cells]
            print(f"| {' | '.join(row)} |", flush=True)


def simulate(context: EvaluationContext, seed: int, *, proposes: bool) -> list[float]:
    """The accuracy on the test images in percent after each number of labels."""
    features = context.train.features
    standardize = Standardize(features)
    labeled = torch.zeros(len(features), dtype=torch.bool)
    order = torch.empty(0, dtype=torch.int64)
    random_order = rng.permutation(seed, 0, len(features))
    probabilities = None
    accuracies = []
    while len(order) < max(COUNTS):
        if proposes:
            chosen = propose(features, labeled, probabilities, seed=seed)
        else:
            chosen = random_order[len(order) : len(order) + BATCH]
        order = torch.cat([order, chosen])
        labeled[chosen] = True
        classes, numbers = context.train.labels[order].unique(return_inverse=True)
        if len(classes) > 1:
            probe = fit_probe(features[order], numbers, standardize, classes=len(classes))
            probabilities = probe.probabilities(features)
        if len(order) in COUNTS:
            accuracies.append(accuracy(context, probe, classes))
    return accuracies


def accuracy(context: EvaluationContext, probe: Probe, classes: Tensor) -> float:
    """Percent of the test images whose class is predicted; a class without labels never is."""
    predicted = classes[probe.probabilities(context.test.features).argmax(1)]
    return 100 * float((predicted == context.test.labels).double().mean())


def summary(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}"


if __name__ == "__main__":
    main()
