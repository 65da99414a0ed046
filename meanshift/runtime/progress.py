"""A bar on a terminal; in a log, a line now and then once work turns out to be long."""

from __future__ import annotations

import sys

from tqdm import tqdm


def progress(
    title: str, total: int, *, unit: str = "it", start: int = 0, shown: bool = True
) -> tqdm:
    """A bar to `update`; in a `with` it closes itself."""
    quiet = 0.0 if sys.stderr.isatty() else 60.0
    return tqdm(
        desc=title,
        total=total,
        initial=start,
        disable=not shown,
        unit=unit,
        unit_scale=unit != "it",
        dynamic_ncols=True,
        delay=quiet,
        mininterval=quiet or 0.1,
    )
