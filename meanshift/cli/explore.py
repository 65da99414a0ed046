"""`meanshift explore`: the live page of a run."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from meanshift.cli.arguments import add_bands

HELP = "the live page: map, neighbors, search, outliers"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_directory", type=Path, metavar="RUN", help="may still be training")
    parser.add_argument("--data", metavar="SOURCE", help="where its images are now")
    add_bands(parser)
    parser.add_argument("--metadata", type=Path, metavar="CSV", help="file,column,... to color by")
    parser.add_argument(
        "--index", type=Path, metavar="INDEX", help="search the images of this index too"
    )
    parser.add_argument("--host", default="127.0.0.1", help="[127.0.0.1]; others need a token")
    parser.add_argument("--port", type=int, help="[8800, or the next that is free]")
    parser.add_argument("--no-browser", action="store_true", help="only print the address")


def run(args: argparse.Namespace) -> int:
    print(f"opening {args.run_directory} ...", file=sys.stderr, flush=True)
    from meanshift.viz.explorer.server import serve

    serve(
        args.run_directory,
        host=args.host,
        port=args.port,
        browser=not args.no_browser,
        data=args.data,
        metadata=args.metadata,
        bands=args.bands,
        index=args.index,
    )
    return 0
