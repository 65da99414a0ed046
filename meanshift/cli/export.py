"""`meanshift export`: the backbone of a run as a file for other programs."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "the backbone of a run as a file for other programs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("weights", metavar="RUN", help="run directory or one of its checkpoints")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help=".safetensors, .pt or .pth"
    )


def run(args: argparse.Namespace) -> int:
    from meanshift.models.weights import export, load_weights

    print(f"exported: {export(load_weights(args.weights), args.out)}")
    return 0
