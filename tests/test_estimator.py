"""Mean Shift as a scikit-learn transformer."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import check_estimator

import meanshift as ms


@pytest.fixture(scope="module")
def digits():
    digits = load_digits()
    return digits.data[:300].astype(np.float32), digits.target[:300]


@pytest.mark.slow
def test_it_passes_the_checks_of_scikit_learn():
    encoder = ms.MeanShiftEncoder(max_iter=1, n_components=16, random_state=0)
    expected = {
        "check_do_not_raise_errors_in_init_or_set_params": "the tests check the types of arguments"
    }
    checks = check_estimator(encoder, expected_failed_checks=expected, on_fail=None, on_skip=None)
    others = {
        each["check_name"]: each["exception"] for each in checks if each["status"] != "passed"
    }
    optional = {"check_array_api_input"}  # needs an environment variable of scipy
    assert set(others) <= {*expected, *optional}, others
    assert len(checks) > 40


def test_it_learns_in_a_pipeline(digits):
    X, y = digits
    encoder = ms.MeanShiftEncoder(max_iter=10, n_components=64, random_state=0)
    model = make_pipeline(encoder, LogisticRegression(max_iter=500)).fit(X[:200], y[:200])
    assert model.score(X[200:], y[200:]) > 0.75
    assert model[0].get_feature_names_out()[0] == "meanshiftencoder0"


def test_the_same_seed_gives_the_same_features_also_of_a_clone_and_a_copy(digits):
    X, _ = digits
    encoder = ms.MeanShiftEncoder(max_iter=2, n_components=16, random_state=3).fit(X)
    expected = encoder.transform(X[:5])
    assert np.array_equal(clone(encoder).fit(X).transform(X[:5]), expected)
    assert np.array_equal(pickle.loads(pickle.dumps(encoder)).transform(X[:5]), expected)
    other = clone(encoder).set_params(random_state=4).fit(X)
    assert not np.allclose(other.transform(X[:5]), expected)


def test_neighbors_change_what_is_learned(digits):
    X, _ = digits
    one, five = (
        ms.MeanShiftEncoder(k, max_iter=2, n_components=16, random_state=0).fit(X).transform(X[:5])
        for k in (1, 5)
    )
    assert not np.allclose(one, five)


@pytest.mark.parametrize(
    ("X", "message"),
    [
        (np.ones((1, 3), np.float32), "minimum of 2"),
        (np.full((8, 3), np.nan, np.float32), "NaN"),
        (np.ones(8, np.float32), "2D array"),
    ],
)
def test_bad_input_is_refused(X, message):
    with pytest.raises(ValueError, match=message):
        ms.MeanShiftEncoder().fit(X)
