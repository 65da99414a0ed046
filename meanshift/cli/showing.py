"""`meanshift recipes` and `meanshift bench`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from meanshift.cli.settings import add_settings, configure
from meanshift.recipes import RECIPES, describe

if TYPE_CHECKING:
    from meanshift.cli import Command


def add(command: Command) -> None:
    command("recipes", _recipes, "every recipe with its command, cost and result")

    bench = command("bench", _bench, "the speed figures, as ratios measured in one run")
    bench.add_argument(
        "name",
        choices=["step", "judge"],
        help="step: a whole step against its two bare encoders; judge: k-NN, k-means and the "
        "cached linear layer against faiss and scikit-learn",
    )
    bench.add_argument(
        "--rounds", type=int, default=3, help="interleaved rounds; the median counts"
    )
    add_settings(bench)


def _recipes(_: argparse.Namespace) -> int:
    for name in RECIPES:
        print(f"{name}\n  " + describe(name).replace("\n", "\n  "), end="\n\n")
    return 0


def _bench(given: argparse.Namespace) -> int:
    from meanshift.bench import STEP, bench_judge, bench_step

    if given.name == "judge":
        print(bench_judge(rounds=given.rounds))
    else:
        print(bench_step(configure(given, STEP), rounds=given.rounds))
    return 0
