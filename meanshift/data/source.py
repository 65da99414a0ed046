"""The contract of every source of images, and a subset of one."""

from __future__ import annotations

import functools
import hashlib
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from meanshift.data.file_access import with_timeout
from meanshift.runtime import rng


class UnreadableSample(Exception):
    """An image that cannot be read: `title` names it, `reason` says what is wrong with it."""

    def __init__(self, title: str, reason: str) -> None:
        super().__init__(title, reason)
        self.title = title
        self.reason = reason


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
        """The name of an image for a person: that of its file, or its number."""

    @abstractmethod
    def read(self, index: int) -> UInt8[Tensor, "channels height width"]:
        """Read one image as RGB; raises `UnreadableSample`."""

    @property
    def uniform(self) -> bool:
        """Whether all images have one size and lie in memory or in a mapped file.

        Such a source has `read_batch`, and needs no loader workers.
        """
        return False

    def read_batch(
        self, indices: Int[Tensor, " batch"]
    ) -> UInt8[Tensor, "batch height width channels"]:
        """Read many images at once; only sources that are `uniform` can."""
        raise TypeError(f"{self.name} is not uniform: read its {len(indices)} images one by one")

    @property
    def blockwise(self) -> bool:
        """Whether images are cheap to read only in blocks; `order` then mixes few at a time."""
        return False

    def order(self, seed: int, epoch: int) -> Int[Tensor, " n"]:
        """The order in which an epoch visits the images: a pure function of its address."""
        return rng.permutation(seed, epoch, len(self))

    def subset(self, indices: Int[Tensor, " m"]) -> Subset:
        """A source of only these images, in this order."""
        return Subset(self, indices)

    def fingerprint(self) -> str:
        """Changes when images are added, removed, renamed or relabeled."""
        digest = hashlib.sha256()
        for index in range(len(self)):
            digest.update(self.title(index).encode("utf-8", "surrogateescape") + b"\n")
        if self.labels is not None:
            digest.update(self.labels.numpy().tobytes())
        return digest.hexdigest()[:16]

    def content_fingerprint(self) -> str:
        """Changes also when an image is rewritten; a cache of features depends on it."""
        return self.fingerprint()


@dataclass(eq=False)
class Subset(Source):
    """Some images of another source."""

    source: Source
    indices: Int[Tensor, " m"]

    def __post_init__(self) -> None:
        self.name = self.source.name
        self.classes = self.source.classes
        self.labels = None if self.source.labels is None else self.source.labels[self.indices]

    def __len__(self) -> int:
        return len(self.indices)

    def title(self, index: int) -> str:
        return self.source.title(int(self.indices[index]))

    def read(self, index: int) -> UInt8[Tensor, "channels height width"]:
        return self.source.read(int(self.indices[index]))

    @property
    def uniform(self) -> bool:
        return self.source.uniform

    def read_batch(
        self, indices: Int[Tensor, " batch"]
    ) -> UInt8[Tensor, "batch height width channels"]:
        return self.source.read_batch(self.indices[indices])

    @property
    def blockwise(self) -> bool:
        return self.source.blockwise

    def order(self, seed: int, epoch: int) -> Int[Tensor, " n"]:
        """Its own; that of the source without the other images where the source has blocks."""
        if not self.blockwise:
            return rng.permutation(seed, epoch, len(self))
        return self.source.order(seed, epoch).argsort()[self.indices].argsort(stable=True)

    def fingerprint(self) -> str:
        return self._with_indices(self.source.fingerprint())

    def content_fingerprint(self) -> str:
        return self._with_indices(self.source.content_fingerprint())

    def _with_indices(self, fingerprint: str) -> str:
        content = fingerprint.encode() + self.indices.numpy().tobytes()
        return hashlib.sha256(content).hexdigest()[:16]


def block_order(
    seed: int, epoch: int, sizes: Int[Tensor, " blocks"], *, window: int
) -> Int[Tensor, " n"]:
    """An epoch's order in which the images of only `window` blocks are mixed at a time.

    The blocks are shuffled, every `window` neighbors of them form a group, and the images of each
    group are shuffled together.
    """
    place = rng.permutation(seed, epoch, len(sizes)).argsort()
    group = (place // window).repeat_interleave(sizes)
    # The second word: the first one of the same number has already placed a block.
    rank = rng.bits(seed, epoch, torch.arange(len(group)), rng.ORDER, 2)[:, 1]
    mixed = rank.argsort(stable=True)
    return mixed[group[mixed].argsort(stable=True)]


def file_signature(files: Sequence[Path]) -> str:
    """Changes when one of these files is rewritten or replaced by a similar one.

    Archives of uncompressed images can give all files the same size and date, so the beginnings
    of some thousand files, spread over the list, are read as well.
    """
    digest = hashlib.sha256()
    every = 1 + len(files) // 1000
    to_sign = [(file, index % every == 0) for index, file in enumerate(files)]
    for start in range(0, len(files), 100):
        part = to_sign[start : start + 100]
        try:
            digest.update(with_timeout(functools.partial(_sign, part), files[start]))
        except TimeoutError:
            digest.update(b"nothing\n")
    return digest.hexdigest()


def _sign(files: Sequence[tuple[Path, bool]]) -> bytes:
    """Name, size and date of each file, and the beginning of those that are to be read."""
    content = b""
    for file, read in files:
        try:
            status = file.stat()
            content += os.fsencode(file.name)
            content += f" {status.st_size} {status.st_mtime_ns}\n".encode()
            if read and stat.S_ISREG(status.st_mode):
                with file.open("rb") as opened:
                    content += opened.read(65_536)
        except OSError:  # unreadable, as its image will be
            content += b"nothing\n"
    return content
