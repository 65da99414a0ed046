"""`meanshift embed`: embeddings of any images."""

from __future__ import annotations

import argparse
from pathlib import Path

from meanshift.cli.arguments import SOURCE, WEIGHTS, add_reading_arguments, reading_options
from meanshift.cli.output import print_result, print_status

HELP = "embeddings of any images, as .npz or .parquet"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("weights", metavar="RUN_OR_WEIGHTS", help=WEIGHTS)
    parser.add_argument("source", metavar="SOURCE", help=SOURCE)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help=".npz or .parquet")
    parser.add_argument(
        "--output", choices=["backbone", "projector"], default="backbone", help="[backbone]"
    )
    add_reading_arguments(parser)
    parser.set_defaults(several_processes=True)


def run(args: argparse.Namespace) -> int:
    import torch

    from meanshift.evaluation.embed import embed
    from meanshift.models.weights import load_weights
    from meanshift.runtime.distributed import fail_together, process_group

    options = reading_options(args)
    with process_group(torch.device(options["device"])):
        with fail_together():
            weights = load_weights(args.weights)
        print_status(f"{args.weights}: {weights.title}")
        samples, dimensions = embed(
            weights,
            args.source,
            args.out,
            projector=args.output == "projector",
            labels=args.labels,
            **options,
        )
    print_result(f"{args.out}: {samples} samples, {dimensions} dimensions")
    return 0
