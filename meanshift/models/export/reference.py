"""Real samples and their features in a run: what an exported network must give again."""

from __future__ import annotations

import functools
import warnings

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from meanshift.data import Source, UnreadableSample, open_source
from meanshift.data.open import SourceSpec, source_name
from meanshift.models.features import evaluation_batches
from meanshift.models.weights import Weights, source_places
from meanshift.runtime import rng

SAMPLES = 16
"""number of samples that features are compared on"""
TOLERANCE = 1e-4
"""largest difference of features that is allowed, as a fraction of the largest feature"""


class Reference:
    """Some samples as the network takes them, and the features that torch computes of them.

    They are of `data`, or else of the source that the run was trained on. Where this is gone,
    images are those of the source `sample`, and a warning says so.
    """

    def __init__(self, weights: Weights, data: SourceSpec | None = None) -> None:
        self._weights = weights
        self._data = data

    @functools.cached_property
    def source(self) -> Source:
        """Where the samples are from."""
        if self._data is not None:
            return self._open(self._data)
        config = self._weights.config
        assert config is not None
        reason = ""
        for place in source_places(self._weights, config):
            try:
                with warnings.catch_warnings():  # about data that is not what this command is about
                    warnings.simplefilter("ignore")
                    return self._open(place)
            except (ValueError, OSError) as error:
                reason = reason or str(error)
        try:
            source = self._open("sample")
        except ValueError:
            raise ValueError(
                f"{self._weights.spec}: its samples are needed to compare features ({reason}); "
                f"give others: --data SOURCE"
            ) from None
        warnings.warn(
            f"{self._weights.spec}: features are compared on the images of `sample`, as its own "
            f"cannot be opened ({reason}); for others type --data SOURCE",
            stacklevel=2,
        )
        return source

    def _open(self, spec: SourceSpec) -> Source:
        """Some samples of a source as the network takes them."""
        source = self._weights.adapted(next(iter(open_source(spec).values())))
        if not len(source):
            raise ValueError(f"{source_name(spec)}: has no samples; give another --data")
        return source.subset(rng.choice(0, len(source), SAMPLES, rng.SAMPLE))

    @functools.cached_property
    def samples(self) -> Float[Tensor, "n *shape"]:
        """Normalized samples."""
        bad: dict[int, UnreadableSample] = {}
        batches = evaluation_batches(
            self.source,
            image_size=self._weights.image_size,
            device=torch.device("cpu"),
            batch_size=SAMPLES,
            bad=bad,
        )
        ((_, samples),) = batches
        readable = [index for index in range(len(samples)) if index not in bad]
        if not readable:
            first = next(iter(bad.values()))
            raise ValueError(
                f"{self.source.name}: none of {len(bad)} samples can be read, the first is "
                f"{first.title} ({first.reason}); give others: --data SOURCE"
            )
        return samples[readable].contiguous()

    @functools.cached_property
    def features(self) -> Float[Tensor, "n features"]:
        """The features of the samples, computed by torch."""
        with torch.inference_mode():
            features: Tensor = self._weights.backbone(self.samples)
        return features.float()

    def compare(self, features: Float[np.ndarray, "..."], program: str) -> str:
        """One line about the largest difference; an error where it is above the tolerance."""
        expected = self.features.numpy()
        if features.shape != expected.shape:
            raise ValueError(
                f"{program}: gives features of the shape {features.shape}, the run gives "
                f"{expected.shape}"
            )
        largest = float(np.abs(expected).max())
        difference = float(np.abs(features - expected).max())
        line = (
            f"{program}: largest difference {difference:.2g}, largest feature {largest:.4g} "
            f"({len(expected)} samples of {self.source.name})"
        )
        if not difference <= TOLERANCE * largest:  # NaN is an error as well
            raise ValueError(
                f"{line}; at most {TOLERANCE * largest:.2g} is allowed, so the exported network is "
                f"not that of {self._weights.spec}"
            )
        return line
