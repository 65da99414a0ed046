"""Unreadable images: each is reported once, and too many of them end the work."""

from __future__ import annotations

from collections.abc import Iterable

from meanshift.runtime.distributed import SharedError


class BadFiles:
    """The unreadable images of a source that were met so far, by title, with the reason."""

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

    def check(self) -> None:
        """Raise when more are unreadable than the settings allow; all processes know of them."""
        if len(self.reasons) <= self.max_fraction * self.size:
            return
        listed = "\n".join(f"  {title}: {reason}" for title, reason in self.reasons.items())
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
