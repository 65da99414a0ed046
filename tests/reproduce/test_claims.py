"""Claims: when the metrics of several seeds support them, refute them, or decide nothing."""

import math

import pytest

from meanshift.reproduce.claims import Measurement, below, collapses, higher, similar


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


HIGH, LOW, WIDE, ONE, NONE = (70.0, 71.0), (60.0, 61.0), (50.0, 80.0), (70.0,), ()


@pytest.mark.parametrize(
    ("more", "less", "outcome", "reason"),
    [
        ([HIGH], [LOW], "holds", "c0"),
        ([LOW], [HIGH], "does not hold", "c0"),
        ([WIDE], [LOW], "inconclusive", "overlap"),
        ([HIGH], [HIGH], "inconclusive", "overlap"),
        ([ONE], [LOW], "inconclusive", "seed"),
        ([HIGH], [NONE], "inconclusive", "not run"),
        ([HIGH, HIGH], [LOW, LOW], "holds", "c1"),
        ([HIGH, LOW], [LOW, HIGH], "inconclusive", "c1"),
        ([HIGH, HIGH], [LOW, WIDE], "inconclusive", "overlap"),
        ([LOW, NONE], [HIGH, HIGH], "inconclusive", "not run"),
    ],
)
def test_higher_holds_if_the_standard_deviations_do_not_overlap(more, less, outcome, reason):
    verdict = decide(higher("more", "a", "b"), a=more, b=less)
    assert verdict.outcome == outcome and reason in verdict.reason


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
        ([(60.0, 60.2)], [(60.5, 60.7)], "holds", "c0"),
        ([(60.0, 60.2)], [(64.0, 64.2)], "does not hold", "c0"),
        ([(60.0, 60.2)], [(61.9, 62.1)], "inconclusive", "c0"),
        ([WIDE], [LOW], "inconclusive", "c0"),
        ([ONE], [HIGH], "inconclusive", "seed"),
        ([NONE], [HIGH], "inconclusive", "not run"),
        ([(60.0, 60.2), (60.0, 60.2)], [(60.5, 60.7), HIGH], "inconclusive", "c1"),
    ],
)
def test_similar_counts_the_standard_deviations_in(one, other, outcome, reason):
    verdict = decide(similar("similar", "a", "b", 2.0), a=one, b=other)
    assert verdict.outcome == outcome and reason in verdict.reason


@pytest.mark.parametrize(
    ("values", "outcome"),
    [
        ((0.5, 0.6), "holds"),
        ((0.5,), "holds"),
        ((1.5,), "does not hold"),
        ((1.5, 1.6), "does not hold"),
        ((0.5, 1.1), "inconclusive"),
        ((), "inconclusive"),
    ],
)
def test_below_holds_under_its_limit(values, outcome):
    assert decide(below("below", "a", "c0", 1.0), a=[values]).outcome == outcome


@pytest.mark.parametrize(
    ("epochs", "outcome", "reason"),
    [
        ((0.5, 2.0), "holds", "2 of 2 runs, in epoch 0.5, 2"),
        ((123.456, 2.0), "holds", "in epoch 123.46, 2"),
        ((0.5, math.inf), "inconclusive", "1 of 2"),
        ((math.inf, math.inf), "does not hold", "0 of 2"),
        ((), "inconclusive", "not run"),
    ],
)
def test_collapses_needs_a_warning_in_every_seed(epochs, outcome, reason):
    verdict = decide(collapses("collapses", "a", "c0"), a=[epochs])
    assert verdict.outcome == outcome and reason in verdict.reason
