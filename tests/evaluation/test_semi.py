"""Few labels: subsets by fraction, count, list and seed."""

from dataclasses import replace

import numpy as np
import pytest

from meanshift.evaluation import linear_probe, semi
from meanshift.evaluation.context import EvaluationContext
from meanshift.evaluation.linear_probe import Curves, ProbeSettings
from meanshift.evaluation.result import result_name
from tests.support.colors import make_weights

SHORT = ProbeSettings(lr=0.1, batch_size=64, epochs=8, milestones=(3, 6))


def test_subsets_are_drawn_by_fraction_and_count(make_context):
    result = semi.evaluate(
        make_context(), settings=SHORT, fractions=[0.02], counts=[60], cached=True
    )
    assert result.settings["subsets"] == {"2%": 12, "60": 60}
    assert set(result.metrics) == {"2% top-1", "2% top-5", "60 top-1", "60 top-5"}


def test_seeds_give_a_mean_and_a_std(make_context):
    context = make_context(shuffled=True)
    result = semi.evaluate(context, settings=SHORT, fractions=[0.1], seeds=3, cached=True)
    values = result.settings["by seed"]["10% top-1"]
    assert len(set(values)) > 1
    assert result.metrics["10% top-1"] == pytest.approx(np.mean(values))
    assert result.metrics["10% top-1 std"] == pytest.approx(np.std(values, ddof=1), rel=1e-5)


def test_each_seed_draws_a_subset_of_its_own(make_context, monkeypatch):
    drawn = []

    def fit(_, train, *__, seed, **___):
        drawn.append((seed, tuple(train.source.indices.tolist())))
        return linear_probe.Curves([[50.0]], [[90.0]])

    monkeypatch.setattr(semi, "fit_layers", fit)
    semi.evaluate(make_context(), fractions=[0.1], seeds=3)
    assert [seed for seed, _ in drawn] == [0, 1, 2]
    subsets = {subset for _, subset in drawn}
    assert len(subsets) == 3 and {len(subset) for subset in subsets} == {60}


def test_a_seed_draws_the_same_subset_whatever_the_others_are(make_context):
    context = make_context(shuffled=True)
    options = {"settings": SHORT, "fractions": [0.1], "cached": True}
    three, one = (
        semi.evaluate(context, seeds=seeds, **options).settings["by seed"]["10% top-1"]
        for seeds in (3, 1)
    )
    assert one == three[:1]


def test_a_list_names_the_labeled_images(photos, tmp_path):
    file = tmp_path / "few.txt"
    file.write_text("a/000.jpg\nb/001.jpg\n\nb/002.jpg\n")
    context = EvaluationContext(make_weights(tmp_path / "out"), str(photos))
    settings = replace(SHORT, epochs=1)
    result = semi.evaluate(context, lists=[file], settings=settings, cached=True)
    assert result.settings["subsets"] == {"few": 3} and "few top-1" in result.metrics
    for text, message in (("a/000.jpg\nc/9.jpg", r"1 of its 2 names .* c/9.jpg"), ("", "0 names")):
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            semi.evaluate(context, lists=[file])
    with pytest.raises(ValueError, match=r"gone\.txt: not a readable list"):
        semi.evaluate(context, lists=[tmp_path / "gone.txt"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fractions": [0.0]}, "got 0, need above 0"),
        ({"fractions": [1.5]}, "got 1.5"),
        ({"fractions": [0.001]}, "at least one per class"),
        ({"counts": [10_000], "fractions": []}, "at most all"),
        ({"seeds": 0}, "need 1 or more"),
    ],
)
def test_invalid_subsets_are_refused(make_context, options, message):
    with pytest.raises(ValueError, match=message):
        semi.evaluate(make_context(), cached=True, **options)


def test_other_subsets_and_seeds_have_other_names(make_context, monkeypatch, tmp_path):
    curves = Curves([[50.0]], [[90.0]])
    monkeypatch.setattr(semi, "fit_layers", lambda *_, **__: curves)
    context = make_context(train=600, test=30)
    usual = {"fractions": [0.01, 0.1]}
    for options in ({}, usual):
        assert not semi.evaluate(context, **options).options
    lists = []
    for place in "xy":
        (tmp_path / place).mkdir()
        lists.append(tmp_path / place / "few.txt")
        lists[-1].write_text(context.train.source.title(0))
    others = [
        {"fractions": [0.1]},
        {"counts": [60]},
        {**usual, "counts": [60]},
        {"seeds": 2},
        *({"lists": [path]} for path in lists),
    ]
    results = [semi.evaluate(context, **options) for options in others]
    names = [result_name(result.name, options=result.options) for result in results]
    assert names[:2] == ["semi-fractions-0.1", "semi-counts-60"]
    assert len({*names, "semi"}) == 1 + len(others)
