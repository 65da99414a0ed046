"""Which images train and which test: splits of a source, seeded and stratified."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from meanshift.config import Config
from meanshift.data.file_access import split_name
from meanshift.data.groups import draw_groups
from meanshift.data.open import SourceSpec, open_source, source_name
from meanshift.data.source import Source, Subset
from meanshift.runtime import rng


def train_and_validation(
    spec: SourceSpec, validation: float | str, *, seed: int, group: str = ""
) -> tuple[Source, Source | None]:
    """The images to train on and the validation images (None where there are none).

    `validation` and `group` are the settings `data.validation` and `data.group`.
    """
    return _divide(spec, open_source(spec, group=group), validation, seed=seed)


def _divide(
    spec: SourceSpec, opened: Mapping[str, Source], validation: float | str, *, seed: int
) -> tuple[Source, Source | None]:
    splits = dict(opened)
    train = splits.pop("train")
    if validation == "auto":
        if held_out := _held_out(splits):
            return train, match_classes(splits[held_out], train)
        validation = 0.1 if train.labels is not None and len(train) >= 100 else "none"
    if validation in ("none", 0.0):
        return train, None
    if isinstance(validation, float):
        return stratified_split(train, validation, seed=seed)
    if validation not in splits:
        raise ValueError(
            f"data.validation: {source_name(spec)} has no split {validation!r}; it has "
            f"{', '.join(splits) or 'only train'}: give one of them, a fraction such as 0.1, or "
            f"none"
        )
    return train, match_classes(splits[validation], train)


class EvaluationSplits(NamedTuple):
    """The images that an evaluation needs, and how they were chosen."""

    train: Source
    """images that a classifier is fitted to"""
    test: Source | None
    """images that the metrics are computed on; None for a source without labels"""
    description: str
    """one line for the card of a result"""
    seen: str = ""
    """added to it where the run may have trained on the test images"""


def evaluation_splits(
    spec: SourceSpec,
    *,
    labels: Path | None = None,
    group: str | None = None,
    split: str = "",
    run: Config | None = None,
    trained_on: str = "",
) -> EvaluationSplits:
    """The labeled train and test images of a source.

    `split` names the test split. `run` is the config of the evaluated run where it was trained on
    this source: it is tested on its own validation images unless another split is asked for.
    `trained_on` is the recorded fingerprint of its training images. If they are others today, the
    same split gives other images, so the validation images of the run are not known. `group` is as
    `data.group`, by default that of the run; with another one its validation images are not used.
    """
    run_group = "" if run is None else run.data.group
    group = run_group if group is None else group
    opened = open_source(spec, labels=labels, group=group)
    splits = dict(opened)
    unsupervised = splits.pop("train")
    train = splits.pop("labeled", unsupervised)
    if not train.labeled:
        return EvaluationSplits(unsupervised, None, "one part, no labels")
    usable = [name for name in splits if splits[name].labeled]
    if split and split not in usable:
        raise ValueError(
            f"--split: {source_name(spec)} has no labeled split {split!r}; it has "
            f"{', '.join(usable) or 'only train'}"
        )
    seed = 0 if run is None else run.train.seed
    changed = False
    if run is not None:
        as_in_run = labels is None and group == run_group
        parts, changed = _parts_of_run(spec, opened if as_in_run else None, run, trained_on)
        if group == run_group and parts and not split and not changed and train is unsupervised:
            # The labels may be those of another table, so the indices are applied to `train`.
            fit, test = (train.subset(part.indices) for part in parts)
            if fit.labeled and test.labeled:
                description = f"validation images of the run ({run.data.validation}), seed {seed}"
                return _labeled_splits(fit, test, description)
        if not split and run.data.validation in usable:
            split = str(run.data.validation)
    name = split or _held_out(usable)
    if name:
        named = match_classes(splits[name], train)
        chosen = _labeled_splits(train, named, f"the source's own train and {name}")
        seen = "the run may have seen some of them" if changed else ""
    else:
        chosen = _split_off(train, seed)
        seen = "" if run is None else "the run has seen them unlabeled"
    if changed:
        seen = f"the training images have changed since the run: {seen}"
        warnings.warn(
            f"{source_name(spec)}: {seen}; for images that it has not seen give another --data, or "
            f"restore the source as it was",
            stacklevel=2,
        )
    return chosen._replace(seen=seen)


def _labeled_splits(train: Source, test: Source, description: str) -> EvaluationSplits:
    """The labeled images of two splits; the number of the others is added to the description."""
    parts = labeled_only(train), labeled_only(test)
    unlabeled = len(train) + len(test) - sum(map(len, parts))
    return EvaluationSplits(*parts, description + _left_out(unlabeled))


def _split_off(train: Source, seed: int) -> EvaluationSplits:
    """Some of the labeled training images, for a source without a test split."""
    labeled = labeled_only(train)
    fraction = 0.1 if len(labeled) >= 100 else 0.25
    whole = "" if train.groups is None else ", groups kept whole"
    description = f"{fraction:.0%} split off for testing, stratified{whole}, seed {seed}"
    description += _left_out(len(train) - len(labeled))
    return EvaluationSplits(*stratified_split(labeled, fraction, seed=seed), description)


def _left_out(unlabeled: int) -> str:
    return f"; {unlabeled} unlabeled images left out" if unlabeled else ""


def _parts_of_run(
    spec: SourceSpec, opened: Mapping[str, Source] | None, run: Config, trained_on: str
) -> tuple[tuple[Subset, Subset] | None, bool]:
    """Training and validation images that a run has split off, and whether they have changed."""
    train: Source | None = None
    validation: Source | None = None
    with contextlib.suppress(ValueError):  # it can no longer be split as in the run
        opened = opened or open_source(spec, group=run.data.group)
        train, validation = _divide(spec, opened, run.data.validation, seed=run.train.seed)
    changed = bool(trained_on) and (train is None or train.fingerprint() != trained_on)
    if isinstance(train, Subset) and isinstance(validation, Subset):
        return (train, validation), changed
    return None, changed


def is_trained_on(spec: SourceSpec, run: Config, fingerprint: str) -> bool:
    """Whether a source has exactly the training images of a run, which have this fingerprint."""
    try:
        train, _ = train_and_validation(
            spec, run.data.validation, seed=run.train.seed, group=run.data.group
        )
    except (ValueError, OSError):  # it cannot even be split as in the run
        return False
    return train.fingerprint() == fingerprint


def _held_out(splits: Iterable[str]) -> str:
    """The first split that is not a part of train, as `train_small`; empty if there is none."""
    return next((name for name in splits if split_name(name) != "train"), "")


def match_classes(source: Source, train: Source) -> Source:
    """Renumber the labels of a source as those of the training images, by the classes' names."""
    if source.labels is None or train.labels is None or source.classes == train.classes:
        return source
    unknown = sorted(set(source.classes) - set(train.classes))
    if unknown:
        raise ValueError(
            f"{source.name}: has classes that {train.name} lacks: {', '.join(unknown[:5])}; "
            f"name the classes alike in both"
        )
    unknown_last = [*(train.classes.index(name) for name in source.classes), -1]
    source.labels = torch.tensor(unknown_last)[source.labels]
    source.classes = train.classes
    return source


