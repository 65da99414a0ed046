"""What all runs of a reproduction share: a scale, the user's settings, and the dataset."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from meanshift.config import MSF, Config
from meanshift.data import open_source, train_and_validation
from meanshift.reproduce.label_free import MEASURES
from meanshift.reproduce.scales import Scale, find_scale
from meanshift.reproduce.studies import STUDIES, Study


@dataclass(frozen=True, eq=False)
class Experiment:
    """The configuration that the variants change, and the dataset that they train on."""

    name: str
    """of the scale"""
    scale: Scale
    config: Config
    images: int
    """training images"""
    classes: int
    split: str
    """the labeled split that runs are evaluated on; "" is the validation images"""
    labeled: bool = True
    """False: variants are compared by measures that need no labels"""
    equal_epochs: bool = False
    """give every method the same number of epochs, not the same cost"""
    teacher: str = ""
    """weights that CompRess distills; without any it is left out"""

    @staticmethod
    def open(
        name: str,
        *,
        data: str | None,
        overrides: Mapping[str, Any],
        equal_epochs: bool = False,
        teacher: str = "",
    ) -> Experiment:
        """A scale on its own dataset or another one, with settings over those of the scale."""
        scale = find_scale(name)
        config = scale.config.with_overrides(overrides)
        if not isinstance(config.method, MSF):
            raise ValueError(
                f"reproduce: the studies change settings of msf; got the method "
                f"{config.method.name}: leave --method.name out"
            )
        if data is not None:
            config = config.with_overrides({"data.source": data})
        elif scale.needs_data:
            raise ValueError(f"--scale {name}: where are the images? type --data SOURCE")
        source = config.data.source
        validation_setting = config.data.validation
        train, validation = train_and_validation(
            source, validation_setting, seed=config.train.seed, group=config.data.group
        )
        if train.labeled and (validation is None or not validation.labeled):
            raise ValueError(
                f"{source}: nothing to evaluate with; reproduce needs labeled validation images: "
                f"--data.validation 0.1"
            )
        splits = dict(open_source(source))
        labeled = [each for each in ("test", "val") if each in splits and splits[each].labeled]
        split = labeled[0] if isinstance(validation_setting, float) and labeled else ""
        classes = len(train.classes)
        return Experiment(
            name,
            scale,
            config,
            len(train),
            classes,
            split,
            train.labeled,
            equal_epochs,
            teacher=teacher or scale.teacher,
        )

    @property
    def bank_sizes(self) -> tuple[int, ...]:
        """The bank sizes to compare: those of the scale, and as many rows as there are images."""
        assert isinstance(self.config.method, MSF)
        least = max(self.config.train.batch_size, self.config.method.k)
        sizes = [size for size in self.scale.bank_sizes if least <= size < self.images]
        if not sizes or sizes[-1] < self.images / 2:  # the paper's million is its dataset's size
            sizes.append(max(least, self.images))
        return tuple(sizes)

    def evaluate_options(self, protocol: str) -> tuple[str, ...]:
        """The options of `meanshift evaluate` for a protocol."""
        if protocol in ("knn", "rank"):
            return ()
        fractions = [each for each in (0.01, 0.1) if each * self.images >= self.classes]
        if protocol == "linear" or len(fractions) == 2:
            return self.scale.linear_options
        if not fractions:
            raise ValueError(
                f"few-labels: a tenth of {self.images} images is less than one of each of the "
                f"{self.classes} classes; leave it out, or give more images"
            )
        return (*self.scale.linear_options, "--fractions", *map(str, fractions))

    def study(self, name: str) -> Study:
        """A study at this scale."""
        if name not in STUDIES:
            raise ValueError(f"reproduce: got {name!r}, need one or more of {', '.join(STUDIES)}")
        if len(self.bank_sizes) < 2 and name == "bank":
            raise ValueError(
                f"bank: {self.images} images and batches of {self.config.train.batch_size} "
                f"leave one bank size to compare; lower --train.batch_size"
            )
        study = STUDIES[name](self.bank_sizes)
        impossible = set() if self.teacher else {"compress"}
        if not self.labeled and study.trains:
            impossible.add("supervised")
            study = replace(study, columns=MEASURES, claims=(), figure="")
        possible = [
            variant
            for variant in study.variants
            if variant.changes.get("method.name") not in impossible
            and (self.labeled or not variant.weights)
        ]
        return replace(study, variants=possible)

    @functools.cache  # noqa: B019 (there is one, for as long as the program runs)
    def fingerprint(self, seed: int) -> str:
        """The fingerprint of the images that a seed trains on."""
        data = self.config.data
        train, _ = train_and_validation(data.source, data.validation, seed=seed, group=data.group)
        return train.fingerprint()

    def run_config(self, changes: Mapping[str, Any], seed: int) -> Config:
        """The configuration of one run.

        Methods whose steps cost more than MSF's have fewer epochs, unless `equal_epochs`.
        """
        teacher = {"method.teacher": self.teacher}
        own = teacher if changes.get("method.name") == "compress" else {}
        config = self.config.with_overrides({**changes, **own, "train.seed": seed})
        if not isinstance(config.method, MSF):
            if not self.scale.own_optimizers:
                config = replace(config, optim=self.config.optim)
            costs = self.scale.relative_costs
            cost = costs.get(config.method.name, config.method.relative_cost)
            cost = 1.0 if self.equal_epochs else cost
            epochs = max(1, round(config.train.epochs / cost))
            return replace(config, train=replace(config.train, epochs=epochs))
        if config.method.k > 1:
            return config
        # A schedule of k would have nothing to grow to.
        return replace(config, method=replace(config.method, k_schedule="constant", k_start=1))
