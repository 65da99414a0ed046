"""Unreadable images: what takes their place, how they are reported, and how many are too many."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import NamedTuple

from jaxtyping import Shaped
from torch import Tensor

from meanshift.config import Data
from meanshift.data.unreadable import UnreadableSample
from meanshift.runtime.errors import SharedError

MAX_BAD_FRACTION = Data.max_bad_fraction
"""fraction of a transfer dataset's images that may be unreadable"""
MAX_BAD_FRACTION_BOXES = 0.05
"""fraction of a detection dataset's images that may be unreadable"""
SHOWN = 5
"""unreadable images of a run that are printed"""


class ReadSample(NamedTuple):
    """A sample as `read_or_replace` returns it."""

    image: Shaped[Tensor, "channels *size"]
    used_index: int
    """index of the sample that was read: the one that was asked for, or its replacement"""
    errors: list[UnreadableSample]
    """of the unreadable samples that were tried; the first is the one that was asked for"""


def read_or_replace(
    read: Callable[[int], Tensor], index: int, replacements: Iterable[int] = (), *, blank: Tensor
) -> ReadSample:
    """Read a sample, or the first readable one of its replacements, or else give a blank one."""
    errors: list[UnreadableSample] = []
    for candidate in itertools.chain([index], replacements):
        try:
            return ReadSample(read(candidate), candidate, errors)
        except UnreadableSample as error:
            errors.append(error)
    return ReadSample(blank, index, errors)


def refuse_too_many(
    bad: int,
    size: int,
    *,
    max_fraction: float,
    spare: int = 0,
    name: str,
    first: str = "",
    advice: str,
) -> None:
    """Raise when too many images of a dataset are unreadable: the rest would be another task.

    `spare` unreadable images are allowed in small datasets too, but never all images.
    """
    if bad > min(max(spare, max_fraction * size), size - 1):
        example = f", the first is {first}" if first else ""
        raise ValueError(
            f"{name}: {bad} of {size} images cannot be read{example}; at most {max_fraction:.0%} "
            f"may: {advice}"
        )


class BadFiles:
    """The unreadable images of a run that were met so far, by title, with the reason."""

    def __init__(self, max_fraction: float, size: int) -> None:
        self.max_fraction = max_fraction
        self.size = size
        self.reasons: dict[str, str] = {}

    def add(self, found: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
        """Record (title, reason) pairs and return the new ones, to be reported."""
        new = []
        for title, reason in found:
            if title not in self.reasons:
                self.reasons[title] = reason
                new.append((title, reason))
        return new

    def messages(self, new: list[tuple[str, str]]) -> list[str]:
        """What to print of new ones: the first few of a run by name; the summary counts all."""
        before = len(self.reasons) - len(new)
        lines = [
            f"{title} cannot be read ({reason}); replaced by another image"
            for title, reason in new[: max(0, SHOWN - before)]
        ]
        if new and before <= SHOWN < len(self.reasons):
            lines.append("more images cannot be read; warnings.jsonl lists them all")
        return lines

    def check(self) -> None:
        """Raise when more are unreadable than the settings allow; all processes know of them."""
        if len(self.reasons) <= self.max_fraction * self.size:
            return
        shown = list(self.reasons.items())[:SHOWN]
        listed = "\n".join(f"  {title}: {reason}" for title, reason in shown)
        if len(self.reasons) > SHOWN:
            listed += f"\n  and {len(self.reasons) - SHOWN} more, all of them in warnings.jsonl"
        raise SharedError(
            f"{len(self.reasons)} of {self.size} images cannot be read so far, more than the "
            f"{self.max_fraction:.1%} that are allowed:\n{listed}\n"
            f"repair or remove them, or raise --data.max_bad_fraction"
        )

    def summary(self) -> str:
        """One sentence for the end of a run; empty if all images could be read."""
        if not self.reasons:
            return ""
        return (
            f"{len(self.reasons)} of {self.size} images could not be read and were replaced by "
            f"others; warnings.jsonl lists them"
        )
