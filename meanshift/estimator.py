"""Mean Shift as a scikit-learn transformer, for tables of numbers such as embeddings."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from meanshift.api import fit
from meanshift.data.arrays import ArraySource
from meanshift.models.features import extract_features


class MeanShiftEncoder(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """Learn features of vectors without labels by Mean Shift: the recipe `vector`.

    Each vector is seen in two noisy views; the features of one are pulled towards those of the
    `n_neighbors` nearest to the other one.

    Args:
        n_neighbors: neighbors that a sample is pulled towards; 1 is itself alone (BYOL).
        n_components: number of features.
        max_iter: passes over the samples.
        batch_size: samples of a step; fewer where there are fewer samples.
        learning_rate: of AdamW.
        noise: largest standard deviation of the noise, relative to that of each column.
        dropout: probability that a column is replaced by its mean in a view.
        mix: largest weight of another sample that is mixed into a view.
        random_state: seed, or a generator of seeds; None is another one at each `fit`.
        verbose: show the progress.

    >>> from sklearn.linear_model import LogisticRegression
    >>> from sklearn.pipeline import make_pipeline
    >>> model = make_pipeline(MeanShiftEncoder(random_state=0), LogisticRegression())
    >>> model.fit(X, y).score(X_test, y_test)
    """

    def __init__(
        self,
        n_neighbors: int = 5,
        *,
        n_components: int = 512,
        max_iter: int = 100,
        batch_size: int = 64,
        learning_rate: float = 1e-3,
        noise: float = 0.3,
        dropout: float = 0.2,
        mix: float = 0.2,
        random_state: Any = None,
        verbose: bool = False,
    ) -> None:
        self.n_neighbors = n_neighbors
        self.n_components = n_components
        self.max_iter = max_iter
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.noise = noise
        self.dropout = dropout
        self.mix = mix
        self.random_state = random_state
        self.verbose = verbose

    def fit(self, X: Any, y: Any = None) -> MeanShiftEncoder:
        """Train on the rows of X; `y` is not used."""
        del y
        X = validate_data(self, X, dtype=np.float32, ensure_min_samples=2)
        seed = int(check_random_state(self.random_state).randint(2**31))
        output = (
            contextlib.nullcontext() if self.verbose else contextlib.redirect_stderr(io.StringIO())
        )
        with output:
            model = fit(
                np.array(X),
                recipe="vector",
                k=min(self.n_neighbors, len(X)),
                epochs=self.max_iter,
                width=self.n_components / max(512, X.shape[1]),
                batch_size=min(self.batch_size, len(X)),
                lr=self.learning_rate,
                noise=self.noise,
                channel_dropout=self.dropout,
                mix=self.mix,
                seed=seed,
                device="cpu",
                precision="float32",
                snapshots=0,
                save_every=1e9,
            )
        self.backbone_ = model.backbone.eval()
        assert model.weights.sample_spec is not None
        self.sample_spec_ = model.weights.sample_spec
        self._n_features_out = self.backbone_.features
        self.n_iter_ = self.max_iter
        return self

    def transform(self, X: Any) -> np.ndarray:
        """The features of the rows of X."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=np.float32, reset=False)
        source = ArraySource(np.array(X), None, name="X").with_spec(self.sample_spec_)
        rows = extract_features(self.backbone_, source, image_size=8, device=torch.device("cpu"))
        return rows.numpy()

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = ["float32"]
        return tags
