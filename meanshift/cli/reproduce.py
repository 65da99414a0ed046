"""`meanshift reproduce`: the paper's tables and ablations at a chosen scale."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from meanshift.cli.arguments import SOURCE
from meanshift.cli.settings import typed_settings
from meanshift.config import Config
from meanshift.reproduce.scales import SCALES, find_scale
from meanshift.reproduce.studies import STUDIES
from meanshift.runtime.extras import require_report

if TYPE_CHECKING:
    from meanshift.reproduce.experiment import Experiment

HELP = "the paper's tables and ablations, beside the paper's own metrics"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "names", nargs="+", metavar="NAME", help=f"one or more of {', '.join(STUDIES)}; or all"
    )
    parser.add_argument(
        "--scale",
        default="",
        help=f"one of {', '.join(SCALES)} (docs/results.md) [small with --data, else cpu]",
    )
    parser.add_argument(
        "--data",
        metavar="SOURCE",
        help=f"other images, to see which variant is best on them: {SOURCE}",
    )
    parser.add_argument("--seeds", type=int, default=2, help="runs per variant [2]")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="VARIANT",
        help="train only these rows of the tables now, such as 'MSF w/s' [all]",
    )
    parser.add_argument(
        "--devices",
        nargs="+",
        default=[],
        metavar="DEVICE",
        help="runs side by side, one on each: cuda:0 cuda:1, or cpu cpu [one after another]",
    )
    parser.add_argument(
        "--equal-epochs",
        action="store_true",
        help="give every method of main the same epochs [the same cost: fewer where a step costs "
        "more]",
    )
    parser.add_argument(
        "--teacher",
        default="",
        metavar="WEIGHTS",
        help="what CompRess of main distills, as evaluate takes it [the scale's]",
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="runs, tables and page [runs/reproduce-SCALE]"
    )
    parser.add_argument(
        "--archive",
        type=Path,
        metavar="DIR",
        help="finished runs without their weights: those found there are not trained, new ones are "
        "added; `none` for none [scales cpu, cpu-paper and small: docs/reproduced/SCALE-DATA, "
        "where docs/reproduced exists]",
    )
    parser.add_argument(
        "--plan", action="store_true", help="only print the commands that would be run"
    )
    parser.add_argument(
        "--tables", action="store_true", help="train nothing: only write tables of finished runs"
    )


def base_config(argv: Sequence[str]) -> Config:
    scanner = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for option in ("--scale", "--data"):
        scanner.add_argument(option, nargs="?")
    scanned = scanner.parse_known_args(argv)[0]
    return find_scale(_scale_name(scanned.scale, scanned.data)).config


def _scale_name(typed: str | None, data: str | None) -> str:
    """The typed scale; for the user's own images the one that is made for a folder of them."""
    return typed or ("small" if data else "cpu")


def _archive(typed: Path | None, experiment: Experiment) -> Path | None:
    """The folder of finished runs; None if none was typed and the scale has none here."""
    from meanshift.reproduce.archive import folder_name

    if typed is not None:
        return None if str(typed) == "none" else typed
    root = Path(experiment.scale.archive)
    if not experiment.scale.archive or not root.is_dir():
        return None
    return root / folder_name(experiment.name, experiment.config.data.source)


def run(args: argparse.Namespace) -> int:
    from meanshift.reproduce.experiment import Experiment
    from meanshift.reproduce.reproduction import Reproduction
    from meanshift.runtime.device import pick_device
    from meanshift.runtime.signals import Stopped

    names = list(STUDIES) if "all" in args.names else args.names
    scale = _scale_name(args.scale, args.data)
    device = {"train.device": args.devices[0]} if args.devices else {}
    experiment = Experiment.open(
        scale,
        data=args.data,
        overrides=typed_settings(args) | device,
        equal_epochs=args.equal_epochs,
        teacher=args.teacher,
    )
    devices = args.devices or [experiment.config.train.device]
    for each in devices:  # reported now, not after minutes
        pick_device(each)
    out = args.out or Path("runs") / f"reproduce-{scale}"
    archive = _archive(args.archive, experiment)
    reproduction = Reproduction(names, experiment, out, args.seeds, archive)
    if args.plan:
        print("\n".join(reproduction.plan()))
        return 0
    require_report()  # reported now, not after the runs
    jobs = reproduction.jobs
    print(
        f"{experiment.config.data.source}: {len(jobs)} runs at scale {scale} "
        f"({experiment.scale.description}), "
        f"{sum(job.trained for job in jobs)} of them trained already: {out}/runs"
        + (f", finished ones also in {archive}" if archive else ""),
        file=sys.stderr,
    )
    try:
        failed = [] if args.tables else reproduction.run(devices, only=args.only)
    except Stopped as stopped:
        reproduction.write()
        print("meanshift: stopped and saved; the same command continues", file=sys.stderr)
        return stopped.code
    page = reproduction.write()
    if archive is not None and args.archive is None:
        document = Path(experiment.scale.document)
        if document.is_file() and (updated := reproduction.publish(document)):
            print(f"{document}: updated {', '.join(updated)}", file=sys.stderr)
    for result in reproduction.results():
        print(result.markdown())
    print(f"page: {page} (with .md, .csv and images beside it)")
    for job in failed:
        print(f"failed: {job.title}: {job.failure}", file=sys.stderr)
    return 1 if failed else 0
