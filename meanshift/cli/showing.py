"""`meanshift recipes` and `meanshift bench`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from meanshift.cli.settings import add_settings, configure
from meanshift.config import RESUME_SAFE, Config, differences
from meanshift.config.recipes import RECIPES, describe

if TYPE_CHECKING:
    from meanshift.cli import Command


TABLES = "training searching views files judging starting memory growth".split()


def add(command: Command) -> None:
    command("recipes", _recipes, "every recipe with its command, cost and result")

    bench = command("bench", _bench, "the speed figures, as ratios measured in one run")
    bench.add_argument(
        "words",
        nargs="*",
        metavar="NAME",
        help=f"tables against the authors' way and other libraries, some minutes in all: "
        f"{', '.join(TABLES)} [all of these], scale (steps in 1, 2 and 4 processes); or alone: "
        f"step (the phases of a step), cost [RUN] (the "
        f"search's share by the size of the bank, kept with a run's results), transfer (45 "
        f"penalties against scikit-learn's fits)",
    )
    bench.add_argument(
        "--rounds", type=int, help="interleaved rounds; the median counts [3, cost: 9, transfer: 1]"
    )
    bench.add_argument(
        "--out", type=Path, metavar="DIR", help="for bench.json and the image [runs/bench]"
    )
    bench.add_argument(
        "--photos", type=Path, metavar="DIR", help="files: class folders of JPEGs [made ones]"
    )
    bench.add_argument(
        "--features", type=Path, metavar="FILE",
        help="judging: 20-NN alone, on an .npz made by `meanshift embed` [made rows]",
    )  # fmt: skip
    add_settings(bench)


def _recipes(_: argparse.Namespace) -> int:
    for name in RECIPES:
        print(f"{name}\n  " + describe(name).replace("\n", "\n  "), end="\n\n")
    return 0


def _bench(given: argparse.Namespace) -> int:
    alone, *more = given.words or [""]
    if given.rounds is not None and given.rounds < 1:
        raise ValueError(f"--rounds: got {given.rounds}, need 1 or more")
    if alone in ("step", "cost"):
        return _bench_alone(given, alone, more)
    unknown = [word for word in given.words if word not in (*TABLES, "scale", "transfer")]
    if unknown or ("transfer" in given.words and more):
        raise ValueError(
            f"bench {' '.join(given.words)}: need any of {', '.join(TABLES)}, scale; or step, cost "
            f"[RUN] or transfer, alone"
        )
    changed = configure(given, Config())
    if changed != Config():
        other = ", ".join(differences(Config(), changed))
        raise ValueError(f"bench: only step and cost take settings, got {other}; leave them out")
    if given.features is not None and "judging" not in (given.words or TABLES):
        raise ValueError("bench: --features is for judging; name it too, or leave --features out")
    if given.features is not None and not given.features.is_file():  # before minutes have passed
        raise ValueError(f"{given.features}: no such file; make it with `meanshift embed`")
    _find_benchmarks()
    if alone == "transfer":
        from benchmarks.transfer import bench_transfer

        print(bench_transfer(rounds=given.rounds or 1))
        return 0
    from benchmarks.run import run

    out = given.out or Path("runs/bench")
    given_files = {"photos": given.photos, "features": given.features}
    run(given.words or TABLES, rounds=given.rounds or 3, out=out, **given_files)
    return 0


def _bench_alone(given: argparse.Namespace, name: str, more: list[str]) -> int:
    from meanshift.reproduce.cost import bench_cost, describe_cost
    from meanshift.reproduce.step import STEP, bench_step
    from meanshift.runtime.run_directory import RunDirectory

    if any(option is not None for option in (given.out, given.photos, given.features)):
        raise ValueError(
            f"bench {name}: reads none of --out, --photos and --features; leave them out"
        )
    if len(more) > (name == "cost"):
        raise ValueError(f"bench {name}: takes no run, got {' '.join(more)}; only cost takes one")
    if name == "step":
        print(bench_step(configure(given, STEP), rounds=given.rounds or 3))
    elif not more:
        print(describe_cost(bench_cost(configure(given, STEP), rounds=given.rounds or 9)))
    else:
        journal = RunDirectory.open(Path(more[0]))
        config = configure(given, journal.config)
        other = ", ".join(set(differences(journal.config, config)) - RESUME_SAFE)
        if other:
            raise ValueError(f"{more[0]}: is measured as it was trained; leave out {other}")
        result = bench_cost(config, rounds=given.rounds or 9)
        print(describe_cost(result))
        print(f"\nkept in {journal.save_result('cost', result)}")
    return 0


def _find_benchmarks() -> None:
    """The contenders are not in the package: they come with a clone."""
    root = Path(__file__).parents[2]
    if not (root / "benchmarks" / "run.py").exists():
        raise ValueError(
            "bench: the tables need the contenders in `benchmarks/`, which an installed package "
            "has not; clone the repository and type: make bench"
        )
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)  # for the contenders' processes
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), *paths]))
