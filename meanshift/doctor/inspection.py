"""What a source holds and what is broken in it, seen in a random sample of bounded size."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.nn import functional as F

from meanshift.config import Data, SampleSpec
from meanshift.data import Source, UnreadableSample
from meanshift.data.convert import convert
from meanshift.data.file_access import split_name
from meanshift.data.measure import measure

T = TypeVar("T")

SAMPLES = 2000
"""samples that are looked at, of all splits together"""
SECONDS = 8.0
"""time for that, unless a number of samples is asked for"""
NEAR = 0.99
"""correlation of two thumbnails, in gray, from which two images are near duplicates"""
SHOWN = 3
"""examples of each finding"""
_SIDE = 16  # of a thumbnail


@dataclass(frozen=True)
class Finding:
    """Samples with one defect, of those that were looked at."""

    count: int = 0
    examples: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Split:
    """One split of a source."""

    samples: int
    looked_at: int
    unreadable: int
    classes: dict[str, int]
    """samples of each class; empty without labels"""
    groups: int
    """0 where samples have no groups"""


@dataclass(frozen=True)
class Inspection:
    """What is there, and what is broken."""

    spec: SampleSpec
    splits: dict[str, Split]
    sizes: list[tuple[int, ...]]
    """the smallest, the median and the largest size: height and width, or length"""
    gray_as_rgb: bool
    """whether all images have three channels, and all three are the same"""
    readable: list[int]
    """training samples that were looked at and can be read"""
    unreadable: Finding
    constant: Finding
    duplicates: Finding
    """samples that are equal to another one of their split"""
    near_duplicates: Finding
    leaks: Finding
    """samples that are also in another split"""
    near_leaks: Finding


@dataclass(frozen=True)
class _Look:
    """What is kept of a sample that was read."""

    split: str
    index: int
    title: str
    size: tuple[int, ...]
    digest: bytes
    constant: bool
    gray_as_rgb: bool
    thumbnail: Float[Tensor, " pixels"] | None
    """zero mean and unit length; none for a constant image and for what is no image"""

    @property
    def part(self) -> str:
        """The side of a split: `labeled` and `train_small` are parts of `train`."""
        of_train = self.split == "labeled" or split_name(self.split) == "train"
        return "train" if of_train else self.split


def inspect(splits: Mapping[str, Source], data: Data, *, samples: int = 0) -> Inspection:
    """Look at samples of every split, all of them where there are few.

    Without a number of `samples` it ends after some seconds.
    """
    spec = measure(splits["train"], data)
    looks = list[_Look]()
    errors = list[tuple[str, UnreadableSample]]()
    facts = dict[str, Split]()
    quotas = _quotas(splits, samples or SAMPLES)
    for name, source in splits.items():
        seconds = math.inf if samples else SECONDS * quotas[name] / sum(quotas.values())
        chosen = source.order(0, 0)[: quotas[name]].tolist()
        read, unreadable = _look_at(name, source, chosen, spec, seconds=seconds)
        looks += read
        errors += [(name, error) for error in unreadable]
        facts[name] = _describe(source, len(read) + len(unreadable), len(unreadable))
    sizes = sorted((look.size for look in looks), key=lambda size: (torch.Size(size).numel(), size))
    constant = [look for look in looks if look.constant]
    copies = _exact_copies(looks)
    near = _near_copies(looks) if spec.kind == "image" else []
    several = len(splits) > 1
    return Inspection(
        spec=spec,
        splits=facts,
        sizes=[sizes[0], sizes[len(sizes) // 2], sizes[-1]] if sizes else [],
        gray_as_rgb=bool(looks) and all(look.gray_as_rgb for look in looks),
        readable=sorted(look.index for look in looks if look.split == "train"),
        unreadable=_finding(errors, lambda each: f"{each[1].title} ({each[1].reason})"),
        constant=_finding(constant, lambda look: _title(look, several)),
        duplicates=_pairs(copies, several, across=False),
        near_duplicates=_pairs(near, several, across=False),
        leaks=_pairs(copies, several, across=True),
        near_leaks=_pairs(near, several, across=True),
    )


def _quotas(splits: Mapping[str, Source], samples: int) -> dict[str, int]:
    """Samples of each split: an equal share, and what a small split leaves over to the others."""
    quotas = dict[str, int]()
    by_size = sorted(splits, key=lambda name: len(splits[name]))
    for done, name in enumerate(by_size):
        share = (samples - sum(quotas.values())) // (len(splits) - done)
        quotas[name] = min(len(splits[name]), share)
    return quotas


def _look_at(
    split: str, source: Source, indices: Sequence[int], spec: SampleSpec, *, seconds: float
) -> tuple[list[_Look], list[UnreadableSample]]:
    """Read samples until the time is over."""
    start = time.perf_counter()
    looks = list[_Look]()
    unreadable = list[UnreadableSample]()
    for index in indices:
        try:
            stored = source.read(index)
            convert(stored, spec)
        except UnreadableSample as error:
            unreadable.append(error)
        except ValueError as error:
            unreadable.append(UnreadableSample(source.title(index), str(error)))
        else:
            looks.append(_look(split, index, source.title(index), stored, spec))
        if time.perf_counter() - start > seconds:
            break
    return looks, unreadable


def _look(
    split: str, index: int, title: str, stored: Shaped[Tensor, "channels *size"], spec: SampleSpec
) -> _Look:
    constant = bool(stored.amin() == stored.amax())
    image = spec.kind == "image"
    rgb = image and len(stored) == 3
    header = f"{stored.dtype} {tuple(stored.shape)}".encode()
    return _Look(
        split=split,
        index=index,
        title=title,
        size=tuple(stored.shape[1:]),
        digest=hashlib.blake2b(header + stored.contiguous().numpy().tobytes()).digest(),
        constant=constant,
        gray_as_rgb=rgb and bool((stored[0] == stored[1:]).all()),
        thumbnail=_thumbnail(stored) if image and not constant else None,
    )


def _thumbnail(stored: Shaped[Tensor, "channels height width"]) -> Float[Tensor, " pixels"]:
    step = max(1, min(stored.shape[1:]) // 64)
    gray = stored[:, ::step, ::step].float().mean(0, keepdim=True)
    pixels = F.adaptive_avg_pool2d(gray, _SIDE).flatten()
    return F.normalize(pixels - pixels.mean(), dim=0)


def _describe(source: Source, looked_at: int, unreadable: int) -> Split:
    classes = dict[str, int]()
    if source.labels is not None and source.labeled:
        known = source.labels[source.labels >= 0]
        counts = known.bincount(minlength=len(source.classes)).tolist()
        classes = dict(zip(source.classes, counts, strict=True))
    groups = 0 if source.groups is None else len(source.groups.unique())
    return Split(len(source), looked_at, unreadable, classes, groups)


def _exact_copies(looks: Sequence[_Look]) -> list[tuple[_Look, _Look]]:
    """Each sample that is equal to an earlier one, once within its part and once across parts."""
    pairs = list[tuple[_Look, _Look]]()
    first = dict[bytes, dict[str, _Look]]()
    for look in looks:
        parts = first.setdefault(look.digest, {})
        if look.part not in parts and parts:
            pairs.append((next(iter(parts.values())), look))
        elif look.part in parts and parts[look.part].split == look.split:
            pairs.append((parts[look.part], look))
        parts.setdefault(look.part, look)
    return pairs


def _near_copies(looks: Sequence[_Look]) -> list[tuple[_Look, _Look]]:
    """Each image that is nearly an earlier one, and not the same, within and across parts."""
    pairs = list[tuple[_Look, _Look]]()
    chosen = [look for look in looks if look.thumbnail is not None]
    if not chosen:
        return pairs
    thumbnails = torch.stack([look.thumbnail for look in chosen if look.thumbnail is not None])
    split, part, digest = (
        _numbered([getattr(look, name) for look in chosen]) for name in ("split", "part", "digest")
    )
    for rows in torch.arange(len(chosen)).split(1000):
        similar = thumbnails[rows] @ thumbnails.T >= NEAR
        earlier = torch.arange(len(chosen)) < rows[:, None]
        similar &= earlier & (digest != digest[rows, None])
        across = part != part[rows, None]
        for kind in (across, split == split[rows, None]):
            found = similar & kind
            for row in found.any(1).nonzero()[:, 0].tolist():
                first = int(found[row].int().argmax())
                pairs.append((chosen[first], chosen[int(rows[row])]))
    return pairs


def _numbered(names: Sequence[Hashable]) -> Int[Tensor, " n"]:
    """The number of each name, in the order in which they come."""
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return torch.tensor([numbers[name] for name in names])


def _pairs(pairs: Sequence[tuple[_Look, _Look]], several: bool, *, across: bool) -> Finding:
    chosen = [pair for pair in pairs if (pair[0].part != pair[1].part) == across]
    return _finding(chosen, lambda pair: " = ".join(_title(look, several) for look in pair))


def _title(look: _Look, several: bool) -> str:
    return f"{look.split}: {look.title}" if several else look.title


def _finding(found: Sequence[T], describe: Callable[[T], str]) -> Finding:
    return Finding(len(found), [describe(each) for each in found[:SHOWN]])
