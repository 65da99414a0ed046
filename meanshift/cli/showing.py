"""`meanshift recipes` and `meanshift bench`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from meanshift.cli.settings import add_settings, configure
from meanshift.config import HARMLESS, differences
from meanshift.recipes import RECIPES, describe

if TYPE_CHECKING:
    from meanshift.cli import Command


def add(command: Command) -> None:
    command("recipes", _recipes, "every recipe with its command, cost and result")

    bench = command("bench", _bench, "the speed figures, as ratios measured in one run")
    bench.add_argument(
        "name",
        choices=["step", "judge", "cost", "transfer"],
        help="step: a whole step against its two bare encoders; judge: k-NN, k-means and the "
        "cached linear layer against faiss and scikit-learn; cost: the search's share of a step "
        "by the size of the bank; transfer: the path of 45 penalties against scikit-learn's fits",
    )
    bench.add_argument(
        "folder",
        nargs="?",
        metavar="RUN",
        help="cost only: measure with this run's settings and keep the table in its results",
    )
    bench.add_argument(
        "--rounds", type=int, help="interleaved rounds; the median counts [3, cost: 9, transfer: 1]"
    )
    add_settings(bench)


def _recipes(_: argparse.Namespace) -> int:
    for name in RECIPES:
        print(f"{name}\n  " + describe(name).replace("\n", "\n  "), end="\n\n")
    return 0


def _bench(given: argparse.Namespace) -> int:
    from meanshift.bench.cost import bench_cost, describe_cost
    from meanshift.bench.judge import bench_judge
    from meanshift.bench.step import STEP, bench_step
    from meanshift.bench.transfer import bench_transfer
    from meanshift.journal import Journal

    if given.folder is not None and given.name != "cost":
        raise ValueError(f"bench {given.name}: takes no run, got {given.folder}; only cost does")
    usual = {"cost": 9, "transfer": 1}.get(given.name, 3)
    rounds = usual if given.rounds is None else given.rounds
    if given.name == "judge":
        print(bench_judge(rounds=rounds))
    elif given.name == "transfer":
        print(bench_transfer(rounds=rounds))
    elif given.name == "step":
        print(bench_step(configure(given, STEP), rounds=rounds))
    elif given.folder is None:
        print(describe_cost(bench_cost(configure(given, STEP), rounds=rounds)))
    else:
        journal = Journal.open(Path(given.folder))
        config = configure(given, journal.config)
        other = ", ".join(set(differences(journal.config, config)) - HARMLESS)
        if other:
            raise ValueError(f"{given.folder}: is measured as it was trained; leave out {other}")
        result = bench_cost(config, rounds=rounds)
        print(describe_cost(result))
        print(f"\nkept in {journal.save_result('cost', result)}")
    return 0
