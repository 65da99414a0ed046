"""`meanshift pack`: images decoded and shrunk once, into a directory to train from faster."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from meanshift.cli.arguments import SOURCE
from meanshift.config.parsing import need

HELP = "decode and shrink images once, into a directory to train from faster"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SOURCE", help=SOURCE)
    parser.add_argument("out", type=Path, metavar="OUT", help="new directory, then itself a SOURCE")
    parser.add_argument(
        "--side",
        type=int,
        default=256,
        help="most pixels of the short side; no image is enlarged [256]",
    )
    parser.add_argument("--workers", type=int, default=0, help="processes that decode files [0]")


def run(args: argparse.Namespace) -> int:
    need(args.side >= 1, "--side", args.side, "1 pixel or more")
    need(args.workers >= 0, "--workers", args.workers, "0 or more")
    out: Path = args.out.expanduser()
    root = Path(args.source).expanduser()
    is_folder = root.is_dir() and args.source != "sample"
    if is_folder and out.resolve().is_relative_to(root.resolve()):
        raise ValueError(
            f"{out}: lies inside {root}, whose images are to be packed; need a directory outside "
            f"of it, as {root.resolve()}-packed"
        )
    from meanshift.data import open_source
    from meanshift.data.packed import is_finished, pack

    was_finished = is_finished(out)
    splits = pack(
        open_source(args.source), out, name=args.source, side=args.side, workers=args.workers
    ).values()
    images = sum(map(len, splits))
    size = sum(len(split.pixels) for split in splits)
    unreadable = sum(len(split.bad) for split in splits)
    print(
        f"{out}: {'was finished: ' if was_finished else ''}{images} images, {size:,} bytes, "
        f"{unreadable} unreadable\n"
        f"train on it with: meanshift pretrain small --data {shlex.quote(str(out))} --out runs/x"
    )
    return 0
