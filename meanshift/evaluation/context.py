"""What a protocol evaluates: frozen weights on images, with features extracted once."""

from __future__ import annotations

import functools
import re
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from meanshift.config.samples import Kind
from meanshift.data import Source, Subset, describe_splits, evaluation_splits, is_trained_on
from meanshift.data.open import SourceSpec, source_name
from meanshift.evaluation.result import Result, result_name, save_result, short_hash
from meanshift.models.feature_cache import cached_features
from meanshift.models.features import extract_features
from meanshift.models.fit_whitening import fit_view_whitening
from meanshift.models.initialization import (
    STATISTICS_IMAGES,
    measure_batch_norm,
    readable_batches,
)
from meanshift.models.input_check import check_image_size
from meanshift.models.weights import (
    OUTPUT_DIR,
    RawPixels,
    Weights,
    fingerprint,
    source_places,
    writable_dir,
)
from meanshift.runtime import rng
from meanshift.runtime.device import pick_device, pick_precision
from meanshift.transforms.eval import needs_no_resize

PIXEL_ROWS = 20_000
"""raw pixels of more images are written to a file, as features are (12 KB each)"""

SHARED_FRACTION = 0.9
"""subsets that cover this fraction of their source share one extraction of the whole source"""


@dataclass(frozen=True)
class FeatureSet:
    """The readable images of a source and their frozen features, row by row."""

    source: Source
    features: Float[Tensor, "n features"]

    @property
    def labels(self) -> Int[Tensor, " n"]:
        """The class of each image."""
        assert self.source.labels is not None
        return self.source.labels

    def take(self, subset: Subset) -> FeatureSet:
        """The features of a subset of this source."""
        assert subset.source is self.source
        return FeatureSet(subset, self.features[subset.indices])


class EncoderContext:
    """Frozen weights, how their features are computed, and where their results are saved."""

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
        output_dir: Path | None = None,
    ) -> None:
        self.weights = weights
        self.seed = seed
        self.name = _join(weights.name, f"seed{seed}" if seed else "")
        self.image_size = image_size or weights.image_size
        self.resize = resize
        self.workers = workers
        self.device = pick_device(device)
        self.precision = pick_precision(precision, self.device)
        self.output_dir = output_dir or writable_dir(weights.output_dir)
        self.options: dict[str, Any] = {}
        """settings that differ from the default, for the names of results"""
        if self.image_size != weights.image_size:
            self.options["image_size"] = self.image_size
        if resize:
            self.options["resize"] = resize
        if self.precision != torch.float32:
            self.options["precision"] = str(self.precision).removeprefix("torch.")
        if output_dir is not None and output_dir.resolve() != weights.output_dir.resolve():
            # Other weights may have results there.
            outside_runs = OUTPUT_DIR in weights.output_dir.parents
            place = weights.output_dir.name if outside_runs else weights.output_dir.resolve()
            self.options["weights"] = str(place)
        self.backbone: nn.Module = weights.backbone.to(self.device)
        samples = weights.sample_spec
        if samples is not None and samples.kind == "image" and "image_size" in self.options:
            check_image_size(
                self.backbone,
                channels=samples.channels,
                image_size=self.image_size,
                error=f"--image-size: got {self.image_size}, which {weights.spec} does not take; "
                f"leave it out for its own {weights.image_size} pixels",
            )

    @functools.cached_property
    def fingerprint(self) -> str:
        """A short name for exactly these weights."""
        return fingerprint(self.backbone)

    @property
    def kind(self) -> Kind:
        """What the network takes."""
        spec = self.weights.sample_spec
        return "image" if spec is None else spec.kind

    def features(self, source: Source, *, resize: int = 0, bicubic: bool = False) -> FeatureSet:
        """The features of a source, extracted once, without the images that cannot be read."""
        if self._reads_pixels(source, resize or self.resize):
            pixels = extract_features(
                self.backbone,
                self.adapted(source),
                image_size=self.image_size,
                device=self.device,
            )
            return FeatureSet(source, pixels)
        features, readable = cached_features(
            self.backbone,
            self.adapted(source),
            weights=self.fingerprint,
            folder=self.output_dir / "features",
            image_size=self.image_size,
            resize=resize or self.resize,
            bicubic=bicubic,
            device=self.device,
            precision=self.precision,
            workers=self.workers,
        )
        if len(readable) < len(source):
            source = source.subset(readable)
        return FeatureSet(source, features)

    def _reads_pixels(self, source: Source, resize: int) -> bool:
        """Whether the features are pixels of an array in memory: a file would only copy them."""
        return (
            isinstance(self.backbone, RawPixels)
            and source.kind == "image"
            and len(source) <= PIXEL_ROWS
            and needs_no_resize(source, self.image_size, resize)
        )

    def adapted(self, source: Source) -> Source:
        """The source with its samples as the backbone takes them."""
        return self.weights.adapted(source)

    def features_of_parts(
        self, *sources: Source, resize: int = 0, bicubic: bool = False
    ) -> list[FeatureSet]:
        """The features of several subsets.

        Subsets that cover most of their common source share the features of that source, so that
        other splits of it find them.
        """
        origins = [_origin(source) for source in sources]
        shared: dict[int, FeatureSet] = {}
        for origin, _ in origins:
            used = sum(len(indices) for other, indices in origins if other is origin)
            if id(origin) not in shared and used >= SHARED_FRACTION * len(origin):
                shared[id(origin)] = self.features(origin, resize=resize, bicubic=bicubic)
        parts = []
        for source, (origin, indices) in zip(sources, origins, strict=True):
            if id(origin) in shared:
                parts.append(_select(shared[id(origin)], origin, indices))
            else:
                parts.append(self.features(source, resize=resize, bicubic=bicubic))
        return parts

    def data_card(self) -> dict[str, Any]:
        """The entries of a card about the images; none where the protocol brings its own."""
        return {}

    def card(self) -> dict[str, Any]:
        """The entries of a card about images, weights, and how features are computed."""
        return {
            **self.data_card(),
            "weights": self.fingerprint,
            "encoder": f"{self.weights.spec}: {self.weights.title}",
            "seed": self.seed,
            "image_size": self.image_size,
            "resize": self.resize or "256/224 of image_size; small images as they are",
            "precision": str(self.precision),
            "device": str(self.device),
        }

    def save(self, result: Result) -> Path:
        """Write `results/NAME.json`, and the arrays beside it; return its path.

        The name tells other weights than a run's newest, other images than its own, and options
        that are not the default.
        """
        name = result_name(result.name, self.name, options=self.options | result.options)
        return save_result(result, self.card(), output_dir=self.output_dir, name=name)


