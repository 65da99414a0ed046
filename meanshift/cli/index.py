"""`meanshift index`: index the embeddings of a large collection."""

from __future__ import annotations

import argparse
from pathlib import Path

from meanshift.cli.arguments import SOURCE, WEIGHTS, add_reading_arguments, reading_options
from meanshift.cli.output import print_result, print_status

HELP = "index the embeddings of many images, to search among them"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("weights", metavar="RUN_OR_WEIGHTS", help=WEIGHTS)
    parser.add_argument("source", metavar="SOURCE", help=SOURCE)
    parser.add_argument("--out", type=Path, required=True, metavar="INDEX", help="a new folder")
    parser.add_argument(
        "--memory",
        type=float,
        default=4.0,
        metavar="GB",
        help="that the index may take; many images are compressed to fit [4]",
    )
    parser.add_argument(
        "--kind",
        choices=["auto", "flat", "ivf-sq8", "ivf-pq"],
        default="auto",
        help="exact, 8 bits a dimension, or a product quantizer [by size and --memory]",
    )
    add_reading_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if not 0 < args.memory < float("inf"):
        raise ValueError(f"--memory: got {args.memory:g}, need GB above 0")
    from meanshift.evaluation.index import Index
    from meanshift.models.weights import load_weights

    weights = load_weights(args.weights)
    print_status(f"{args.weights}: {weights.title}")
    index = Index.build(
        weights,
        args.source,
        args.out,
        memory=args.memory,
        kind=args.kind,
        labels=args.labels,
        **reading_options(args),
    )
    print_result(f"{args.out}: {index.describe()}")
    return 0
