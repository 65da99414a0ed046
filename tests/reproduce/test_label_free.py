"""Choices without labels: which variant a measure takes, and what it costs."""

import math

import pytest

from meanshift.reproduce import label_free
from meanshift.reproduce.claims import Measurement
from meanshift.reproduce.label_free import MEASURES

ACCURACY = {"a": (60.0, 61.0), "b": (65.0, 60.0), "c": (50.0, 51.0)}


def measured(**values):
    return {
        title: {measure: Measurement(rows) for measure in MEASURES}
        for title, rows in values.items()
    }


def choose(table, accuracy=ACCURACY):
    rows = {title: Measurement(values) for title, values in accuracy.items()}
    return label_free.choices(table, rows)


def test_a_measure_equal_to_the_accuracy_is_always_right():
    found = choose(measured(**ACCURACY))
    assert [each.measure for each in found] == list(MEASURES)
    assert {(each.right, each.seeds, each.regret) for each in found} == {(2, 2, 0.0)}
    assert found[0].variant == "b" and found[0].correlation == pytest.approx(1)


def test_the_regret_is_the_mean_over_seeds():
    constant = choose(measured(a=(2.0, 2.0), b=(1.0, 1.0), c=(0.0, 0.0)))[0]
    assert (constant.variant, constant.right, constant.regret) == ("a", 1, 2.5)
    assert constant.chance == pytest.approx((5 + 0 + 15 + 0 + 1 + 10) / 6)
    assert constant.correlation == pytest.approx(0.5)


def test_a_measure_that_is_the_same_for_all_has_no_correlation():
    found = choose(measured(a=(1.0, 1.0), b=(1.0, 1.0), c=(1.0, 1.0)))
    assert all(math.isnan(each.correlation) for each in found)
    assert "| LiDAR | a | 1 of 2 | 2.5 | 5.2 | – |" in label_free.markdown(found, "20-NN")


def test_over_several_studies_every_seed_counts_once():
    found = choose(measured(a=(2.0, 2.0), b=(1.0, 1.0), c=(0.0, 0.0)))
    table = measured(a=(2.0,), b=(1.0,), c=(3.0,))
    found += choose(table, {"a": (1.0,), "b": (2.0,), "c": (9.0,)})
    right, seeds, regret, chance = label_free.total(found)["LiDAR"]
    assert (right, seeds) == (2, 3)
    assert regret == pytest.approx((0 + 5 + 0) / 3)
    assert chance == pytest.approx((2 * 31 / 6 + (8 + 7 + 0) / 3) / 3)


def test_only_common_seeds_count_and_three_variants_are_needed():
    table = measured(**ACCURACY)
    table["c"] = {measure: Measurement((9.0,), seeds=(1,)) for measure in MEASURES}
    assert {each.seeds for each in choose(table)} == {1}
    assert choose(measured(a=(1.0,), b=(2.0,)), {"a": (1.0,), "b": (2.0,)}) == []
    assert choose(measured(**ACCURACY), {"a": (), "b": (1.0,), "c": (1.0,)}) == []


def test_the_table_and_the_sentence_name_the_choice():
    text = label_free.markdown(choose(measured(**ACCURACY)), "20-NN")
    assert "| LiDAR | b | 2 of 2 | 0.0 | 5.2 | +1.00 |" in text
    assert label_free.markdown([], "20-NN") == ""
    assert "b (by RankMe, LiDAR" in label_free.sentence(measured(**ACCURACY))
    assert label_free.sentence(measured(a=(1.0,))) == ""
