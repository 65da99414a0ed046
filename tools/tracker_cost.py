"""What the trackers cost in the training loop: `python tools/tracker_cost.py OUT [TRACKERS]`.

Trains one epoch of the demo and prints the share of the loop's time that is spent in the trackers.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meanshift.config.recipes import recipe
from meanshift.training import loop
from meanshift.training.trackers import Trackers

spent = dict.fromkeys(("loop", "start", "log", "saved", "close"), 0.0)


def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose seconds are added to `spent`."""

    def call(*args: Any, **named: Any) -> Any:
        begin = time.perf_counter()
        try:
            return function(*args, **named)
        finally:
            spent[name] += time.perf_counter() - begin

    return call


def main(out: Path, trackers: str) -> None:
    for name in ("start", "log", "saved", "close"):
        setattr(Trackers, name, timed(name, getattr(Trackers, name)))
    loop.train = timed("loop", loop.train)
    changes = {"data.source": "sample", "train.epochs": 1, "train.trackers": trackers}
    loop.pretrain(recipe("demo").with_overrides(changes), out)
    inside = (spent["log"] + spent["saved"]) / spent["loop"]
    ends = (spent["start"] + spent["close"]) / spent["loop"]
    print(
        f"{trackers or 'none'}: {inside:.2%} of the loop's time; opening and closing {ends:.2%} of "
        f"the time of this one epoch"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "")
