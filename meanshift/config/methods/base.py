"""What the settings of all methods share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from meanshift.config.parsing import need


@dataclass(frozen=True, kw_only=True)
class MethodSettings:
    """The settings that every method has."""

    defaults: ClassVar[Mapping[str, Any]] = {}
    """settings that the method's paper uses, by dotted name: of views and optimizer where they
    differ from the defaults of `Views` and `Optim`, of other groups where they differ from what a
    recipe has"""
    small_defaults: ClassVar[Mapping[str, Any]] = {}
    """what differs from `defaults` for views of at most 64 pixels: the method's small-scale recipe,
    also settings of the method itself"""
    start_defaults: ClassVar[Mapping[str, Any]] = {}
    """settings for an encoder that starts from the data or from given weights, by dotted name"""
    resume_safe: ClassVar[frozenset[str]] = frozenset()
    """the method's own settings that may change when a run is continued, without `method.`"""

    loss: ClassVar[str] = ""
    """the loss in one line, for `meanshift methods`"""
    needs: ClassVar[tuple[str, ...]] = ()
    """what it needs of: momentum, negatives, clusters, memory, labels, teacher"""

    name: str = ""
    """name of the method"""
    module: str = ""
    """a method that is not part of this program: FILE.py:CLASS or PACKAGE.MODULE:CLASS"""
    dim: int = 0
    """size of the embedding; 0 is the MSF authors' rule, a quarter of the backbone's features"""
    hidden: int = 0
    """size of the heads' hidden layer; 0 is the authors' rule, twice the backbone's features"""

    def __post_init__(self) -> None:
        need(self.dim >= 0, "method.dim", self.dim, "0 or more")
        need(self.hidden >= 0, "method.hidden", self.hidden, "0 or more")

    @property
    def passes(self) -> tuple[float, float]:
        """Forward and backward passes of a large view per image."""
        return 2.0, 1.0

    @property
    def relative_cost(self) -> float:
        """The cost of a step relative to MSF's: a backward pass counts as two forward passes."""
        forward, backward = self.passes
        return (forward + 2 * backward) / 4

    @classmethod
    def defaults_for(cls, image_size: int) -> Mapping[str, Any]:
        """The settings that the method brings for views of so many pixels, by dotted name."""
        return {**cls.defaults, **(cls.small_defaults if image_size <= 64 else {})}

    def check(self, *, batch_size: int) -> None:
        """Raise ValueError where the settings do not fit the batch size."""
