"""`meanshift pack`."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from meanshift.config.parsing import need

if TYPE_CHECKING:
    from meanshift.cli import Command


def add(command: Command) -> None:
    pack = command(
        "pack", _pack, "decode and shrink images once, into a directory to train from faster"
    )
    pack.add_argument(
        "source",
        metavar="SOURCE",
        help="folder, .npz or .npy file, tar shards, hf:NAME, named dataset, or sample",
    )
    pack.add_argument("out", type=Path, metavar="OUT", help="new directory; it is a SOURCE then")
    pack.add_argument(
        "--side", type=int, default=256, help="most pixels of a short side, never enlarged [256]"
    )
    pack.add_argument("--workers", type=int, default=0, help="processes that decode files [0]")


def _pack(given: argparse.Namespace) -> int:
    need(given.side >= 1, "--side", given.side, "1 pixel or more")
    need(given.workers >= 0, "--workers", given.workers, "0 or more")
    out, root = given.out.expanduser(), Path(given.source).expanduser()
    folder = root.is_dir() and given.source != "sample"
    if folder and out.resolve().is_relative_to(root.resolve()):
        raise ValueError(
            f"{out}: lies inside {root}, whose images are to be packed; need a directory outside "
            f"of it, as {root.resolve()}-packed"
        )
    from meanshift.data import open_source
    from meanshift.data.packed import is_finished, pack

    finished = is_finished(out)
    sources = open_source(given.source)
    store = pack(sources, out, name=given.source, side=given.side, workers=given.workers).values()
    images, pixels = sum(map(len, store)), sum(len(source.pixels) for source in store)
    bad = sum(len(source.bad) for source in store)
    print(
        f"{out}: {'was finished: ' if finished else ''}{images} images, {pixels:,} bytes, "
        f"{bad} unreadable\n"
        f"train on it with: meanshift pretrain small --data {shlex.quote(str(out))} --out runs/x"
    )
    return 0