class EvaluationContext(EncoderContext):
    """Frozen weights on the images of a source; features are extracted at the first use.

    `like` is a context whose images this one takes, for a comparison side by side.

    >>> from meanshift.evaluation import knn
    >>> context = EvaluationContext(load_weights("runs/demo"), "sample")
    >>> result = knn.evaluate(context, ks=[1, 20])
    >>> context.save(result)
    """

    def __init__(
        self,
        weights: Weights,
        data: SourceSpec | None = None,
        *,
        like: EvaluationContext | None = None,
        labels: Path | None = None,
        group: str | None = None,
        split: str = "",
        seed: int | None = None,
        **options: Any,
    ) -> None:
        config = weights.config
        if data is None and like is not None:
            data = like.spec
        if data is None and config is None:
            raise ValueError(f"{weights.title}: need images; give them with --data SOURCE")
        default_seed = config.train.seed if config else like.seed if like else 0
        super().__init__(weights, seed=default_seed if seed is None else seed, **options)
        places = [] if config is None else source_places(weights, config)
        self.spec: SourceSpec = data if data is not None else places[0]
        self.data = source_name(self.spec)
        self.labels_file = labels
        if labels is not None:
            self.options["labels"] = str(labels.resolve())
        if group is not None and (config is None or group != config.data.group):
            self.options["group"] = group
        is_own = any(_same_source(self.spec, place) for place in places)
        run = config if is_own or _is_copy(self.spec, weights) else None
        self.group = (run.data.group if run else "") if group is None else group
        if not isinstance(self.spec, str):  # in memory the samples themselves are the only place
            is_own = run is not None
        splits = evaluation_splits(
            self.spec,
            labels=labels,
            group=self.group,
            split=split,
            run=run,
            trained_on=weights.trained_on,
        )
        self.train_source, self.test_source, self.split_rule, self.seen = splits
        compared = like is not None and self._take_images_of(like, own=run is not None)
        self.train_source = self.adapted(self.train_source)
        if self.test_source is not None:
            self.test_source = self.adapted(self.test_source)
        self.name = _join(
            weights.name,
            "" if is_own else self._name_source(),
            split,
            "compared" if compared else "",
            f"seed{self.seed}" if self.seed != default_seed else "",
        )
        if isinstance(self.backbone, RawPixels):
            if self.train_source.kind == "signal":  # as much of each as the other network sees
                self.image_size = self.image_size if like is None else like.image_size
            if self.train_source.kind != "image":
                self.weights = replace(weights, title="raw values")
            self.backbone.center(self._mean_pixels())
        if weights.unmeasured:
            self._measure_batch_norm()

    def _name_source(self) -> str:
        """The name of a source for results; the options tell apart paths that end alike."""
        name = re.sub(r"\W+", "-", Path(self.data).stem)
        if name != source_identity(self.spec):  # a path, not `cifar10`
            self.options["data"] = source_identity(self.spec)
        return name

    def _take_images_of(self, like: EvaluationContext, *, own: bool) -> bool:
        """Take the splits of another context; whether a run is tested on images it trained on."""
        differs = _test_fingerprint(self) != _test_fingerprint(like)
        self.train_source = like.train_source
        self.test_source = like.test_source
        self.split_rule = like.split_rule
        self.group = like.group
        if differs:
            self.options["images"] = short_hash(_test_fingerprint(like))
        if not (own and differs):
            return False
        self.seen = self.seen or (
            "this run has other validation images, so it has seen some unlabeled"
        )
        warnings.warn(f"{self.weights.spec}: {self.split}", stacklevel=3)
        return True

    @property
    def split(self) -> str:
        """How the images were chosen, and whether the run has trained on the test images."""
        return "; ".join(filter(None, [self.split_rule, self.seen]))

    @property
    def counts(self) -> str:
        """How many images of each class the train and test images are."""
        return describe_splits({"train": self.train_source, "test": self.test_source})

    @functools.cached_property
    def train(self) -> FeatureSet:
        """The features of the images that a classifier is fitted to."""
        return self.features(self.train_source)

    @functools.cached_property
    def test(self) -> FeatureSet:
        """The features of the images that metrics are computed on."""
        if self.test_source is None:
            raise ValueError(
                f"{self.data}: has no labels to evaluate with; give class folders, a CSV with "
                f"--labels FILE (file,label), or another --data; `cluster` needs none"
            )
        return self.features(self.test_source)

    @property
    def classes(self) -> int:
        """The number of outputs of a classifier of these labels."""
        test_labels = self.test.labels  # first: without labels this is an error
        return int(torch.cat([self.train.labels, test_labels]).max()) + 1

    def data_card(self) -> dict[str, Any]:
        sizes: dict[str, int] = {}
        unreadable = 0
        for name, source in (("train", self.train_source), ("test", self.test_source)):
            if source is not None and name in self.__dict__:  # features were extracted
                sizes[name] = len(getattr(self, name).source)
                unreadable += len(source) - sizes[name]
        return {
            "data": self.data,
            "split": self.split,
            "sizes": sizes,
            "test images": self.test.source.fingerprint() if "test" in sizes else "",
            "unreadable": unreadable,
            "labels": str(self.labels_file) if self.labels_file else "the source's own",
            "group": "none" if self.train_source.groups is None else self.group or "the source's",
        }

    def _mean_pixels(self) -> Tensor:
        """The mean of the training images, of 10,000 where there are more."""
        chosen = rng.choice(0, len(self.train_source), 10_000, rng.SAMPLE)
        rows = extract_features(
            self.backbone,
            self.train_source.subset(chosen),
            image_size=self.image_size,
            resize=self.resize,
            device=self.device,
        )
        return rows.mean(0)

    def _measure_batch_norm(self) -> None:
        """Measure the statistics of random weights on some of the training images."""
        chosen = rng.choice(0, len(self.train_source), STATISTICS_IMAGES, rng.SAMPLE)
        images = readable_batches(
            self.train_source.subset(chosen),
            image_size=self.image_size,
            resize=self.resize,
            device=self.device,
            workers=self.workers,
        )
        measure_batch_norm(self.backbone, images)
        config = self.weights.config
        if config is not None:
            fit_view_whitening(
                self.backbone,
                self.train_source,
                config.views,
                image_size=self.image_size,
                seed=config.train.seed,
                device=self.device,
            )


