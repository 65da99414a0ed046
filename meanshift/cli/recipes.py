"""`meanshift recipes`: every recipe with its command, cost and result."""

from __future__ import annotations

import argparse

from meanshift.config.recipes import RECIPES, describe

HELP = "every recipe with its command, cost and result"


def add_arguments(_: argparse.ArgumentParser) -> None:
    pass


def run(_: argparse.Namespace) -> int:
    for name in RECIPES:
        print(f"{name}\n  " + describe(name).replace("\n", "\n  "), end="\n\n")
    return 0