def labeled_only(source: Source) -> Source:
    """Only the images whose class is known."""
    assert source.labels is not None
    known = source.labels >= 0
    return source if bool(known.all()) else source.subset(known.nonzero()[:, 0])


def stratified_split(source: Source, fraction: float, *, seed: int) -> tuple[Subset, Subset]:
    """Split a source in two with the proportions of its classes: (the rest, the fraction).

    Groups stay whole, so both the fraction and the proportions are then approximate.
    """
    one_class = torch.zeros(len(source), dtype=torch.int64)
    labels = one_class if source.labels is None else source.labels
    if source.groups is not None:
        return _split_groups(source, labels, source.groups, fraction, seed=seed)
    drawn = _draw(labels, [round(fraction * size) for size in _class_sizes(labels)], seed=seed)
    if not drawn.any():  # every class is too small for a fraction of its own
        drawn = _draw(one_class, [round(fraction * len(source))], seed=seed)
    if drawn.all() or not drawn.any():
        raise ValueError(
            f"{source.name}: a fraction of {fraction:g} of {len(source)} images leaves one side "
            f"empty; give more images, or another fraction"
        )
    return source.subset((~drawn).nonzero()[:, 0]), source.subset(drawn.nonzero()[:, 0])


def _split_groups(
    source: Source,
    labels: Int[Tensor, " n"],
    groups: Int[Tensor, " n"],
    fraction: float,
    *,
    seed: int,
) -> tuple[Subset, Subset]:
    drawn = draw_groups(labels, groups, fraction, seed=seed)
    if not drawn.any():
        raise ValueError(
            f"{source.name}: got {len(groups.unique())} groups, and each has all images of a "
            f"class; need two groups or more of a class to split them (--data.group)"
        )
    return source.subset((~drawn).nonzero()[:, 0]), source.subset(drawn.nonzero()[:, 0])


