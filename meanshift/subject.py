"""What is judged: frozen weights on pictures, with features made once, and a card a figure."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from meanshift.data import Cut, Source, hold_out, open_source, same_classes, train_and_held_out
from meanshift.features import stored
from meanshift.journal import Journal, environment, whole_file
from meanshift.machine import pick_device, pick_precision
from meanshift.weights import Weights, fingerprint


@dataclass(frozen=True)
class Part:
    """Pictures that could be read and their frozen features, row by row."""

    source: Source
    features: Float[Tensor, "n features"]

    @property
    def labels(self) -> Int[Tensor, " n"]:
        assert self.source.labels is not None
        return self.source.labels

    def take(self, cut: Cut) -> Part:
        """A cut of this part's source, with its rows."""
        assert cut.whole is self.source
        return Part(cut, self.features[cut.indices])


@dataclass(frozen=True)
class Result:
    """The figures of one protocol, what exactly was done, and arrays worth keeping."""

    name: str
    figures: dict[str, float]
    settings: dict[str, Any]
    arrays: dict[str, Tensor] = field(default_factory=dict)


class Subject:
    """What is judged: frozen weights on a source. Features are made once, whoever asks first.

    >>> from meanshift.evaluate import knn
    >>> subject = Subject(load_weights("runs/demo"), "sample")
    >>> result = knn.evaluate(subject, ks=[1, 20])
    >>> subject.save(result)
    """

    def __init__(
        self,
        weights: Weights,
        data: str | None = None,
        *,
        like: Subject | None = None,
        labels: Path | None = None,
        split: str = "",
        seed: int | None = None,
        image_size: int = 0,
        resize: int = 0,
        workers: int = 0,
        device: str = "auto",
        home: Path | None = None,
    ) -> None:
        config = weights.config
        if like is not None:  # side by side: the same pictures, cut in the same way
            data, seed = like.data, like.seed
        if data is None and config is None:
            raise ValueError(f"{weights.title}: say on which pictures, with --data SOURCE")
        self.weights, self.workers, self.resize = weights, workers, resize
        self.data: str = data if data is not None else config.data.source if config else ""
        self.own = config is not None and _same(self.data, config.data.source)
        self.seed: int = seed if seed is not None else config.train.seed if config else 0
        self.image_size = image_size or weights.image_size
        self.home = home or weights.home
        self.device = pick_device(device)
        self.precision = pick_precision("auto", self.device)
        self.backbone: nn.Module = weights.backbone.to(self.device)
        self.fingerprint = fingerprint(weights.backbone)
        self.mean = torch.zeros(())
        if like is None:
            held_out = config.data.held_out if config is not None and self.own else "auto"
            self.sources, self.split = _parts(self.data, labels, split, held_out, self.seed)
        else:
            self.sources, self.split = like.sources, like.split

    @functools.cached_property
    def train(self) -> Part:
        return self._part(self.sources[0])

    @functools.cached_property
    def test(self) -> Part:
        if self.sources[1] is None:
            raise ValueError(
                f"{self.data}: no labels, so nothing to judge by; give class folders, a CSV with "
                f"--labels FILE (file,label), or another --data; `cluster` needs none"
            )
        return self._part(self.sources[1])

    @property
    def classes(self) -> int:
        _ = self.test  # says what is missing
        return int(torch.cat([self.train.labels, self.test.labels]).max()) + 1

    def _part(self, source: Source) -> Part:
        features, kept = stored(
            self.backbone,
            source,
            weights=self.fingerprint,
            folder=self.home / "features",
            image_size=self.image_size,
            resize=self.resize,
            device=self.device,
            precision=self.precision,
            workers=self.workers,
        )
        kept_source = source if len(kept) == len(source) else source.take(kept)
        if self.weights.centred:
            if source is self.sources[0]:
                self.mean = features.mean(0)
            else:
                _ = self.train
            features = features - self.mean
        return Part(kept_source, features)

    def card(self, result: Result) -> dict[str, Any]:
        """What must stand beside a figure: protocol, data, weights, seed, versions, date."""
        here = environment()
        parts = {"train": self.train} | ({} if self.sources[1] is None else {"test": self.test})
        return {
            "protocol": result.name,
            "settings": result.settings,
            "data": self.data,
            "split": self.split,
            "sizes": {name: len(part.source) for name, part in parts.items()},
            "unreadable": sum(map(len, filter(None, self.sources)))
            - sum(len(part.source) for part in parts.values()),
            "weights": self.fingerprint,
            "judged": f"{self.weights.spec}: {self.weights.title}",
            "seed": self.seed,
            "image_size": self.image_size,
            "resize": self.resize or "256/224 of image_size; small arrays as they are",
            "precision": str(self.precision),
            "versions": here["versions"],
            "command": here["command"],
            "date": here["date"],
        }

    def save(self, result: Result) -> Path:
        """Write `results/<name>.json`, with the arrays beside it, and return its path.

        Of other weights than a run's newest, or other pictures than its own, the name says so.
        """
        where = [] if self.own else [re.sub(r"\W+", "-", Path(self.data).stem)]
        name = "-".join([result.name, *filter(None, [self.weights.name]), *where])
        self.home.mkdir(parents=True, exist_ok=True)
        if result.arrays:
            (self.home / "results").mkdir(exist_ok=True)
            with whole_file(self.home / "results" / f"{name}.npz") as file:
                arrays: Any = {name: held.numpy() for name, held in result.arrays.items()}
                np.savez_compressed(file, **arrays)
        whole: Mapping[str, Any] = {"figures": result.figures, "card": self.card(result)}
        return Journal(self.home).save_result(name, whole)


def _same(one: str, other: str) -> bool:
    return Path(one).expanduser().absolute() == Path(other).expanduser().absolute()


def _parts(
    spec: str, labels: Path | None, split: str, held_out: float | str, seed: int
) -> tuple[tuple[Source, Source | None], str]:
    """What to learn the labels from, what to judge on, and in words how the two were made."""
    if held_out not in ("auto", "none", 0.0) and labels is None and not split:
        train, test = train_and_held_out(spec, held_out, seed=seed)
        told = f"held out as in the run: {held_out}, seed {seed}"
        if train.labels is None or test is None or test.labels is None:
            return (train, None), f"{told}; no labels"
        return (_labelled(train), _labelled(test)), told
    splits = dict(open_source(spec, labels=labels))
    whole = splits.pop("train")
    train = splits.pop("labelled", whole)
    if not _any_label(train):
        return (whole, None), "one part, no labels"
    if split and split not in splits:
        raise ValueError(f"{spec}: no split {split!r}; it has {', '.join(splits) or 'only train'}")
    name = split or next((name for name in splits if _any_label(splits[name])), "")
    if name:
        test = same_classes(splits[name], train)
        return (_labelled(train), _labelled(test)), f"the source's own train and {name}"
    train = _labelled(train)
    share = 0.1 if len(train) >= 100 else 0.25
    return hold_out(train, share, seed=seed), f"{share:.0%} held out, stratified, seed {seed}"


def _any_label(source: Source) -> bool:
    return source.labels is not None and bool((source.labels >= 0).any())


def _labelled(source: Source) -> Source:
    assert source.labels is not None
    known = source.labels >= 0
    return source if bool(known.all()) else source.take(known.nonzero()[:, 0])
