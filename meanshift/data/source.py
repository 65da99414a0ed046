"""The contract of every source of images, and a subset of one."""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from meanshift.config import SampleSpec
from meanshift.config.samples import Kind
from meanshift.data.convert import convert
from meanshift.data.file_access import with_timeout
from meanshift.data.measure import measure
from meanshift.data.unreadable import UnreadableSample
from meanshift.runtime import rng


class Source(ABC):
    """Samples by index, in a fixed order, with labels where they exist (-1 is unknown).

    `read` gives them as they are stored, `sample` as a network takes them (`sample_spec`).
    """

    name: str
    labels: Int[Tensor, " n"] | None
    classes: list[str]
    groups: Int[Tensor, " n"] | None = None
    """images of one group (a patient, a video) have one number, and stay on one side of a split"""
    kind: Kind = "image"
    sampling_rate: int = 0
    """of sound in Hz; 0 where it is not known"""

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
    def read(self, index: int) -> Shaped[Tensor, "channels *size"]:
        """Read one sample as it is stored, whatever its type; raises `UnreadableSample`."""

    def prefetch(self, indices: Sequence[int]) -> None:  # noqa: B027
        """Request the bytes of samples together that are read next, where they are far away."""

    def sample(self, index: int) -> Shaped[Tensor, "channels *size"]:
        """Read one sample as `sample_spec` says: bytes, or floats in [0, 1]."""
        stored = self.read(index)
        try:
            return convert(stored, self.sample_spec)
        except ValueError as error:
            raise UnreadableSample(self.title(index), str(error)) from None

    @functools.cached_property
    def sample_spec(self) -> SampleSpec:
        """What the samples are: measured on some of them, unless `with_spec` has set it."""
        return measure(self)

    def with_spec(self, spec: SampleSpec) -> Source:
        """The same source with its samples converted to another specification."""
        copies: dict[SampleSpec, Source] = self.__dict__.setdefault("_copies", {})
        if spec not in copies:
            copies[spec] = self._converted(spec)
        return copies[spec]

    def adapted(self, spec: SampleSpec, network: str) -> Source:
        """The same source as a network takes it that was trained on samples of `spec`.

        What was trained on 8-bit images takes others scaled by their own range, and the other way
        round; floats from 0 to 1 count as bytes divided by 255, as in torchvision.
        """
        stored = self.sample_spec
        gray_or_rgb = spec.kind == "image" and {spec.channels, stored.channels} <= {1, 3}
        if spec.kind != stored.kind or (spec.channels != stored.channels and not gray_or_rgb):
            raise ValueError(
                f"{network}: takes {spec.kind}s of {spec.channels} channels, and {self.name} has "
                f"{stored.kind}s of {stored.channels}; need weights that were trained on such"
            )
        if spec.sampling_rate and stored.sampling_rate not in (0, spec.sampling_rate):
            raise ValueError(
                f"{network}: takes sound of {spec.sampling_rate} Hz, and {self.name} has "
                f"{stored.sampling_rate} Hz; convert the files (ffmpeg -ar {spec.sampling_rate})"
            )
        if (spec.dtype == "uint8") != (stored.dtype == "uint8") and spec.kind == "image":
            low, high = stored.range
            scaled = stored.dtype.startswith("float") and low >= 0 and high <= 1
            spec = dataclasses.replace(
                stored,
                channels=spec.channels,
                range=(0.0, 1.0) if scaled else stored.range,
                mean=spec.mean,
                std=spec.std,
            )
        return self.with_spec(spec)

    def _converted(self, spec: SampleSpec) -> Source:
        converted = copy.copy(self)
        converted.__dict__ |= {"sample_spec": spec, "_copies": {spec: converted}}
        return converted

    @property
    def uniform(self) -> bool:
        """Whether all images have one size and lie in memory or in a mapped file.

        Such a source has `read_batch`, and needs no loader workers.
        """
        return False

    def read_batch(self, indices: Int[Tensor, " batch"]) -> Shaped[Tensor, "batch *size channels"]:
        """Read many samples at once, channels last; only sources that are `uniform` can."""
        raise TypeError(f"{self.name} is not uniform: read its {len(indices)} images one by one")

    def sample_batch(
        self, indices: Int[Tensor, " batch"]
    ) -> Shaped[Tensor, "batch *size channels"]:
        """Read many samples at once as `sample_spec` says, channels last."""
        try:
            return convert(self.read_batch(indices), self.sample_spec, channel_dim=-1)
        except ValueError as error:
            raise ValueError(f"{self.name}: {self._first_unreadable(indices)} {error}") from None

    def _first_unreadable(self, indices: Int[Tensor, " batch"]) -> str:
        for index in indices.tolist():
            try:
                self.sample(index)
            except UnreadableSample as error:
                return error.title
        return ""

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
        for start in range(0, len(self), 4096):  # one call for many titles
            indices = range(start, min(start + 4096, len(self)))
            titles = "".join([f"{self.title(index)}\n" for index in indices])
            digest.update(titles.encode("utf-8", "surrogateescape"))
        if self.labels is not None:
            digest.update(self.labels.numpy().tobytes())
        return digest.hexdigest()[:16]

    def content_fingerprint(self) -> str:
        """Changes also when an image is rewritten; a cache of features depends on it."""
        return self.fingerprint()


@dataclasses.dataclass(eq=False)
class Subset(Source):
    """Some images of another source."""

    source: Source
    indices: Int[Tensor, " m"]

    def __post_init__(self) -> None:
        self.kind = self.source.kind
        self.sampling_rate = self.source.sampling_rate
        self.name = self.source.name
        self.classes = self.source.classes
        self.labels = None if self.source.labels is None else self.source.labels[self.indices]
        self.groups = None if self.source.groups is None else self.source.groups[self.indices]

    def __len__(self) -> int:
        return len(self.indices)

    def title(self, index: int) -> str:
        return self.source.title(int(self.indices[index]))

    def read(self, index: int) -> Shaped[Tensor, "channels *size"]:
        return self.source.read(int(self.indices[index]))

    def prefetch(self, indices: Sequence[int]) -> None:
        self.source.prefetch(self.indices[list(indices)].tolist())

    @property
    def sample_spec(self) -> SampleSpec:
        return self.source.sample_spec

    def _converted(self, spec: SampleSpec) -> Source:
        converted = copy.copy(self)
        converted.source = self.source.with_spec(spec)
        converted.__dict__["_copies"] = {spec: converted}
        return converted

    @property
    def uniform(self) -> bool:
        return self.source.uniform

    def read_batch(self, indices: Int[Tensor, " batch"]) -> Shaped[Tensor, "batch *size channels"]:
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
