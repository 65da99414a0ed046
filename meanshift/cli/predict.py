"""`meanshift predict`: sort new images by a classifier made of few labels."""

from __future__ import annotations

import argparse
from pathlib import Path

from meanshift.cli.arguments import SOURCE
from meanshift.cli.output import print_result, print_status

HELP = "sort new images by the labels that were given in explore"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, metavar="MODEL", help="the folder RUN/labels")
    parser.add_argument("source", metavar="SOURCE", help=SOURCE)
    parser.add_argument("--out", type=Path, metavar="CSV", help="[standard output]")
    parser.add_argument(
        "--copy-to", type=Path, metavar="DIR", help="also copy the files into class folders there"
    )
    parser.add_argument(
        "--min-confidence",
        type=float,
        default=0.0,
        metavar="P",
        help="0 to 1; what is below gets no label, and goes to DIR/unsure [0]",
    )
    parser.add_argument("--workers", type=int, default=0, help="processes that decode files [0]")
    parser.add_argument("--device", default="auto", help="[auto]")


def run(args: argparse.Namespace) -> int:
    if not 0 <= args.min_confidence <= 1:
        raise ValueError(f"--min-confidence: got {args.min_confidence:g}, need 0 to 1")
    if args.copy_to is not None:
        _check_copies(args.source, args.copy_to)
    from meanshift.data import UnreadableSample
    from meanshift.evaluation import predict
    from meanshift.runtime.files import write_text

    classifier = predict.Classifier.load(args.model)
    print_status(
        f"{args.model}: {classifier.labels} labels of {len(classifier.classes)} classes "
        f"({', '.join(classifier.classes)})"
    )
    bad: list[UnreadableSample] = []
    predictions = predict.predict(
        classifier, args.source, workers=args.workers, device=args.device, bad=bad
    )
    for error in bad:
        print_status(f"warning: {error.title}: cannot be read ({error.reason})")
    if bad:
        print_status(f"warning: {len(bad)} of {len(bad) + len(predictions)} cannot be read")
    if args.copy_to is not None:
        copied = predict.copy_files(predictions, args.copy_to, min_confidence=args.min_confidence)
        counts = ", ".join(f"{count} to {folder}" for folder, count in sorted(copied.items()))
        print_result(f"{args.copy_to}: {copied.total()} files copied ({counts})")
    table = predict.as_csv(predictions, min_confidence=args.min_confidence)
    if args.out is not None:
        write_text(args.out, table)
        print_result(f"{args.out}: {len(predictions)} predictions")
    elif args.copy_to is None:
        print_result(table.rstrip("\n"))
    return 0


def _check_copies(source: str, copy_to: Path) -> None:
    """Refuse copies of what is no folder, and copies that the next call would sort again."""
    folder = Path(source).expanduser()
    if not folder.is_dir():
        raise ValueError(f"--copy-to: {source} is no folder of files; need one, or --out CSV")
    if copy_to.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"--copy-to: {copy_to} is inside {source}; need a folder outside of it")
