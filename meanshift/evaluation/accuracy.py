"""An accuracy with its uncertainty, and the difference of two, paired on the same test images.

The intervals are of 95% and are about the test images: another seed of the training differs too.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Z = 1.96
"""standard errors on each side of a 95% interval"""


@dataclass(frozen=True)
class Accuracy:
    """The accuracy of an encoder in percent, on so many test images (0: unknown)."""

    name: str
    value: float
    images: int = 0
    correct: NDArray[np.bool_] | None = None
    """which test images are classified correctly, where it was stored"""
    test_images: str = ""
    """fingerprint of the test images"""

    @classmethod
    def of_rows(
        cls, name: str, value: float, correct: Any, *, images: int = 0, test_images: str = ""
    ) -> Accuracy:
        """An accuracy and the rows that it is computed from; rows that do not give it are of an
        older evaluation, and not used."""
        rows = None if correct is None else np.asarray(correct, bool)
        if rows is not None and not (
            len(rows) and math.isclose(100 * rows.mean(), value, abs_tol=1e-6)
        ):
            rows = None
        return cls(name, value, images if rows is None else len(rows), rows, test_images)

    @classmethod
    def of_result(
        cls,
        name: str,
        metric: str,
        metrics: Mapping[str, float],
        card: Mapping[str, Any],
        arrays: Mapping[str, Any],
    ) -> Accuracy:
        """One metric of a result: its metrics and card, and the arrays beside it."""
        return cls.of_rows(
            name,
            float(metrics[metric]),
            arrays.get(f"correct {metric}"),
            images=int((card.get("sizes") or {}).get("test", 0)),
            test_images=str(card.get("test images", "")),
        )

    @property
    def interval(self) -> tuple[float, float] | None:
        """The interval of a proportion (Wilson); None if the number of images is unknown."""
        if not self.images:
            return None
        n, p = self.images, self.value / 100
        center = (p + Z**2 / (2 * n)) / (1 + Z**2 / n)
        half = Z / (1 + Z**2 / n) * math.sqrt(p * (1 - p) / n + Z**2 / (4 * n**2))
        return 100 * (center - half), 100 * (center + half)


@dataclass(frozen=True)
class Difference:
    """An accuracy minus that of another encoder, in percentage points, with its interval."""

    other: Accuracy
    value: float
    low: float
    high: float
    paired: bool
    """whether it is known which images each encoder classified correctly"""

    @property
    def sign(self) -> int:
        """1 is better, -1 is worse, 0 cannot be told apart."""
        return int(self.low > 0) - int(self.high < 0)

    @property
    def known(self) -> bool:
        """Whether there is an interval: the number of test images is known."""
        return math.isfinite(self.low)


def difference(own: Accuracy, other: Accuracy) -> Difference:
    """Compare two encoders: by the images on which they disagree, or else as two proportions.

    On the same test images the interval is that of Bonett and Price (2012) for paired proportions,
    which depends only on the images that one encoder classifies correctly and the other does not.
    Where it is not known which these are, it is that of Agresti and Caffo (2000) for independent
    proportions, which is wider. Both are adjusted for few images.
    """
    value = own.value - other.value
    a, b = own.correct, other.correct
    same_images = own.test_images == other.test_images
    if a is not None and b is not None and len(a) == len(b) and same_images:
        n = len(a) + 2
        won = (int((a & ~b).sum()) + 1) / n
        lost = (int((b & ~a).sum()) + 1) / n
        half = Z * math.sqrt((won + lost - (won - lost) ** 2) / n)
        return _difference(other, value, won - lost, half, paired=True)
    if not own.images or not other.images:
        return Difference(other, value, -math.inf, math.inf, paired=False)
    proportions = [(a.images * a.value / 100 + 1) / (a.images + 2) for a in (own, other)]
    variances = [
        p * (1 - p) / (a.images + 2) for p, a in zip(proportions, (own, other), strict=True)
    ]
    half = Z * math.sqrt(sum(variances))
    return _difference(other, value, proportions[0] - proportions[1], half, paired=False)


def _difference(
    other: Accuracy, value: float, center: float, half: float, *, paired: bool
) -> Difference:
    low, high = (max(-100.0, min(100.0, 100 * end)) for end in (center - half, center + half))
    return Difference(other, value, low, high, paired)


def best_of(accuracies: Sequence[Accuracy]) -> list[bool]:
    """Which of several encoders is the best, or cannot be told from the best."""
    best = max(accuracies, key=lambda accuracy: accuracy.value)
    return [each is best or difference(best, each).sign == 0 for each in accuracies]


def stored_arrays(path: Path) -> dict[str, NDArray[np.bool_]]:
    """Which test images were classified correctly, by metric; nothing if it is not stored."""
    try:
        with path.open("rb") as file, np.load(file) as stored:
            return {name: stored[name] for name in stored.files if name.startswith("correct ")}
    except (OSError, ValueError, zipfile.BadZipFile):
        return {}
