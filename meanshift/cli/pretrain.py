"""`meanshift pretrain`: train, or continue a run that was stopped."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from meanshift.cli.arguments import SOURCE
from meanshift.cli.output import print_result, print_status
from meanshift.cli.settings import configure, prescan_base_config
from meanshift.config import Config
from meanshift.config.recipes import RECIPES

if TYPE_CHECKING:
    from meanshift.data import Source
    from meanshift.training.session import MakeMonitor, Monitor

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
    return train(configure(args), args.out, make_knn_monitor)


def train(config: Config, out: Path, make_monitor: MakeMonitor) -> int:
    """Train in this process; the exit code says whether a signal stopped the run."""
    from meanshift.runtime.signals import Stopped
    from meanshift.training.loop import pretrain

    try:
        folder = pretrain(config, out, make_monitor=make_monitor)
    except Stopped as stopped:
        print_status(f"meanshift: {stopped}")
        return stopped.code
    print_result(f"finished: {folder}")
    return 0


def make_knn_monitor(config: Config, train: Source, validation: Source | None) -> Monitor | None:
    """k-NN on the validation images; the training loop itself imports no evaluation."""
    from meanshift.evaluation.knn import KNNMonitor

    if validation is None or not train.labeled or not validation.labeled:
        reason = "no validation images" if validation is None and train.labeled else "no labels"
        print_status(f"{train.name}: {len(train)} images, {reason}: no k-NN while training")
        return None
    print_status(
        f"{train.name}: {len(train)} training images, {len(validation)} validation images for "
        f"k-NN, {len(train.classes)} classes"
    )
    return KNNMonitor(
        train, validation, image_size=config.data.image_size, workers=config.data.workers
    )