def describe_splits(splits: Mapping[str, Source | None]) -> str:
    """How many images of each class, and how many groups, the splits have, in words."""
    parts = (f"{name} {_describe(source)}" for name, source in splits.items() if source is not None)
    return "; ".join(parts)


def _describe(source: Source) -> str:
    """`600 images of 10 classes (60 each)`; the count of each class where the line stays short."""
    text = f"{len(source)} {source.kind}s"
    groups = "" if source.groups is None else f", {len(source.groups.unique())} groups"
    if source.labels is None or not source.labeled:
        return f"{text} without labels{groups}"
    known = source.labels[source.labels >= 0]
    counts = known.bincount(minlength=len(source.classes)).tolist()
    listed = ", ".join(f"{name}: {n}" for name, n in zip(source.classes, counts, strict=True))
    least = min(counts)
    if least == max(counts):
        listed = f"{least} each"
    elif len(listed) > 80:
        listed = f"{least} ({source.classes[counts.index(least)]}) to {max(counts)}"
    unlabeled = len(source) - len(known)
    rest = f", {unlabeled} unlabeled" if unlabeled else ""
    return f"{text} of {len(counts)} classes ({listed}){rest}{groups}"


def stratified_sample(
    labels: Int[Tensor, " n"], count: int, *, seed: int
) -> Int[Tensor, " chosen"]:
    """`count` indices drawn at random in the proportions of the classes, in rising order.

    Each class gets its quota rounded down, at least one while they last, and the largest
    remainders get what is left.
    """
    sizes = torch.tensor(_class_sizes(labels))
    if not len(sizes) <= count <= len(labels):
        raise ValueError(
            f"a subset of {count} images out of {len(labels)} of {len(sizes)} classes; need at "
            f"least one per class and at most all (--fractions, --counts)"
        )
    exact = sizes * (count / len(labels))
    quota = exact.floor().long().clamp(min=1)
    while int(quota.sum()) < count:
        quota[(exact - quota).masked_fill(quota >= sizes, -torch.inf).argmax()] += 1
    while int(quota.sum()) > count:  # many tiny classes took more than their quota
        quota[(exact - quota).masked_fill(quota <= 1, torch.inf).argmin()] -= 1
    return _draw(labels, quota.tolist(), seed=seed).nonzero()[:, 0]


def split_per_class(
    labels: Int[Tensor, " n"], *, count: int = 0, fraction: float = 0.0, seed: int
) -> tuple[Int[Tensor, " rest"], Int[Tensor, " drawn"]]:
    """Draw `count` images or a rounded `fraction` per class: (indices of the rest, those drawn)."""
    assert (count > 0) != (0 < fraction < 1), "either a count or a fraction"
    sizes = _class_sizes(labels)
    counts = [count or round(fraction * size) for size in sizes]
    for size, wanted in zip(sizes, counts, strict=True):
        if wanted >= size:
            raise ValueError(f"got a class of {size} images, need more to draw {wanted} from it")
    drawn = _draw(labels, counts, seed=seed)
    return (~drawn).nonzero()[:, 0], drawn.nonzero()[:, 0]


def _class_sizes(labels: Int[Tensor, " n"]) -> list[int]:
    sizes: list[int] = labels.unique(return_counts=True)[1].tolist()
    return sizes


def _draw(labels: Int[Tensor, " n"], counts: Sequence[int], *, seed: int) -> Bool[Tensor, " n"]:
    """A mask of images drawn at random, so many of each class, the classes in rising order."""
    rank = rng.uniform(seed, 0, torch.arange(len(labels)), rng.SPLIT, 1)[:, 0]
    drawn = torch.zeros(len(labels), dtype=torch.bool)
    for label, count in zip(labels.unique(), counts, strict=True):
        members = (labels == label).nonzero()[:, 0]
        drawn[members[rank[members].argsort(stable=True)[:count]]] = True
    return drawn
