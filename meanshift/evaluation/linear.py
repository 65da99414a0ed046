"""Linear evaluation: the paper's recipe on augmented views, or on features extracted once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from meanshift.data import split_off
from meanshift.evaluation.context import EvaluationContext, Result
from meanshift.evaluation.linear_probe import ProbeSettings, fit_layers

SWEEP = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)


def evaluate(
    subject: EvaluationContext,
    *,
    recipe: ProbeSettings | None = None,
    cached: bool = False,
    sweep: Sequence[float] = (),
) -> Result:
    """Top-1 and top-5 of one linear layer after the last epoch, and the best epoch named as such.

    `cached` trains on un-augmented features, extracted once. `sweep` chooses the learning rate on a
    tenth of the training images, never on the test images.
    """
    recipe, test, train = recipe or ProbeSettings(), subject.test, subject.train
    name = "linear" + ("-cached" if cached else "") + ("-swept" if sweep else recipe.tag)
    settings: dict[str, Any] = {
        "views": "none: features extracted once" if cached else "crop 0.08-1, flip"
    }
    if sweep:
        rest, held = (train.take(cut) for cut in split_off(train.source, 0.1, seed=subject.seed))
        chosen = fit_layers(subject, rest, held, recipe=recipe, cached=cached, lrs=sweep)
        best = max(range(len(sweep)), key=lambda which: chosen.last(which)[0])
        recipe = replace(recipe, lr=sweep[best])
        settings["sweep"] = {
            "chosen on": f"{len(held.source)} training images",
            "top-1 there": {f"{lr:g}": chosen.last(i)[0] for i, lr in enumerate(sweep)},
        }
    curves = fit_layers(subject, train, test, recipe=recipe, cached=cached)
    (top1, top5), (epoch, highest) = curves.last(), curves.best()
    figures = {"top-1": top1} | ({"top-5": top5} if subject.classes > 5 else {})
    figures["best top-1, chosen on test"] = highest
    settings |= {**asdict(recipe), "best epoch": epoch}
    settings["top-1 by epoch"] = [row[0] for row in curves.top1]
    return Result(name, figures, settings)
