"""`meanshift reproduce`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from meanshift.cli.settings import add_settings, chosen

if TYPE_CHECKING:
    from meanshift.cli import Command

_NAMES = "main, k, bank, augmentation, same-view, purity, cost, few-labels, beyond"


def add(command: Command) -> None:
    reproduce = command(
        "reproduce", _reproduce, "the paper's tables and ablations, beside the paper's own figures"
    )
    reproduce.add_argument(
        "names", nargs="+", metavar="NAME", help=f"one or more of {_NAMES}; or all"
    )
    reproduce.add_argument(
        "--scale", default="cpu", help="paper, cifar10, cpu or smoke (docs/reproduce.md) [cpu]"
    )
    reproduce.add_argument(
        "--data", metavar="SOURCE", help="images to use instead: which variant is best on them?"
    )
    reproduce.add_argument("--seeds", type=int, default=2, help="runs of each variant [2]")
    reproduce.add_argument(
        "--devices", nargs="+", default=[], metavar="DEVICE",
        help="runs side by side, one on each: cuda:0 cuda:1, or cpu cpu [one after another]",
    )  # fmt: skip
    reproduce.add_argument(
        "--out", type=Path, metavar="DIR", help="runs, tables and page [runs/reproduce-SCALE]"
    )
    reproduce.add_argument(
        "--plan", action="store_true", help="print what would be typed by hand, and do nothing"
    )
    add_settings(reproduce)


def _reproduce(given: argparse.Namespace) -> int:
    from meanshift.reproduce import STUDIES, Reproduction
    from meanshift.reproduce.scales import Base
    from meanshift.runtime.device import pick_device
    from meanshift.runtime.signals import Stopped

    names = list(STUDIES) if "all" in given.names else given.names
    own = {"train.device": given.devices[0]} if given.devices else {}
    base = Base.of(given.scale, data=given.data, overrides=chosen(given) | own)
    for device in given.devices or [base.config.train.device]:  # before minutes have passed
        pick_device(device)
    out = given.out or Path("runs") / f"reproduce-{given.scale}"
    whole = Reproduction(names, base, out, given.seeds)
    if given.plan:
        print("\n".join(whole.plan()))
        return 0
    print(
        f"{len(whole.jobs)} runs at scale {given.scale} ({base.scale.about}), "
        f"{sum(job.trained for job in whole.jobs)} of them trained already: {out}/runs",
        file=sys.stderr,
    )
    try:
        failed = whole.work(given.devices or [base.config.train.device])
    except Stopped as stopped:
        whole.write()
        print("meanshift: stopped and saved; the same command goes on from there", file=sys.stderr)
        return stopped.code
    page = whole.write()
    for sheet in whole.sheets():
        print(sheet.markdown())
    print(f"page: {page} (with .md, .csv and images beside it)")
    for job in failed:
        print(f"failed: {job.title}: {job.failure}", file=sys.stderr)
    return 1 if failed else 0
