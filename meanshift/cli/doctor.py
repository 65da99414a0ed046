"""`meanshift doctor`: look at data and machine before training, and advise a run."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from meanshift.cli.arguments import SOURCE
from meanshift.cli.output import print_result, print_status
from meanshift.cli.settings import prescan_base_config, typed_settings
from meanshift.config import Config
from meanshift.config.recipes import RECIPES

HELP = "look at data and machine before training: what is there, what is broken, what to type"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SOURCE", help=SOURCE)
    parser.add_argument(
        "recipe", nargs="?", metavar="RECIPE", help=f"[the one that suits]: {', '.join(RECIPES)}"
    )
    parser.add_argument(
        "--samples", type=int, default=0, metavar="N", help="samples to look at [some seconds']"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a page")
    parser.add_argument("--png", type=Path, metavar="FILE", help="also draw views of some samples")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.epilog = "The exit code is 1 where something would spoil a run."


def base_config(argv: Sequence[str]) -> Config:
    words = [word for word in argv if word != "--json"]
    options = ("--samples", "--html", "--png")
    return prescan_base_config(words, positionals=("source", "recipe"), options=options)


def run(args: argparse.Namespace) -> int:
    from meanshift.doctor import diagnose
    from meanshift.doctor.page import text, write_page, write_sheet
    from meanshift.runtime.extras import require

    for path in (args.html, args.png):
        if path is not None:
            require("jinja2", extra="report", what="pages")  # reported now, not after the trial
            require("matplotlib", extra="report", what="figures")
        if path is not None and path.is_dir():
            raise ValueError(f"{path}: is a folder; need a file, as {path}/doctor{path.suffix}")
    if args.samples < 0:
        raise ValueError(f"--samples: got {args.samples}, need 1 or more")
    diagnosis = diagnose(
        args.source,
        recipe_name=args.recipe or "",
        settings=typed_settings(args),
        samples=args.samples,
    )
    answer = json.dumps(diagnosis.to_dict(), indent=2) if args.json else text(diagnosis)
    print_result(answer.encode("utf-8", "replace").decode())  # file names may be any bytes
    if args.html is not None:
        write_page(diagnosis, args.html)
        print_status(f"page: {args.html}")
    if args.png is not None and diagnosis.trial is not None:
        print_status(f"views: {write_sheet(diagnosis.trial.sheet, args.png)}")
    if args.html is None and args.png is None and not args.json and diagnosis.trial is not None:
        print_status("the views of some of your samples: add --html doctor.html")
    return diagnosis.exit_code
