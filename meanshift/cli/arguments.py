"""Arguments that several commands share: what names images and weights, and how images are read."""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

SOURCE = "folder, .npz or .npy file, tar shards, hf:NAME, named dataset, or sample"
WEIGHTS = (
    "run directory, checkpoint, any program's file of weights, torchvision:NAME, meanshift:NAME, "
    "untrained:RUN, random:RUN, pixels"
)


def add_reading_arguments(parser: argparse.ArgumentParser) -> None:
    """How images are read and features are computed."""
    parser.add_argument(
        "--labels", type=Path, metavar="CSV", help="columns file,label, for a flat folder"
    )
    parser.add_argument(
        "--image-size", type=int, default=0, help="side in pixels [that of the weights]"
    )
    parser.add_argument(
        "--resize", type=int, default=0, help="short side before the crop [256/224 of the size]"
    )
    parser.add_argument("--workers", type=int, default=0, help="processes that decode files [0]")
    parser.add_argument("--device", default="auto", help="[auto]")
    parser.add_argument(
        "--precision", choices=["float32", "bfloat16", "auto"], default="float32", help="[float32]"
    )


def reading_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of `add_reading_arguments` that an encoder takes, on this process's device."""
    from meanshift.runtime.device import pick_device
    from meanshift.runtime.distributed import local_device

    names = ("image_size", "resize", "workers", "precision")
    options = {name: getattr(args, name) for name in names}
    return options | {"device": str(local_device(pick_device(args.device)))}


def output_dir(args: argparse.Namespace, spec: str, specs: Collection[str]) -> Path | None:
    """Where the results of weights are written: `--out`, or a folder in it for each of several."""
    out: Path | None = args.out
    if out is None or len(specs) == 1:
        return out
    return out / re.sub(r"[^\w.-]+", "-", spec.strip("/"))
