"""How images are read and where results go: what the judging commands share."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any


def add_reading(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--labels", type=Path, metavar="CSV", help="file,label for a flat folder")
    parser.add_argument("--image-size", type=int, default=0, help="side in pixels [the weights']")
    parser.add_argument(
        "--resize", type=int, default=0, help="short side before the crop [256/224 of the size]"
    )
    parser.add_argument("--workers", type=int, default=0, help="processes that decode files [0]")
    parser.add_argument("--device", default="auto", help="[auto]")
    parser.add_argument(
        "--precision", choices=["float32", "bfloat16", "auto"], default="float32", help="[float32]"
    )


def reading(given: argparse.Namespace) -> dict[str, Any]:
    names = ("image_size", "resize", "workers", "device", "precision")
    return {name: getattr(given, name) for name in names}


def home_of(given: argparse.Namespace, spec: str, specs: list[str]) -> Path | None:
    """Where results go: `--out`, of several weights a folder each in it."""
    out: Path | None = given.out
    if out is None or len(specs) == 1:
        return out
    return out / re.sub(r"[^\w.-]+", "-", spec.strip("/"))
