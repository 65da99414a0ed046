"""`python -m benchmarks [NAME...]`: the speed tables, as ratios measured in one run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import TABLES


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tables, or one of step, cost, transfer and index alone."""
    parser = _parser()
    args = parser.parse_args(arguments)
    try:
        _check(args)
        if args.names[:1] in (["step"], ["cost"], ["transfer"], ["index"]):
            _run_alone(args)
        else:
            from benchmarks.run import run_tables

            run_tables(
                args.names or list(TABLES),
                rounds=args.rounds or 3,
                out=args.out,
                photos=args.photos,
                features=args.features,
            )
    except (ValueError, OSError) as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"any of {', '.join(TABLES)} [all of these, some minutes], scale (steps in 1, 2 and 4 "
        f"processes), large_knn (k-NN over a mapped file of a million rows), demo (against its "
        f"training); or alone: step (the phases of a step), cost [RUN] (the search's fraction of a "
        f"step by the size of the bank; of a run, written to its results), transfer (45 penalties "
        f"against scikit-learn), index (memory and recall of `meanshift index`)",
    )
    parser.add_argument(
        "--rounds", type=int, help="alternating rounds; the median counts [3, cost: 9, transfer: 1]"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/bench"),
        metavar="DIR",
        help="for bench.json and the plot [runs/bench]",
    )
    parser.add_argument(
        "--photos", type=Path, metavar="DIR", help="decoding: class folders of JPEGs [generated]"
    )
    parser.add_argument(
        "--features",
        type=Path,
        metavar="FILE",
        help="evaluation: 20-NN alone, on an .npz of `meanshift embed` [generated rows]",
    )
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="step: measure the CPU time of one thread, for a machine that is busy [elapsed time]",
    )
    index = parser.add_argument_group("index")
    index.add_argument("--rows", type=int, default=1_000_000, help="synthetic rows [1000000]")
    index.add_argument("--dim", type=int, default=128, help="their dimensions [128]")
    index.add_argument("--memory", type=float, default=4.0, help="of the index, in GB [4]")
    index.add_argument(
        "--kind", choices=["auto", "flat", "ivf-sq8", "ivf-pq"], default="auto", help="[auto]"
    )
    index.add_argument("--keep", action="store_true", help="leave the index in --out")
    return parser


def _check(args: argparse.Namespace) -> None:
    names = args.names
    if args.rounds is not None and args.rounds < 1:
        raise ValueError(f"--rounds: got {args.rounds}, need 1 or more")
    alone = names[:1] in (["step"], ["transfer"], ["index"]) and len(names) == 1
    cost = names[:1] == ["cost"] and len(names) <= 2
    if not (alone or cost or set(names) <= {*TABLES, "scale", "large_knn", "demo"}):
        raise ValueError(
            f"got {' '.join(names)}; need any of {', '.join(TABLES)}, scale, large_knn, demo; or "
            f"step, transfer, index or cost [RUN], alone"
        )
    if args.features is not None:
        if "evaluation" not in (names or TABLES):
            raise ValueError("--features is for evaluation; name it too, or leave --features out")
        if not args.features.is_file():  # reported now, not after minutes
            raise ValueError(f"{args.features}: no such file; make it with `meanshift embed`")


def _run_alone(args: argparse.Namespace) -> None:
    if args.names == ["index"]:
        from benchmarks.index import measure_index

        print(
            measure_index(
                args.rows, args.dim, args.out, memory=args.memory, kind=args.kind, keep=args.keep
            )
        )
        return
    from benchmarks.step import STEP, measure_steps
    from benchmarks.transfer import measure_transfer
    from meanshift.reproduce.cost import describe_cost, measure_cost
    from meanshift.runtime.run_directory import RunDirectory

    name, *runs = args.names
    if name == "step":
        for table in measure_steps(rounds=args.rounds or 3, cpu_time=args.cpu_time):
            print(f"{table}\n", flush=True)
    elif name == "transfer":
        print(measure_transfer(rounds=args.rounds or 1))
    elif not runs:
        print(describe_cost(measure_cost(STEP, rounds=args.rounds or 9)))
    else:
        run_directory = RunDirectory.open(Path(runs[0]))
        result = measure_cost(run_directory.config, rounds=args.rounds or 9)
        print(describe_cost(result))
        print(f"\nwritten to {run_directory.save_result('cost', result)}")


if __name__ == "__main__":
    sys.exit(main())
