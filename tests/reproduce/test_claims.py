"""Claims: when the metrics of several seeds support them, refute them, or decide nothing."""

import math

import pytest
from scipy import stats

from meanshift.reproduce.claims import (
    Interval,
    Measurement,
    below,
    collapses,
    higher,
    paired_interval,
    similar,
)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ((), "–"),
        ((61.25,), "61.2"),
        ((60.0, 62.0), "61.0 ± 1.4"),
        ((0.5, 0.75), "0.625 ± 0.177"),
        ((0.00105, 0.00105), "0.00105"),
        ((math.inf, math.inf), "in 0 of 2"),
        ((3.0, math.inf), "in 1 of 2"),
    ],
)
def test_a_measurement_is_printed_with_its_std(values, text):
    assert str(Measurement(values)) == text


def test_an_event_that_did_not_happen_in_some_seed_has_no_std():
    assert math.isnan(Measurement((3.0, math.inf)).std)
    assert math.isnan(Measurement((math.inf, math.inf)).std)
    assert Measurement((math.inf, math.inf)).mean == math.inf


def test_one_seed_has_no_std():
    assert math.isnan(Measurement().mean) and math.isnan(Measurement((1.0,)).std)
    assert Measurement((1.0, 3.0)).mean == 2
    assert Measurement((1.0, 3.0)).std == pytest.approx(2**0.5)


def decide(claim, **rows):
    """The verdict on a table in which each variant has a tuple of values per column."""
    table = {
        title: {f"c{index}": Measurement(values) for index, values in enumerate(columns)}
        for title, columns in rows.items()
    }
    columns = list(next(iter(table.values())))
    return claim.decide(table, columns)


def test_the_interval_of_paired_differences_is_that_of_scipy():
    ours, theirs = (60.5, 61.0, 62.25), (60.0, 60.75, 61.5)
    interval = paired_interval(Measurement(ours), Measurement(theirs))
    reference = stats.ttest_rel(ours, theirs).confidence_interval(0.95)
    assert interval.low == pytest.approx(reference.low)
    assert interval.high == pytest.approx(reference.high)
    assert interval.pairs == 3


def test_only_seeds_that_both_have_are_paired():
    ours = Measurement((60.0, 61.0, 99.0), seeds=(0, 1, 2))
    theirs = Measurement((50.0, 1.0, 52.5), seeds=(0, 7, 1))
    assert paired_interval(ours, theirs) == Interval.of([10.0, 8.5])
    assert paired_interval(ours, Measurement((1.0,), seeds=(2,))) is None


HIGH, LOW, WIDE, ONE, NONE = (70.0, 71.0), (60.0, 61.1), (50.0, 80.0), (70.0,), ()


@pytest.mark.parametrize(
    ("more", "less", "outcome", "reason"),
    [
        ([HIGH], [LOW], "holds", "c0"),
        ([LOW], [HIGH], "does not hold", "c0"),
        ([WIDE], [LOW], "cannot be told", "differences above"),
        ([HIGH], [HIGH], "cannot be told", "differences above 0.0"),
        ([ONE], [LOW], "cannot be told", "seed"),
        ([HIGH], [NONE], "cannot be told", "not run"),
        ([HIGH, HIGH], [LOW, LOW], "holds", "c1"),
        ([HIGH, LOW], [LOW, HIGH], "cannot be told", "c1"),
        ([HIGH, HIGH], [LOW, WIDE], "cannot be told", "differences above"),
        ([LOW, NONE], [HIGH, HIGH], "cannot be told", "not run"),
    ],
)
def test_higher_holds_if_the_interval_is_above_zero(more, less, outcome, reason):
    verdict = decide(higher("more", "a", "b"), a=more, b=less)
    assert verdict.outcome == outcome and reason in verdict.reason


def test_the_reason_names_the_interval_and_the_metrics_of_the_paper():
    table = {
        "a": {"20-NN": Measurement((66.0, 67.0, 68.5), 64.9)},
        "b": {"20-NN": Measurement((65.0, 65.9, 67.6), 59.1)},
    }
    verdict = higher("more", "a", "b").decide(table, ["20-NN"])
    assert verdict.outcome == "holds"
    assert "(the paper has 64.9 against 59.1), difference +1.0 (+0.8 to +1.2)" in verdict.reason


def test_higher_compares_its_own_columns_only():
    rows = {"a": [HIGH, LOW], "b": [LOW, HIGH]}
    assert decide(higher("more", "a", "b", "c0"), **rows).outcome == "holds"
    assert decide(higher("more", "a", "b", "c1"), **rows).outcome == "does not hold"
    across = higher("more", "a", "a", "c0", "c1", across=True)
    assert decide(across, **rows).outcome == "holds"
    across = higher("more", "b", "b", "c0", "c1", across=True)
    assert decide(across, **rows).outcome == "does not hold"


@pytest.mark.parametrize(
    ("one", "other", "outcome", "reason"),
    [
        ([(60.0, 60.2)], [(60.5, 60.75)], "holds", "c0"),
        ([(60.0, 60.2)], [(64.0, 64.25)], "does not hold", "c0"),
        ([(60.0, 60.2)], [(61.9, 62.15)], "cannot be told", "partly beyond 2 points"),
        ([WIDE], [LOW], "cannot be told", "c0"),
        ([ONE], [HIGH], "cannot be told", "seed"),
        ([NONE], [HIGH], "cannot be told", "not run"),
        ([(60.0, 60.2), (60.0, 60.2)], [(60.5, 60.7), HIGH], "cannot be told", "c1"),
    ],
)
def test_similar_holds_if_the_whole_interval_is_within_its_limit(one, other, outcome, reason):
    verdict = decide(similar("similar", "a", "b", 2.0), a=one, b=other)
    assert verdict.outcome == outcome and reason in verdict.reason


@pytest.mark.parametrize(
    ("values", "outcome"),
    [
        ((0.5, 0.52), "holds"),
        ((0.5,), "holds"),
        ((1.5,), "does not hold"),
        ((1.5, 1.52), "does not hold"),
        ((0.5, 1.1), "cannot be told"),
        ((), "cannot be told"),
    ],
)
def test_below_holds_under_its_limit(values, outcome):
    assert decide(below("below", "a", "c0", 1.0), a=[values]).outcome == outcome


@pytest.mark.parametrize(
    ("epochs", "outcome", "reason"),
    [
        ((0.5, 2.0), "holds", "2 of 2 runs, in epoch 0.5, 2"),
        ((123.456, 2.0), "holds", "in epoch 123.46, 2"),
        ((0.5, math.inf), "cannot be told", "1 of 2"),
        ((math.inf, math.inf), "does not hold", "0 of 2"),
        ((), "cannot be told", "not run"),
    ],
)
def test_collapses_needs_a_warning_in_every_seed(epochs, outcome, reason):
    verdict = decide(collapses("collapses", "a", "c0"), a=[epochs])
    assert verdict.outcome == outcome and reason in verdict.reason
