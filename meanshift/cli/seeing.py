"""`meanshift figures`, `meanshift report` and `meanshift explore`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from meanshift.config.parsing import need
from meanshift.viz.figures import NAMES

if TYPE_CHECKING:
    from meanshift.cli import Command


def add(command: Command) -> None:
    figures = command("figures", _figures, "the paper's figures of one or more runs, PNG and SVG")
    _add_runs(figures)
    figures.add_argument(
        "--only", nargs="+", choices=NAMES, default=NAMES, metavar="NAME",
        help=f"some of {', '.join(NAMES)} [all]",
    )  # fmt: skip
    figures.add_argument(
        "--out", type=Path, metavar="DIR", help="[RUN/figures; of several runs, beside them]"
    )
    figures.add_argument("--rows", type=int, default=0, help="neighbors, clusters, views: rows")
    figures.add_argument("--columns", type=int, default=0, help="neighbors, clusters: images a row")
    figures.add_argument(
        "--epochs", type=int, nargs="+", default=[], metavar="E", help="neighbors, tsne, views"
    )
    figures.add_argument("--seed", type=int, default=0, help="which images are drawn [0]")

    report = command("report", _report, "one self-contained HTML page about one or more runs")
    _add_runs(report)
    report.add_argument("--out", type=Path, metavar="FILE", help="[RUN/report.html]")

    explore = command("explore", _explore, "the live page: map, neighbors, search, outliers")
    explore.add_argument("run_directory", type=Path, metavar="RUN", help="may still be training")
    explore.add_argument("--data", metavar="SOURCE", help="where its images lie now")
    explore.add_argument("--metadata", type=Path, metavar="CSV", help="file,column,... to color by")
    explore.add_argument("--host", default="127.0.0.1", help="[127.0.0.1]; others need a token")
    explore.add_argument("--port", type=int, help="[8800, or the next that is free]")
    explore.add_argument("--no-browser", action="store_true", help="only print the address")


def _add_runs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run directories")
    parser.add_argument("--data", metavar="SOURCE", help="where their images lie now")


def _figures(given: argparse.Namespace) -> int:
    from meanshift.viz.figures import Choices, draw_figures
    from meanshift.viz.run_reader import open_runs

    for name in ("rows", "columns"):
        need(0 <= getattr(given, name) <= 1000, f"--{name}", getattr(given, name), "1 to 1000")
    need(0 <= given.seed < 2**63, "--seed", given.seed, "0 up to below 2^63")
    runs = open_runs(given.runs, data=given.data)
    out = given.out
    if out is not None and out.exists() and not out.is_dir():
        raise ValueError(f"--out: {out} is a file; need a folder for the figures")
    if out is None:
        inside = runs[0].folder if len(runs) == 1 else _above(given.runs)
        out = inside / "figures"
    choices = Choices(
        rows=given.rows, columns=given.columns, epochs=tuple(given.epochs), seed=given.seed
    )
    drawn = 0
    for outcome in draw_figures(runs, out, names=given.only, choices=choices):
        for file in outcome.files:
            print(file)
        if outcome.lacks:
            print(f"{outcome.name}: not drawn: {outcome.lacks}", file=sys.stderr)
        drawn += bool(outcome.files)
    return 0 if drawn else 2


def _above(folders: list[Path]) -> Path:
    """The folder that holds all runs."""
    return Path(os.path.relpath(os.path.commonpath([f.resolve().parent for f in folders])))


def _report(given: argparse.Namespace) -> int:
    from meanshift.viz.report.page import page_name, write_report
    from meanshift.viz.run_reader import MissingData, open_runs

    if given.out is not None and given.out.is_dir():
        raise ValueError(f"--out: {given.out} is a folder; need a file, as {given.out}/report.html")
    runs = open_runs(given.runs, data=given.data)
    for run in runs:
        try:
            _ = run.source
        except MissingData as lacking:
            print(f"warning: {lacking}", file=sys.stderr)
    page = write_report(runs, given.out or page_name(runs))
    print(f"report: {page} ({page.stat().st_size / 1e6:.1f} MB, one file, opens without a network)")
    return 0


def _explore(given: argparse.Namespace) -> int:
    print(f"opening {given.run_directory} ...", file=sys.stderr, flush=True)
    from meanshift.viz.explorer import serve

    serve(
        given.run_directory,
        host=given.host,
        port=given.port,
        browser=not given.no_browser,
        data=given.data,
        metadata=given.metadata,
    )
    return 0
