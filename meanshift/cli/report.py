"""`meanshift report`: one self-contained page about one or more runs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from meanshift.cli.arguments import add_bands

HELP = "one self-contained HTML page about one or more runs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run directories")
    parser.add_argument("--data", metavar="SOURCE", help="where their images are now")
    add_bands(parser)
    parser.add_argument("--out", type=Path, metavar="FILE", help="[RUN/report.html]")


def run(args: argparse.Namespace) -> int:
    from meanshift.viz.report.page import default_path, write_report
    from meanshift.viz.run_reader import MissingData, open_runs

    if args.out is not None and args.out.is_dir():
        raise ValueError(f"--out: {args.out} is a folder; need a file, as {args.out}/report.html")
    runs = open_runs(args.runs, data=args.data, bands=args.bands)
    for each in runs:
        try:
            _ = each.source
        except MissingData as missing:
            print(f"warning: {missing}", file=sys.stderr)
    page = write_report(runs, args.out or default_path(runs))
    print(f"report: {page} ({page.stat().st_size / 1e6:.1f} MB, one file, opens without a network)")
    return 0
