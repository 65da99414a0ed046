"""How large a reproduction is: the data, the network and the epochs that all its runs share."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from meanshift.config import Config
from meanshift.config.recipes import recipe
from meanshift.data import open_source, train_and_validation
from meanshift.reproduce.studies import STUDIES, Study

_PAPER_STEP = {"method.same_image": "keep", "method.search_filled_only": False}
_CUT = {"data.validation": 0.1}  # settings are chosen on it, never on the test images


@dataclass(frozen=True)
class Scale:
    """A recipe and what is changed in it, the banks that are tried, and how a layer is trained."""

    about: str
    recipe: str
    changes: Mapping[str, Any]
    banks: tuple[int, ...]
    linear: tuple[str, ...] = ("--cached",)
    needs_data: bool = False

    @property
    def config(self) -> Config:
        return recipe(self.recipe).with_overrides(self.changes)


SCALES = {
    "paper": Scale(
        "ImageNet, ResNet-50, 200 epochs: the paper's own; give --data; not run here",
        "imagenet-r50",
        {"method.bank_size": 1_024_000},
        (256, 1_024, 4_096, 16_384, 65_536, 128_000, 1_024_000),
        linear=(),
        needs_data=True,
    ),
    "cifar10": Scale(
        "CIFAR-10, ResNet-18, 200 epochs: hours a run on a GPU; not run here",
        "cifar10-r18",
        {**_PAPER_STEP, **_CUT},
        (256, 1_024, 4_096, 16_384),
    ),
    "cpu": Scale(
        "CIFAR-10, ResNet-18 of half width with a stride-2 stem, 3 epochs: 15 minutes a run on one "
        "core without bfloat16",
        "cifar10-r18",
        {
            **_PAPER_STEP,
            **_CUT,
            "encoder.width": 0.5,
            "encoder.stem": "small-stride2",
            "train.epochs": 3,
            "train.batch_size": 128,
            "optim.warmup_epochs": 0,
            "train.monitor_every": 0,
        },
        (256, 2_048, 16_384),
    ),
    "smoke": Scale(
        "the shipped images at 16 pixels, one epoch of a tiny network: seconds a run, says nothing",
        "demo",
        {
            **_PAPER_STEP,
            **_CUT,
            "data.image_size": 16,
            "encoder.width": 0.125,
            "train.epochs": 1,
            "train.batch_size": 64,
            "train.snapshots": 2,
            "train.snapshot_images": 100,
            "method.k_schedule": "constant",
            "method.bank_size": 1_024,
        },
        (256, 1_024),
    ),
}


@dataclass(frozen=True, eq=False)
class Base:
    """What all runs of a reproduction share, with the user's own settings, and its images."""

    name: str
    scale: Scale
    config: Config
    images: int
    classes: int
    split: str
    """the labeled split that figures are of; "" is the cut held out from training"""

    @staticmethod
    def of(name: str, *, data: str | None, overrides: Mapping[str, Any]) -> Base:
        """A scale on its own images or others, with settings over the scale's."""
        if name not in SCALES:
            raise ValueError(f"--scale: got {name!r}, need one of {', '.join(SCALES)}")
        scale = SCALES[name]
        config = scale.config.with_overrides(overrides)
        if data is not None:
            config = config.with_overrides({"data.source": data})
        elif scale.needs_data:
            raise ValueError(f"--scale {name}: say where the images are, with --data SOURCE")
        source = config.data.source
        train, held = train_and_validation(source, config.data.validation, seed=config.train.seed)
        if held is None or not train.labeled or not held.labeled:
            raise ValueError(
                f"{source}: nothing to judge by; reproduce needs labels and images to hold out: "
                f"class folders, or a labels.csv, and --data.validation 0.1"
            )
        splits = dict(open_source(source))
        judged = [part for part in ("test", "val") if part in splits and splits[part].labeled]
        cut = isinstance(config.data.validation, float)
        part = judged[0] if cut and judged else ""
        return Base(name, scale, config, len(train), len(train.classes), part)

    @property
    def banks(self) -> tuple[int, ...]:
        """The sizes of bank to try: the scale's, and as many rows as there are images."""
        least = max(self.config.train.batch_size, self.config.method.k)
        sizes = [size for size in self.scale.banks if least <= size < self.images]
        if not sizes or sizes[-1] < self.images / 2:  # the paper's million is its data's size
            sizes.append(max(least, self.images))
        return tuple(sizes)

    def judge(self, protocol: str) -> tuple[str, ...]:
        """The words of `meanshift evaluate` for a protocol."""
        if protocol == "knn":
            return ()
        few = [share for share in (0.01, 0.1) if share * self.images >= self.classes]
        if protocol == "linear" or len(few) == 2:
            return self.scale.linear
        if not few:
            raise ValueError(
                f"few-labels: a tenth of {self.images} images is less than one of each of the "
                f"{self.classes} classes; leave it out, or give more images"
            )
        return (*self.scale.linear, "--fractions", *map(str, few))

    def study(self, name: str) -> Study:
        """A study at this scale."""
        if name not in STUDIES:
            raise ValueError(f"reproduce: got {name!r}, need one or more of {', '.join(STUDIES)}")
        if len(self.banks) < 2 and name == "bank":
            raise ValueError(
                f"bank: {self.images} images and batches of {self.config.train.batch_size} "
                f"leave one size of bank to try; lower --train.batch_size"
            )
        return STUDIES[name](self.banks)

    @functools.cache  # noqa: B019 (there is one, for as long as the program runs)
    def fingerprint(self, seed: int) -> str:
        """Of the images that a seed trains on."""
        data = self.config.data
        return train_and_validation(data.source, data.validation, seed=seed)[0].fingerprint()

    def run(self, changes: Mapping[str, Any], seed: int) -> Config:
        """The configuration of one run."""
        changed = self.config.with_overrides({**changes, "train.seed": seed})
        if changed.method.k == 1:  # a schedule would have nothing to grow to
            method = replace(changed.method, k_schedule="constant", k_start=1)
            changed = replace(changed, method=method)
        return changed
