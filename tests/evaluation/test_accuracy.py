"""Accuracies with their uncertainty: paired and unpaired differences, and which is the best."""

import numpy as np
import pytest

from meanshift.evaluation.accuracy import Accuracy, best_of, difference, stored_arrays


def accuracy(correct, name="", **more):
    rows = np.array(correct, bool)
    return Accuracy.of_rows(name, float(100 * rows.mean()), rows, **more)


def rows(both, own, other, neither):
    """Two encoders on the same images: so many are correct by both, by one or by neither."""
    counts = [both, own, other, neither]
    return (
        accuracy(np.repeat([1, 1, 0, 0], counts)),
        accuracy(np.repeat([1, 0, 1, 0], counts)),
    )


def test_a_paired_difference_is_that_of_bonett_and_price():
    # By hand: (30 + 1) / 102 and (10 + 1) / 102 are the adjusted proportions.
    found = difference(*rows(both=40, own=30, other=10, neither=20))
    won, lost = 31 / 102, 11 / 102
    half = 1.96 * np.sqrt((won + lost - (won - lost) ** 2) / 102)
    assert found.value == pytest.approx(20) and found.paired
    assert (found.low, found.high) == pytest.approx(
        (100 * (won - lost - half), 100 * (won - lost + half))
    )


def test_images_that_both_classify_alike_only_dilute_a_difference():
    few, many = rows(40, 30, 10, 20), rows(4960, 30, 10, 5000)
    assert difference(*few).sign == difference(*many).sign == 1
    wide = difference(*[Accuracy("", each.value, 10_000) for each in many])
    assert not wide.paired and wide.sign == 0  # two proportions: 0.2 points cannot be told


@pytest.mark.parametrize(("share", "shift"), [(0.5, 0.0), (0.9, 0.05)])
def test_intervals_cover_the_truth_in_95_of_100_samples(share, shift):
    random = np.random.default_rng(0)
    covered = {True: 0, False: 0}
    truth = 100 * _truth(share, shift)
    for _ in range(2000):
        easy = random.random(80)
        one = easy + 0.1 * random.standard_normal(80) < share + shift
        two = easy + 0.1 * random.standard_normal(80) < share
        pair = [accuracy(one), accuracy(two)]
        for paired in covered:
            a, b = pair if paired else (Accuracy("", each.value, 80) for each in pair)
            found = difference(a, b)
            assert found.paired == paired
            covered[paired] += found.low <= truth <= found.high
    assert 0.935 <= covered[True] / 2000 <= 0.99
    assert covered[False] >= covered[True]  # wider than needed on the same images


def _truth(share, shift, draws=400_000):
    random = np.random.default_rng(1)
    values = random.random(draws) + 0.1 * random.standard_normal(draws)
    return (values < share + shift).mean() - (values < share).mean()


def test_encoders_are_paired_only_on_the_same_images():
    one = accuracy([1, 1, 0, 0] * 10, test_images="a")
    assert difference(one, accuracy([1, 0, 0, 0] * 10, test_images="a")).paired
    for other in (
        accuracy([1, 0, 0, 0] * 10, test_images="b"),
        accuracy([1, 0, 0, 0] * 9, test_images="a"),
        Accuracy("", 25.0, 40, None, "a"),
    ):
        assert not difference(one, other).paired


def test_without_the_number_of_images_nothing_is_told():
    found = difference(Accuracy("", 90.0), Accuracy("", 10.0))
    assert found.sign == 0 and not found.known and found.value == 80
    assert Accuracy("", 90.0).interval is None


def test_few_images_do_not_make_certain():
    everything = difference(accuracy([1] * 3), accuracy([0] * 3))
    assert everything.sign == 0 and everything.low >= -100 and everything.high == 100
    low, high = accuracy([1] * 3).interval
    assert low < 50 and high == pytest.approx(100)


def test_rows_of_an_older_evaluation_are_not_used():
    assert Accuracy.of_rows("", 50.0, [True, False]).images == 2
    assert Accuracy.of_rows("", 51.0, [True, False], images=7).correct is None
    assert Accuracy.of_rows("", 51.0, [True, False], images=7).images == 7
    assert Accuracy.of_rows("", 50.0, []).correct is None


def test_the_best_are_all_that_cannot_be_told_from_the_best():
    values = {"a": 50.0, "b": 49.0, "c": 30.0}
    found = best_of([Accuracy(name, value, 1000) for name, value in values.items()])
    assert found == [True, True, False]


def test_damaged_arrays_are_as_good_as_none(tmp_path):
    np.savez(tmp_path / "knn.npz", **{"correct 1-NN": np.ones(3, bool), "other": np.ones(2)})
    assert list(stored_arrays(tmp_path / "knn.npz")) == ["correct 1-NN"]
    (tmp_path / "torn.npz").write_bytes((tmp_path / "knn.npz").read_bytes()[:40])
    assert stored_arrays(tmp_path / "torn.npz") == {} == stored_arrays(tmp_path / "none.npz")