def _origin(source: Source) -> tuple[Source, Int[Tensor, " n"]]:
    """The source that a subset (of a subset) selects from, and the indices of its images."""
    indices = torch.arange(len(source))
    while isinstance(source, Subset):
        indices = source.indices[indices]
        source = source.source
    return source, indices


def _select(shared: FeatureSet, origin: Source, indices: Int[Tensor, " n"]) -> FeatureSet:
    """The features of some images of `origin`, of which `shared` has the readable ones."""
    _, readable = _origin(shared.source)
    row_of_image = torch.full((len(origin),), -1)  # -1 for unreadable images
    row_of_image[readable] = torch.arange(len(readable))
    rows = row_of_image[indices]
    has_row = rows >= 0
    return FeatureSet(origin.subset(indices[has_row]), shared.features[rows[has_row]])


def _test_fingerprint(context: EvaluationContext) -> str:
    """Which images metrics are computed on."""
    return "" if context.test_source is None else context.test_source.fingerprint()


def source_identity(spec: SourceSpec) -> str:
    """A source in one spelling: a path is resolved, the name of a dataset is as it is."""
    if not isinstance(spec, str):
        return spec["train"].fingerprint()
    path = Path(spec).expanduser()
    return str(path.resolve()) if path.exists() else spec


def _same_source(one: SourceSpec, other: SourceSpec) -> bool:
    return source_identity(one) == source_identity(other)


def _is_copy(data: SourceSpec, weights: Weights) -> bool:
    """Whether another source has exactly the training images of a run, as after a move."""
    if weights.config is None or not weights.trained_on:
        return False
    with warnings.catch_warnings():  # they are given when the source is opened for its images
        warnings.simplefilter("ignore")
        return is_trained_on(data, weights.config, weights.trained_on)


def _join(*words: str) -> str:
    """The words that are not empty, with hyphens."""
    return "-".join(filter(None, words))
