"""`meanshift search`: the images of an index that are nearest to given ones."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meanshift.cli.arguments import WEIGHTS
from meanshift.cli.output import print_result, print_status

if TYPE_CHECKING:
    from meanshift.data import Source
    from meanshift.evaluation.samples import Neighbors

HELP = "the images of an index that are nearest to given ones"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("index", type=Path, metavar="INDEX", help="a folder of `meanshift index`")
    parser.add_argument("images", type=Path, nargs="+", metavar="IMAGE", help="files or folders")
    parser.add_argument("-k", type=int, default=10, help="neighbors of each image [10]")
    parser.add_argument(
        "--nprobe",
        type=int,
        default=0,
        metavar="LISTS",
        help="inverted lists to read: more find more and take longer [chosen by the index]",
    )
    parser.add_argument("--weights", default="", metavar="RUN_OR_WEIGHTS", help=WEIGHTS)
    parser.add_argument("--device", default="auto", help="[auto]")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    missing = [path for path in args.images if not path.exists()]
    if missing:
        raise ValueError(f"{missing[0]}: no such file or folder; need images to search with")
    from meanshift.data import UnreadableSample
    from meanshift.evaluation.index import Index

    index = Index.open(args.index, weights=args.weights, device=args.device)
    print_status(f"{args.index}: {index.describe()}")
    unreadable: list[UnreadableSample] = []
    results: list[tuple[str, Neighbors]] = []
    for source in _sources(args.images, index.context.kind):
        bad: dict[int, UnreadableSample] = {}
        results += index.search_source(source, args.k, nprobe=args.nprobe, bad=bad)
        unreadable += bad.values()
    for error in unreadable:
        print_status(f"warning: {error.title}: cannot be read ({error.reason})")
    total = len(results) + len(unreadable)
    if not results:
        raise ValueError(f"none of the {total} images to search with can be read")
    if unreadable:
        print_status(f"warning: {len(unreadable)} of {total} cannot be read")
    if args.json:
        bad_files = {error.title: error.reason for error in unreadable}
        print_result(json.dumps({"queries": _as_json(results), "unreadable": bad_files}, indent=2))
    else:
        print_result(
            "\n\n".join(f"{_printable(title)}\n{_as_table(near)}" for title, near in results)
        )
    return 0


def _sources(paths: Sequence[Path], kind: Any) -> Iterator[Source]:
    """The images of files, together, and of each folder."""
    from meanshift.data import open_source
    from meanshift.data.in_memory import SampleSource

    files = [path for path in paths if not path.is_dir()]
    if files:
        yield SampleSource(files, kind=kind)
    for folder in paths:
        if folder.is_dir():
            yield from open_source(str(folder)).values()


def _as_table(near: Neighbors) -> str:
    from meanshift.runtime.table import text_table

    rows = [
        [str(rank), f"{similarity:.4f}", label or "", path]
        for rank, (similarity, label, path) in enumerate(
            zip(near.similarities, near.labels, near.paths, strict=True), 1
        )
    ]
    header = ["rank", "similarity", "label", "path"]
    if not any(near.labels):
        header.remove("label")
        rows = [[rank, similarity, path] for rank, similarity, _, path in rows]
    return text_table(header, rows, right="rank similarity")


def _as_json(results: Sequence[tuple[str, Neighbors]]) -> list[dict[str, Any]]:
    return [{"query": title, "neighbors": _neighbors_as_json(near)} for title, near in results]


def _neighbors_as_json(near: Neighbors) -> list[dict[str, Any]]:
    columns = (near.indices.tolist(), near.similarities.tolist(), near.paths, near.labels)
    names = ("rank", "row", "similarity", "path", "label")
    return [
        dict(zip(names, (rank, *values), strict=True))
        for rank, values in enumerate(zip(*columns, strict=True), 1)
    ]


def _printable(title: str) -> str:
    """A file name may be any bytes; what is no character is escaped."""
    return title.encode(errors="backslashreplace").decode()
