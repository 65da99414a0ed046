"""`meanshift export`: the backbone of a run for other programs."""

from __future__ import annotations

import argparse
from pathlib import Path

from meanshift.cli.arguments import SOURCE
from meanshift.cli.output import print_result, print_status

HELP = "the backbone of a run for torchvision, timm, ONNX, Hugging Face or this program"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("weights", metavar="RUN", help="run directory or one of its checkpoints")
    parser.add_argument(
        "--format",
        metavar="FORMAT",
        help="torchvision, timm, safetensors, torch, onnx or huggingface [by the suffix of --out]",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="PATH",
        help="file (.safetensors, .pt, .pth, .onnx), or folder for huggingface [in RUN/export]",
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="read it with the other program in a fresh process and compare features",
    )
    parser.add_argument(
        "--data", metavar="SOURCE", help=f"samples to compare features on [the run's own]: {SOURCE}"
    )
    parser.add_argument(
        "--license", default="unknown", help="license in the model card of huggingface [unknown]"
    )


def run(args: argparse.Namespace) -> int:
    from meanshift.models.export import export_weights
    from meanshift.models.weights import load_weights

    job = export_weights(
        load_weights(args.weights),
        args.out,
        format=args.format,
        data=args.data,
        license=args.license,
        check=args.verify,
    )
    for check in job.checks:
        print_result(check)
    print_result(f"exported: {job.out}")
    for program, code in job.programs.items():
        print_status(f"load it with {program}:\n{code}")
    return 0
