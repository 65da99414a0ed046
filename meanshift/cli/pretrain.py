"""`meanshift demo` and `meanshift pretrain`."""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from meanshift.cli.settings import add_settings, configure
from meanshift.cli.speaking import say
from meanshift.config import Config
from meanshift.config.recipes import RECIPES, recipe

if TYPE_CHECKING:
    from meanshift.cli import Command
    from meanshift.data import Source
    from meanshift.training.session import Monitor


def add(command: Command) -> None:
    demo = command(
        "demo", _demo, "the whole path on shipped images: train, judge, draw the report page"
    )
    demo.add_argument(
        "--out", type=Path, default=Path("runs/demo"), metavar="RUN", help="run directory"
    )
    add_settings(demo)

    pretrain = command(
        "pretrain", _pretrain, "train; the same command continues a run that was stopped"
    )
    pretrain.set_defaults(processes=True)
    pretrain.add_argument("recipe", metavar="RECIPE", help=f"one of {', '.join(RECIPES)}")
    pretrain.add_argument(
        "--data",
        metavar="SOURCE",
        help="folder, .npz or .npy file, tar shards, hf:NAME, named dataset, or sample",
    )
    pretrain.add_argument("--out", type=Path, required=True, metavar="RUN", help="run directory")
    add_settings(pretrain)


def _pretrain(given: argparse.Namespace) -> int:
    config = configure(given, recipe(given.recipe))
    return _train(config, given.out)


def _train(config: Config, out: Path) -> int:
    from meanshift.runtime.signals import Stopped
    from meanshift.training.loop import pretrain

    try:
        run = pretrain(config, out, monitor=_monitor)
    except Stopped as stopped:
        say(f"meanshift: {stopped}")
        return stopped.code
    say(f"finished: {run}", result=True)
    return 0


def _monitor(config: Config, train: Source, validation: Source | None) -> Monitor | None:
    """k-NN on the validation images, for the loop, which knows no evaluation."""
    from meanshift.evaluation.knn import KNNMonitor

    if validation is None or not train.labeled or not validation.labeled:
        why = "no validation images" if validation is None and train.labeled else "no labels"
        say(f"{train.name}: {len(train)} images, {why}: no k-NN while training")
        return None
    say(
        f"{train.name}: {len(train)} training images, {len(validation)} validation images for "
        f"k-NN, {len(train.classes)} classes"
    )
    return KNNMonitor(train, validation, image_size=config.data.image_size)


def _demo(given: argparse.Namespace) -> int:
    from meanshift.data import train_and_validation
    from meanshift.evaluation import cluster, knn
    from meanshift.evaluation.context import EvaluationContext
    from meanshift.models.weights import load_weights
    from meanshift.training.console import table
    from meanshift.viz.report.page import write_report
    from meanshift.viz.run_reader import Run

    config = configure(given, recipe("demo"))
    train, held = train_and_validation(
        config.data.source, config.data.validation, seed=config.train.seed
    )
    if held is None or not (train.uniform and train.labeled and held.labeled):
        raise ValueError(f"{config.data.source}: need labeled arrays with a held-out part")
    code = _train(config, given.out)
    if code:
        return code
    figures = dict[str, dict[str, float]]()
    for title, spec in {
        "raw pixels": "pixels",
        "untrained encoder": f"untrained:{given.out}",
        "after Mean Shift training": str(given.out),
    }.items():
        weights = load_weights(spec)
        subject = EvaluationContext(
            replace(weights, name="pixels") if spec == "pixels" else weights,
            config.data.source,
            device=config.train.device,
            image_size=config.data.image_size,
            home=given.out,
        )
        result = knn.evaluate(subject)
        subject.save(result)
        figures[title] = result.figures
    subject.save(cluster.evaluate(subject))
    print(f"\nheld-out images, accuracy in %\n{table(figures)}\n\ndrawing the report ...")
    page = write_report([Run(given.out)], given.out / "report.html")
    program = sys.argv[0] if Path(sys.argv[0]).name == "meanshift" else "meanshift"
    walk = f"{program} explore {shlex.quote(str(given.out))}"
    print(f"open {page.resolve()}\nor walk through the run with: {walk}")
    return 0
