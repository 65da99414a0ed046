"""What is judged: frozen weights on images, with features made once, and a card a figure."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from meanshift.config import Config
from meanshift.data import (
    Source,
    Subset,
    labeled_only,
    open_source,
    same_classes,
    split_off,
    train_and_validation,
)
from meanshift.models.features import cached_features, extract_features
from meanshift.models.weights import RawPixels, Weights, fingerprint
from meanshift.runtime import rng
from meanshift.runtime.device import pick_device, pick_precision
from meanshift.runtime.run_directory import RunDirectory, atomic_writer, environment


@dataclass(frozen=True)
class FeatureSet:
    """Images that could be read and their frozen features, row by row."""

    source: Source
    features: Float[Tensor, "n features"]

    @property
    def labels(self) -> Int[Tensor, " n"]:
        assert self.source.labels is not None
        return self.source.labels

    def take(self, cut: Subset) -> FeatureSet:
        """A cut of this part's source, with its rows."""
        assert cut.whole is self.source
        return FeatureSet(cut, self.features[cut.indices])


@dataclass(frozen=True)
class Result:
    """The figures of one protocol, what exactly was done, and what is worth keeping of it."""

    name: str
    figures: dict[str, float]
    settings: dict[str, Any]
    arrays: dict[str, Any] = field(default_factory=dict)
    image: Any = None
    """a matplotlib figure, and what it shows in words"""
    text: str = ""
    card: dict[str, Any] = field(default_factory=dict)
    """what its card says beside or instead of the usual"""


class EncoderContext:
    """Frozen weights, where their results belong, and how they are computed."""

    def __init__(
        self,
        weights: Weights,
        *,
        seed: int = 0,
        image_size: int = 0,
        resize: int = 0,
        workers: int = 0,
        device: str = "auto",
        precision: str = "float32",
        home: Path | None = None,
    ) -> None:
        self.weights, self.workers, self.resize = weights, workers, resize
        self.seed = seed
        self.name = "-".join(filter(None, [weights.name, f"seed{seed}" if seed else ""]))
        self.image_size = image_size or weights.image_size
        self.home = home or weights.home
        self.device = pick_device(device)
        self.precision = pick_precision(precision, self.device)
        self.backbone: nn.Module = weights.backbone.to(self.device)

    @functools.cached_property
    def fingerprint(self) -> str:
        return fingerprint(self.backbone)

    def part(self, source: Source, *, resize: int = 0, bicubic: bool = False) -> FeatureSet:
        """Features of a source, extracted once; without the images that cannot be read."""
        features, kept = cached_features(
            self.backbone,
            source,
            weights=self.fingerprint,
            folder=self.home / "features",
            image_size=self.image_size,
            resize=resize or self.resize,
            bicubic=bicubic,
            device=self.device,
            precision=self.precision,
            workers=self.workers,
        )
        return FeatureSet(source if len(kept) == len(source) else source.take(kept), features)

    def parts(self, *sources: Source, resize: int = 0, bicubic: bool = False) -> list[FeatureSet]:
        """Features of several parts: of their whole, to be shared, where they are most of it."""
        based = [_based(source) for source in sources]
        made: dict[int, FeatureSet] = {}
        for base, _ in based:
            used = sum(len(rows) for other, rows in based if other is base)
            if id(base) not in made and used >= 0.9 * len(base):
                made[id(base)] = self.part(base, resize=resize, bicubic=bicubic)
        found = []
        for source, (base, rows) in zip(sources, based, strict=True):
            if id(base) not in made:
                found.append(self.part(source, resize=resize, bicubic=bicubic))
                continue
            whole = made[id(base)]
            place = torch.full((len(base),), -1)  # of an image's row; unreadable ones have none
            _, read = _based(whole.source)
            place[read] = torch.arange(len(read))
            kept = place[rows] >= 0
            found.append(FeatureSet(base.take(rows[kept]), whole.features[place[rows[kept]]]))
        return found

    def card(self, result: Result) -> dict[str, Any]:
        """What must stand beside a figure: protocol, data, weights, seed, versions, date."""
        here = environment()
        return {
            "protocol": result.name,
            "settings": result.settings,
            **self.told(),
            "weights": self.fingerprint,
            "judged": f"{self.weights.spec}: {self.weights.title}",
            "seed": self.seed,
            "image_size": self.image_size,
            "resize": self.resize or "256/224 of image_size; small images as they are",
            "precision": str(self.precision),
            "device": str(self.device),
            "versions": here["versions"],
            "command": here["command"],
            "date": here["date"],
        } | result.card

    def told(self) -> dict[str, Any]:
        """What a card says of the images."""
        return {}

    def save(self, result: Result) -> Path:
        """Write `results/<name>.json`, with arrays and image beside it, and return its path.

        Of other weights than a run's newest, or other images than its own, the name says so.
        """
        name = "-".join(filter(None, [result.name, self.name]))
        results = self.home / "results"
        results.mkdir(parents=True, exist_ok=True)
        if result.arrays:
            with atomic_writer(results / f"{name}.npz", shared=True) as file:
                np.savez_compressed(file, **result.arrays)
        if result.image is not None:
            from meanshift.viz import style

            title = f"{result.name}: {self.weights.spec}"
            style.save(
                result.image, results / name, title=title, text=result.text, suffixes=[".png"]
            )
        whole: Mapping[str, Any] = {"figures": result.figures, "card": self.card(result)}
        return RunDirectory(self.home).save_result(name, whole)


