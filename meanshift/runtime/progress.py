"""Progress: a bar on a terminal or in a notebook; in a log, a line per minute of long work."""

from __future__ import annotations

import sys

from tqdm.auto import tqdm  # widgets in a notebook that has them


def progress(
    title: str, total: int, *, unit: str = "it", start: int = 0, shown: bool = True
) -> tqdm:
    """Return a progress bar to `update`; as a context manager it closes itself."""
    interval = 0.0 if is_watched() else 60.0
    return tqdm(
        desc=title,
        total=total,
        initial=start,
        disable=not shown,
        unit=unit,
        unit_scale=unit != "it",
        dynamic_ncols=True,
        delay=interval,
        mininterval=interval or 0.1,
    )


def is_watched() -> bool:
    """Whether a person sees a bar move: on a terminal, or in a notebook, which has none."""
    return sys.stderr.isatty() or "ipykernel" in sys.modules
