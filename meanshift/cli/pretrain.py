"""`meanshift pretrain`: train, or continue a run that was stopped."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from meanshift.cli.arguments import SOURCE
from meanshift.cli.output import print_result, print_status, rank, world_size
from meanshift.cli.settings import configure, prescan_base_config
from meanshift.config import Config
from meanshift.config.recipes import RECIPES

if TYPE_CHECKING:
    from meanshift.data import Source
    from meanshift.evaluation.knn import KNNMonitor
    from meanshift.training.session import MakeMonitor

PIXEL_IMAGES = {True: 20_000, False: 4_000}
"""images up to which raw pixels are evaluated after training, in seconds: arrays, and files"""
HELP = "train; the same command continues a run that was stopped"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", nargs="?", metavar="RECIPE", help=f"one of {', '.join(RECIPES)}")
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="a whole configuration instead of a recipe, such as RUN/config.json; flags win",
    )
    parser.add_argument("--data", metavar="SOURCE", help=SOURCE)
    parser.add_argument("--out", type=Path, required=True, metavar="RUN", help="run directory")
    parser.set_defaults(several_processes=True)
    parser.epilog = (
        "The settings above are those of one method. To see those of another one, name it: "
        "meanshift pretrain small --method.name byol-asym --help"
    )


def base_config(argv: Sequence[str]) -> Config:
    return prescan_base_config(argv)


def run(args: argparse.Namespace) -> int:
    monitors: list[KNNMonitor | None] = []
    labeled: list[bool] = []

    def make_monitor(config: Config, train: Source, validation: Source | None) -> KNNMonitor | None:
        monitors.append(make_knn_monitor(config, train, validation))
        labeled.append(train.labeled)
        return monitors[-1]

    train(configure(args), args.out, make_monitor)
    if rank() == 0:
        print(describe_result(args.out, monitors[-1], labeled=labeled[-1]))
    return 0


def describe_result(out: Path, monitor: KNNMonitor | None, *, labeled: bool) -> str:
    """What a finished training has achieved: its k-NN beside that of its start and raw pixels."""
    from meanshift.evaluation.verdict import Training, of_monitor, without_accuracy

    training = Training.read(out, images=0 if monitor is None else monitor.tested)
    if monitor is None or not training.monitored:
        return without_accuracy(training, labeled=labeled).text
    baselines = {}
    few = len(monitor.train) + len(monitor.validation) <= PIXEL_IMAGES[monitor.train.uniform]
    if few and world_size() == 1:  # the processes of a group have parted after training
        name = "raw pixels" if monitor.train.kind == "image" else "raw values"
        baselines[name] = monitor.raw_pixels()
    found = of_monitor(training, newest=monitor.newest, first=monitor.first, baselines=baselines)
    assert found is not None
    return found.text


def train(config: Config, out: Path, make_monitor: MakeMonitor) -> None:
    """Train in this process; raises `Stopped` if a signal stopped the run."""
    from meanshift.training.loop import pretrain

    if note := describe_few_epochs(config):
        print_status(note)
    folder = pretrain(config, out, make_monitor=make_monitor)
    print_result(f"finished: {folder}")


def describe_few_epochs(config: Config) -> str:
    """The value of a growing k in each epoch, if there are too few epochs for all of its values."""
    from meanshift.methods.schedules import stepwise

    method = config.method
    epochs = config.train.epochs
    if getattr(method, "k_schedule", "constant") != "linear":
        return ""
    first, last = getattr(method, "k_start", 1), getattr(method, "k", 1)
    if epochs > last - first:
        return ""
    values = ", ".join(str(stepwise(first, last, epoch, epochs)) for epoch in range(epochs))
    return (
        f"k grows from {first} to {last}, which takes {last - first + 1} epochs for every value; "
        f"with --train.epochs {epochs} it will be {values}"
    )


def make_knn_monitor(
    config: Config, train: Source, validation: Source | None, *, keep_features: bool = False
) -> KNNMonitor | None:
    """k-NN on the validation images; the training loop itself imports no evaluation."""
    from meanshift.data import describe_splits
    from meanshift.evaluation.knn import KNNMonitor

    counts = describe_splits({"train": train, "validation": validation})
    if validation is None or not train.labeled or not validation.labeled:
        missing = f"no validation {train.kind}s"
        reason = missing if validation is None and train.labeled else "no labels"
        print_status(f"{train.name}: {counts}; {reason}: no k-NN while training")
        return None
    print_status(f"{train.name}: {counts}; k-NN on the validation {train.kind}s while training")
    return KNNMonitor(
        train,
        validation,
        image_size=config.data.image_size,
        workers=config.data.workers,
        keep_features=keep_features,
    )