class EvaluationContext(EncoderContext):
    """Frozen weights on the images of a source. Features are made once, whoever asks first.

    >>> from meanshift.evaluation import knn
    >>> subject = Subject(load_weights("runs/demo"), "sample")
    >>> result = knn.evaluate(subject, ks=[1, 20])
    >>> subject.save(result)
    """

    def __init__(
        self,
        weights: Weights,
        data: str | None = None,
        *,
        like: EvaluationContext | None = None,
        labels: Path | None = None,
        split: str = "",
        seed: int | None = None,
        **computed: Any,
    ) -> None:
        config = weights.config
        if data is None and like is not None:
            data = like.data
        if data is None and config is None:
            raise ValueError(f"{weights.title}: say on which images, with --data SOURCE")
        usual = config.train.seed if config else like.seed if like else 0
        super().__init__(weights, seed=usual if seed is None else seed, **computed)
        self.data: str = data if data is not None else config.data.source if config else ""
        own = config if config and _same(self.data, config.data.source) else None
        self.sources, self.split = _parts(self.data, labels, split, own)
        words = [weights.name, "" if own else re.sub(r"\W+", "-", Path(self.data).stem), split]
        if like is not None:  # side by side: the same images, cut in the same way
            others = _held(self) != _held(like)
            self.sources, self.split = like.sources, like.split
            if own and others:
                self.split += "; this run held out others, so it has seen some of them unlabeled"
                warnings.warn(f"{weights.spec}: {self.split}", stacklevel=2)
                words.append("compared")
        words += [f"seed{self.seed}"] if self.seed != usual else []
        self.name = "-".join(filter(None, words))
        self.labels_file = labels
        if isinstance(self.backbone, RawPixels):
            self.backbone.center(self._mean_pixels())

    @functools.cached_property
    def train(self) -> FeatureSet:
        return self.part(self.sources[0])

    @functools.cached_property
    def test(self) -> FeatureSet:
        if self.sources[1] is None:
            raise ValueError(
                f"{self.data}: no labels, so nothing to judge by; give class folders, a CSV with "
                f"--labels FILE (file,label), or another --data; `cluster` needs none"
            )
        return self.part(self.sources[1])

    @property
    def classes(self) -> int:
        """Outputs that a classifier of these labels needs."""
        _ = self.test  # says what is missing
        return int(torch.cat([self.train.labels, self.test.labels]).max()) + 1

    def _mean_pixels(self) -> Tensor:
        """The mean of (some thousand) training images."""
        train = self.sources[0]
        some = train.take(rng.choice(0, len(train), 10_000, rng.PROBE))
        size, resize = self.image_size, self.resize
        rows = extract_features(
            self.backbone, some, image_size=size, resize=resize, device=self.device
        )
        return rows.mean(0)

    def told(self) -> dict[str, Any]:
        asked = [name for name in ("train", "test") if name in self.__dict__]  # and so made
        parts: dict[str, FeatureSet] = {name: getattr(self, name) for name in asked}
        whole = dict(zip(("train", "test"), self.sources, strict=True))
        return {
            "data": self.data,
            "split": self.split,
            "sizes": {name: len(part.source) for name, part in parts.items()},
            "unreadable": sum(len(whole[name] or ()) - len(parts[name].source) for name in parts),
            "labels": str(self.labels_file) if self.labels_file else "the source's own",
        }


def _based(source: Source) -> tuple[Source, Int[Tensor, " n"]]:
    """What a source is cut from in the end, and which of its images it holds."""
    rows = torch.arange(len(source))
    while isinstance(source, Subset):
        rows, source = source.indices[rows], source.whole
    return source, rows


def _held(subject: EvaluationContext) -> str:
    """Which images are judged on."""
    test = subject.sources[1]
    return "" if test is None else test.fingerprint()


def _same(one: str, other: str) -> bool:
    return Path(one).expanduser().absolute() == Path(other).expanduser().absolute()


def _parts(
    spec: str, labels: Path | None, split: str, own: Config | None
) -> tuple[tuple[Source, Source | None], str]:
    """What to learn the labels from, what to judge on, and in words how the two were made.

    A run is judged on the images that it held out, whatever else is asked for.
    """
    splits = dict(open_source(spec, labels=labels))
    whole, seed, seen = splits.pop("train"), own.train.seed if own else 0, ""
    train = splits.pop("labeled", whole)
    if not train.labeled:
        return (whole, None), "one part, no labels"
    if split and (split not in splits or not splits[split].labeled):
        usable = ", ".join(name for name in splits if splits[name].labeled) or "only train"
        raise ValueError(f"--split: {spec} has no labeled split {split!r}; it has {usable}")
    if own and not split and train is whole:
        first, held = train_and_validation(spec, own.data.validation, seed=seed)  # as the run did
        if isinstance(first, Subset) and isinstance(held, Subset):
            parts = whole.take(first.indices), whole.take(held.indices)
            if all(part.labeled for part in parts):
                told = f"held out as in the run, {own.data.validation}, seed {seed}"
                return (labeled_only(parts[0]), labeled_only(parts[1])), told
        split = str(own.data.validation) if own.data.validation in splits else ""
        seen = "; the run has seen them unlabeled" if held is None else ""
    name = split or next((name for name in splits if splits[name].labeled), "")
    if name:
        test = same_classes(splits[name], train)
        return (labeled_only(train), labeled_only(test)), f"the source's own train and {name}"
    train = labeled_only(train)
    share = 0.1 if len(train) >= 100 else 0.25
    told = f"{share:.0%} held out, stratified, seed {seed}{seen}"
    return split_off(train, share, seed=seed), told
