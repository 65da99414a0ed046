"""`meanshift demo`: the whole path on images shipped inside the package."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from meanshift.cli.output import print_status
from meanshift.cli.pretrain import make_knn_monitor, train
from meanshift.cli.settings import configure, prescan_base_config
from meanshift.config import Config
from meanshift.runtime.extras import require_report

if TYPE_CHECKING:
    from meanshift.data import Source
    from meanshift.evaluation.knn import KNNMonitor

HELP = "the whole path on shipped images: train, evaluate, draw the report page"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", type=Path, default=Path("runs/demo"), metavar="RUN", help="[runs/demo]"
    )
    parser.set_defaults(recipe="demo", config=None)


def base_config(argv: Sequence[str]) -> Config:
    return prescan_base_config(["demo", *argv])


def run(args: argparse.Namespace) -> int:
    report = _can_report()
    config = configure(args)
    monitors: list[KNNMonitor] = []

    def make_monitor(config: Config, train: Source, validation: Source | None) -> KNNMonitor:
        monitors.append(_make_monitor(config, train, validation))
        return monitors[-1]

    train(config, args.out, make_monitor)
    _store_features(monitors[-1], args.out)
    print(f"\nvalidation images, accuracy in %\n{_evaluate(config, args.out, clusters=report)}\n")
    if report:
        print("drawing the report ...")
        _write_report(args.out)
    return 0


def _can_report() -> bool:
    """Whether the packages of the report are installed; if not, it is said before the training."""
    try:
        require_report()
    except ValueError as error:
        print_status(f"{error}; this demo trains and evaluates, without a report")
        return False
    return True


def _make_monitor(config: Config, train: Source, validation: Source | None) -> KNNMonitor:
    if validation is None or not (train.uniform and train.labeled and validation.labeled):
        raise ValueError(
            f"{config.data.source}: the demo needs labeled arrays with validation images; use "
            f"meanshift pretrain for other images"
        )
    monitor = make_knn_monitor(config, train, validation, keep_features=True)
    assert monitor is not None  # the images have labels
    return monitor


def _store_features(monitor: KNNMonitor, out: Path) -> None:
    """Write the features of the monitor where the evaluation looks for them."""
    from meanshift.models.feature_cache import store_features

    for weights, parts in monitor.features.items():
        for source, features in zip((monitor.train, monitor.validation), parts, strict=True):
            store_features(
                features,
                source,
                weights=weights,
                folder=out / "features",
                image_size=monitor.image_size,
            )


def _evaluate(config: Config, out: Path, *, clusters: bool) -> str:
    """A table of k-NN accuracies before and after training; clusters for the report."""
    from meanshift.evaluation import cluster, knn
    from meanshift.evaluation.context import EvaluationContext
    from meanshift.models.weights import load_weights, shipped_weights, starts
    from meanshift.runtime.table import table

    compared = {"raw pixels": "pixels", **starts(out)}
    if config.data.source == "sample":  # what the same method gives with more images and time
        compared |= {spec: spec for spec in shipped_weights()}
    columns: dict[str, dict[str, float]] = {}
    for title, spec in {**compared, "after training": str(out)}.items():
        weights = load_weights(spec)
        context = EvaluationContext(
            replace(weights, name="pixels") if spec == "pixels" else weights,
            config.data.source,
            device=config.train.device,
            image_size=config.data.image_size,
            output_dir=out,
        )
        result = knn.evaluate(context)
        context.save(result)
        columns[title] = result.metrics
    if clusters:
        context.save(cluster.evaluate(context))
    return table(columns)


def _write_report(out: Path) -> None:
    from meanshift.viz.report.page import write_report
    from meanshift.viz.report.verdicts import run_verdict
    from meanshift.viz.run_reader import Run

    run = Run(out)
    page = write_report([run], out / "report.html")
    program = sys.argv[0] if Path(sys.argv[0]).name == "meanshift" else "meanshift"
    print(f"open {page.resolve()}")
    print(f"or explore the run with: {program} explore {shlex.quote(str(out))}")
    print(f"\n{run_verdict(run).text}")
