"""`meanshift figures`: the paper's figures of one or more runs."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from meanshift.cli.arguments import add_bands
from meanshift.config.parsing import need
from meanshift.viz.figures import NAMES

HELP = "the paper's figures of one or more runs, as PNG, PDF and SVG, with captions"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run directories")
    parser.add_argument("--data", metavar="SOURCE", help="where their images are now")
    add_bands(parser)
    parser.add_argument(
        "--only",
        nargs="+",
        choices=NAMES,
        default=NAMES,
        metavar="NAME",
        help=f"some of {', '.join(NAMES)} [all]",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="[RUN/figures; of several runs, figures-NAMES beside them]",
    )
    parser.add_argument("--rows", type=int, default=0, help="rows of neighbors, clusters, views")
    parser.add_argument(
        "--columns", type=int, default=0, help="images per row of neighbors, clusters"
    )
    parser.add_argument(
        "--epochs", type=int, nargs="+", default=[], metavar="E", help="of neighbors, tsne, views"
    )
    parser.add_argument("--seed", type=int, default=0, help="which images are drawn [0]")


def run(args: argparse.Namespace) -> int:
    from meanshift.viz.figures import Options, draw_figures
    from meanshift.viz.run_reader import common_parent, group_name, open_runs

    for name in ("rows", "columns"):
        value = getattr(args, name)
        need(0 <= value <= 1000, f"--{name}", value, "1 to 1000")
    need(0 <= args.seed < 2**63, "--seed", args.seed, "0 up to below 2^63")
    runs = open_runs(args.runs, data=args.data, bands=args.bands)
    out: Path | None = args.out
    if out is not None and out.exists() and not out.is_dir():
        raise ValueError(f"--out: {out} is a file; need a folder for the figures")
    if out is None:
        out = runs[0].folder / "figures"
        if len(runs) > 1:
            parent = Path(os.path.relpath(common_parent(args.runs)))
            out = parent / f"figures-{group_name(runs)}"
    options = Options(
        rows=args.rows, columns=args.columns, epochs=tuple(args.epochs), seed=args.seed
    )
    drawn = 0
    for outcome in draw_figures(runs, out, names=args.only, options=options):
        for file in outcome.files:
            print(file)
        if outcome.missing:
            print(f"{outcome.name}: not drawn: {outcome.missing}", file=sys.stderr)
        drawn += bool(outcome.files)
    return 0 if drawn else 2
