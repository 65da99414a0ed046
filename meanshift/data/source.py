"""The one contract behind every source of pictures, and a cut of one."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from meanshift import keyed


class Unreadable(Exception):
    """A picture that cannot be read: `title` names it, `why` says what is wrong with it."""

    def __init__(self, title: str, why: str) -> None:
        super().__init__(title, why)
        self.title, self.why = title, why


class Source(ABC):
    """Pictures by index, in a fixed order, with labels where they exist (-1 is unknown)."""

    name: str
    labels: Int[Tensor, " n"] | None
    classes: list[str]

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def title(self, index: int) -> str:
        """What a person would call the picture: its file's name or its number."""

    @abstractmethod
    def read(self, index: int) -> UInt8[Tensor, "channels height width"]:
        """One picture in RGB; raises `Unreadable`."""

    @property
    def uniform(self) -> bool:
        """Whether all pictures have one size and lie in memory (or a mapped file): see `gather`."""
        return False

    def gather(
        self, indices: Int[Tensor, " batch"]
    ) -> UInt8[Tensor, "batch height width channels"]:
        """Many pictures at once; only for sources that are `uniform`."""
        raise TypeError(f"{self.name} is not uniform: read its {len(indices)} pictures one by one")

    def take(self, indices: Int[Tensor, " m"]) -> Source:
        """The same pictures, only these, in this order."""
        return Cut(self, indices)

    def fingerprint(self) -> str:
        """Changes when pictures are added, removed, renamed or relabelled."""
        digest = hashlib.sha256()
        for index in range(len(self)):
            digest.update(self.title(index).encode("utf-8", "surrogateescape") + b"\n")
        if self.labels is not None:
            digest.update(self.labels.numpy().tobytes())
        return digest.hexdigest()[:16]


@dataclass(eq=False)
class Cut(Source):
    """A part of a source."""

    whole: Source
    indices: Int[Tensor, " m"]

    def __post_init__(self) -> None:
        self.name, self.classes = self.whole.name, self.whole.classes
        self.labels = None if self.whole.labels is None else self.whole.labels[self.indices]

    def __len__(self) -> int:
        return len(self.indices)

    def title(self, index: int) -> str:
        return self.whole.title(int(self.indices[index]))

    def read(self, index: int) -> UInt8[Tensor, "channels height width"]:
        return self.whole.read(int(self.indices[index]))

    @property
    def uniform(self) -> bool:
        return self.whole.uniform

    def gather(
        self, indices: Int[Tensor, " batch"]
    ) -> UInt8[Tensor, "batch height width channels"]:
        return self.whole.gather(self.indices[indices])

    def fingerprint(self) -> str:
        whole = self.whole.fingerprint().encode()
        return hashlib.sha256(whole + self.indices.numpy().tobytes()).hexdigest()[:16]


def hold_out(source: Source, share: float, *, seed: int) -> tuple[Source, Source]:
    """Cut a source in two, keeping the proportions of its classes: (the rest, the share)."""
    rank = keyed.uniform(seed, 0, torch.arange(len(source)), keyed.SPLIT, 1)[:, 0]
    labels = torch.zeros(len(source), dtype=torch.int64) if source.labels is None else source.labels
    held = torch.zeros(len(source), dtype=torch.bool)
    for label in labels.unique():
        members = (labels == label).nonzero()[:, 0]
        held[members[rank[members].argsort()[: round(share * len(members))]]] = True
    if not held.any():  # classes too small for a share of their own
        held[rank.argsort()[: round(share * len(source))]] = True
    if held.all() or not held.any():
        raise ValueError(
            f"{source.name}: a share of {share:g} of {len(source)} pictures leaves one side empty; "
            f"give more pictures, or another share with --data.held_out"
        )
    return source.take((~held).nonzero()[:, 0]), source.take(held.nonzero()[:, 0])
