"""The one contract behind every source of images, and a cut of one."""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from meanshift.runtime import rng


class UnreadableSample(Exception):
    """An image that cannot be read: `title` names it, `why` says what is wrong with it."""

    def __init__(self, title: str, why: str) -> None:
        super().__init__(title, why)
        self.title, self.why = title, why


class Source(ABC):
    """Images by index, in a fixed order, with labels where they exist (-1 is unknown)."""

    name: str
    labels: Int[Tensor, " n"] | None
    classes: list[str]
    channels: int = 3

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    def labeled(self) -> bool:
        """Whether any image has a label."""
        return self.labels is not None and bool((self.labels >= 0).any())

    @abstractmethod
    def title(self, index: int) -> str:
        """What a person would call the image: its file's name or its number."""

    @abstractmethod
    def read(self, index: int) -> UInt8[Tensor, "channels height width"]:
        """One image in RGB; raises `Unreadable`."""

    @property
    def uniform(self) -> bool:
        """Whether all images have one size and lie in memory (or a mapped file): see `gather`."""
        return False

    def gather(
        self, indices: Int[Tensor, " batch"]
    ) -> UInt8[Tensor, "batch height width channels"]:
        """Many images at once; only for sources that are `uniform`."""
        raise TypeError(f"{self.name} is not uniform: read its {len(indices)} images one by one")

    @property
    def blockwise(self) -> bool:
        """Whether images are cheap to read only in blocks, and `order` keeps to few at a time."""
        return False

    def order(self, seed: int, epoch: int) -> Int[Tensor, " n"]:
        """The order in which an epoch visits the images: a pure function of its address."""
        return rng.permutation(seed, epoch, len(self))

    def take(self, indices: Int[Tensor, " m"]) -> Subset:
        """The same images, only these, in this order."""
        return Subset(self, indices)

    def contents(self) -> str:
        """Changes also when an image is written anew: what a cache of features depends on."""
        return self.fingerprint()

    def fingerprint(self) -> str:
        """Changes when images are added, removed, renamed or relabeled."""
        digest = hashlib.sha256()
        for index in range(len(self)):
            digest.update(self.title(index).encode("utf-8", "surrogateescape") + b"\n")
        if self.labels is not None:
            digest.update(self.labels.numpy().tobytes())
        return digest.hexdigest()[:16]


@dataclass(eq=False)
class Subset(Source):
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

    @property
    def blockwise(self) -> bool:
        return self.whole.blockwise

    def order(self, seed: int, epoch: int) -> Int[Tensor, " n"]:
        """Its own, or where the whole has blocks, the whole's without the others' images."""
        if not self.blockwise:
            return rng.permutation(seed, epoch, len(self))
        return self.whole.order(seed, epoch).argsort()[self.indices].argsort(stable=True)

    def fingerprint(self) -> str:
        return self._part_of(self.whole.fingerprint())

    def contents(self) -> str:
        return self._part_of(self.whole.contents())

    def _part_of(self, whole: str) -> str:
        return hashlib.sha256(whole.encode() + self.indices.numpy().tobytes()).hexdigest()[:16]


def block_order(
    seed: int, epoch: int, sizes: Int[Tensor, " blocks"], *, window: int
) -> Int[Tensor, " n"]:
    """An epoch's order in which the images of only `window` blocks are mixed at a time.

    The blocks are shuffled, every `window` neighbors of them make a group, and each group's
    images are shuffled together.
    """
    place = rng.permutation(seed, epoch, len(sizes)).argsort()
    group = (place // window).repeat_interleave(sizes)
    # The second word: the first one of an equal number has already placed a block.
    rank = rng.bits(seed, epoch, torch.arange(len(group)), rng.ORDER, 2)[:, 1]
    mixed = rank.argsort(stable=True)
    return mixed[group[mixed].argsort(stable=True)]


def labeled_only(source: Source) -> Source:
    """Only the images whose class is known."""
    assert source.labels is not None
    has = source.labels >= 0
    return source if bool(has.all()) else source.take(has.nonzero()[:, 0])


def file_signature(files: Sequence[Path]) -> str:
    """Changes when one of these files is written anew or its like lies in its place.

    Sizes and dates tell, but archives of uncompressed images give all of them the same: the
    beginnings of some thousand files spread over the list are read as well.
    """
    digest, every = hashlib.sha256(), 1 + len(files) // 1000
    for index, file in enumerate(files):
        try:
            told = file.stat()
            digest.update(os.fsencode(file.name))
            digest.update(f" {told.st_size} {told.st_mtime_ns}\n".encode())
            if index % every == 0:
                with file.open("rb") as held:
                    digest.update(held.read(65_536))
        except OSError:  # unreadable, as its image will be
            digest.update(b"nothing\n")
    return digest.hexdigest()


def stratified(labels: Int[Tensor, " n"], count: int, *, seed: int) -> Int[Tensor, " chosen"]:
    """`count` indices drawn at random in the proportions of the classes, in rising order.

    Each class gets its share rounded down, at least one while they last, and the largest remainders
    get what is left.
    """
    classes, members = labels.unique(return_counts=True)
    if not len(classes) <= count <= len(labels):
        raise ValueError(
            f"a cut of {count} images out of {len(labels)} of {len(classes)} classes; need at "
            f"least one a class and at most all (--fractions, --counts)"
        )
    share = members * (count / len(labels))
    quota = share.floor().long().clamp(min=1)
    while int(quota.sum()) < count:
        quota[(share - quota).masked_fill(quota >= members, -torch.inf).argmax()] += 1
    while int(quota.sum()) > count:  # many tiny classes took more than their share
        quota[(share - quota).masked_fill(quota <= 1, torch.inf).argmin()] -= 1
    rank = rng.uniform(seed, 0, torch.arange(len(labels)), rng.SPLIT, 1)[:, 0]
    chosen = []
    for label, size in zip(classes, quota.tolist(), strict=True):
        inside = (labels == label).nonzero()[:, 0]
        chosen.append(inside[rank[inside].argsort(stable=True)[:size]])
    return torch.cat(chosen).sort().values


def split_off(source: Source, share: float, *, seed: int) -> tuple[Subset, Subset]:
    """Cut a source in two, keeping the proportions of its classes: (the rest, the share)."""
    rank = rng.uniform(seed, 0, torch.arange(len(source)), rng.SPLIT, 1)[:, 0]
    labels = torch.zeros(len(source), dtype=torch.int64) if source.labels is None else source.labels
    held = torch.zeros(len(source), dtype=torch.bool)
    for label in labels.unique():
        members = (labels == label).nonzero()[:, 0]
        held[members[rank[members].argsort()[: round(share * len(members))]]] = True
    if not held.any():  # classes too small for a share of their own
        held[rank.argsort()[: round(share * len(source))]] = True
    if held.all() or not held.any():
        raise ValueError(
            f"{source.name}: a share of {share:g} of {len(source)} images leaves one side empty; "
            f"give more images, or another share"
        )
    return source.take((~held).nonzero()[:, 0]), source.take(held.nonzero()[:, 0])
