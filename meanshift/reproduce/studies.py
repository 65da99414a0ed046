"""The paper's tables and ablations as declarations: what is changed, measured and claimed.

A study is a list of changes to a recipe, the columns of its table and the paper's claims about
them; the columns determine which protocols are run. To add a study, write a function here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from meanshift.reproduce.claims import Claim, below, collapses, higher, similar


@dataclass(frozen=True)
class Variant:
    """A row of a study's table."""

    title: str
    changes: Mapping[str, Any]
    """settings that differ from the recipe's"""
    paper: Mapping[str, float] = field(default_factory=dict)
    """the paper's metrics by column"""
    position: float | None = None
    """on the axis of the study"""
    weights: str = ""
    """`random`: evaluate the random weights of the run's encoder, not what it has learned"""


@dataclass(frozen=True)
class Study:
    """A table of the paper with its claims."""

    title: str
    variants: Sequence[Variant]
    columns: Sequence[str]
    claims: Sequence[Claim]
    axis: str = ""
    """what `Variant.position` counts; without an axis the variants are bars"""
    figure: str = ""
    """a figure of `meanshift figures` of all runs, drawn instead of the table's columns"""
    trains: bool = True
    """False: the variants are sizes of a bank whose search is timed"""


def _views(target_and_online: str) -> dict[str, Any]:
    """`w/s`: a weak view for the target encoder, a strong one for the online encoder."""
    strengths = {"w": "weak", "s": "strong"}
    target, online = target_and_online.split("/")
    return {"method.target_view": strengths[target], "method.online_view": strengths[online]}


def _byol(target_and_online: str) -> dict[str, Any]:
    """BYOL-asym as Mean Shift with k=1, so that every other setting stays equal."""
    return {"method.k": 1, **_views(target_and_online)}


def _paper(linear: float, one: float, twenty: float) -> dict[str, float]:
    return {"linear": linear, "1-NN": one, "20-NN": twenty}


_BYOL_SS = Variant("BYOL-asym s/s", _byol("s/s"), _paper(69.3, 55.0, 59.2))
_BYOL_WS = Variant("BYOL-asym w/s", _byol("w/s"), _paper(69.5, 55.8, 59.1))
_BYOL_WW = Variant("BYOL-asym w/w", _byol("w/w"), {"linear": 60.1})  # BYOL's own, symmetric
_MSF_SS = Variant("MSF s/s", _views("s/s"), _paper(71.4, 60.6, 64.0))
_MSF_WS = Variant("MSF w/s", _views("w/s"), _paper(72.4, 62.0, 64.9))
_MSF_WW = Variant("MSF w/w", _views("w/w"), _paper(66.3, 54.6, 57.4))


def _method(title: str, name: str, paper: Mapping[str, float], **changes: Any) -> Variant:
    """Another method, with its own views and optimizer."""
    own = {f"method.{setting}": value for setting, value in changes.items()}
    return Variant(title, {"method.name": name, **own}, paper)


_OTHER_METHODS = [  # the paper's rows of 200 epochs where there are some, else the nearest
    _method("Supervised", "supervised", _paper(76.2, 71.4, 74.8)),
    _method("SeLa-v2 (sym.)", "sela-v2", {"linear": 67.2}, small_crops=0),
    _method("SimCLR (sym.)", "simclr", {"linear": 68.3}),
    _method("SwAV (sym.)", "swav", {"linear": 69.1}, small_crops=0),
    _method("DeepCluster-v2 (sym.)", "deepcluster-v2", {"linear": 70.2}, small_crops=0),
    _method("SimSiam (sym.)", "simsiam", {"linear": 70.0}),
    _method("BYOL (sym.)", "byol", {"linear": 70.6}),
    _method("MoCo v2", "moco", _paper(67.5, 50.9, 54.3)),
    _method("CO2", "co2", {"linear": 68.0}),
    _method("ISD", "isd", _paper(69.8, 59.2, 62.0)),
    _method("InvP", "invp", {"linear": 71.3}),
    _method("PIRL", "pirl", {}),
    _method("CompRess", "compress", _paper(71.9, 63.3, 66.8)),  # of a larger teacher
]
_RANDOM = Variant("Random weights", _views("w/s"), _paper(5.1, 1.5, 2.0), weights="random")
_KNN = ("1-NN", "20-NN")
_ALL = (*_KNN, "linear")


def main(_: Sequence[int]) -> Study:
    """CompRess is left out where there is no teacher (`Experiment.teacher`)."""
    study = baseline(())
    return Study(
        "All methods on the whole data, at equal cost",
        [*_OTHER_METHODS, *study.variants, _RANDOM],
        _ALL,
        [
            higher("MSF is better than MoCo v2", "MSF s/s", "MoCo v2"),
            higher("MSF is better than ISD", "MSF s/s", "ISD"),
            *study.claims,
        ],
    )


def baseline(_: Sequence[int]) -> Study:
    return Study(
        "BYOL-asym and MSF on the whole data",
        [_BYOL_SS, _MSF_SS, _BYOL_WS, _MSF_WS, _BYOL_WW, _MSF_WW],
        _ALL,
        [
            higher("MSF is better than BYOL-asym", "MSF s/s", "BYOL-asym s/s"),
            higher(
                "With weak target views MSF is better than BYOL-asym", "MSF w/s", "BYOL-asym w/s"
            ),
            higher("Weak views for the target improve MSF", "MSF w/s", "MSF s/s"),
            higher("With weak views alone MSF is better than BYOL", "MSF w/w", "BYOL-asym w/w"),
        ],
    )


def k(_: Sequence[int]) -> Study:
    paper = {2: (61.0, 64.2), 5: (62.0, 64.9), 10: (62.5, 65.7), 20: (62.0, 65.4), 50: (61.5, 64.9)}
    return Study(
        "The number of neighbors k",
        [
            Variant("k=1", _byol("w/s"), {"1-NN": 55.8, "20-NN": 59.1}, position=1.0),
            *(
                Variant(
                    f"k={k}",
                    _views("w/s") | {"method.k": k},
                    dict(zip(_KNN, metrics, strict=True)),
                    position=float(k),
                )
                for k, metrics in paper.items()
            ),
        ],
        (*_KNN, "purity"),
        [
            higher("One neighbor more is better than none", "k=2", "k=1", *_KNN),
            higher("k=5 is better than k=1, which is BYOL", "k=5", "k=1", *_KNN),
            higher("k=10 is better than k=5", "k=10", "k=5", *_KNN),
            similar("From k=5 to k=50 little changes", "k=50", "k=5", 2.0, *_KNN),
            higher("Fewer neighbors are purer", "k=2", "k=50", "purity"),
        ],
        axis="k",
    )


def equal_weights(_: Sequence[int]) -> Study:
    """The paper's loss within a recipe that gives the neighbors less weight."""
    equal = {"method.neighbor_weight": 0.0}
    return Study(
        "The number of neighbors k, all of them with equal weight",
        [
            Variant("k=1", _byol("w/s"), position=1.0),
            *(
                Variant(
                    f"k={k}, equal weights",
                    _views("w/s") | {"method.k": k} | equal,
                    position=float(k),
                )
                for k in (2, 5, 10, 20, 50)
            ),
            Variant(
                "k=5, weight 0.25", _views("w/s") | {"method.k": 5, "method.neighbor_weight": 0.25}
            ),
        ],
        (*_KNN, "purity"),
        [
            higher("With equal weights k=5 is better than k=1", "k=5, equal weights", "k=1", *_KNN),
            higher(
                "A lower weight of the neighbors is better",
                *("k=5, weight 0.25", "k=5, equal weights", *_KNN),
            ),
        ],
    )


def nearest(_: Sequence[int]) -> Study:
    """Not in the paper: only the most similar neighbors count (docs/results.md has the reason)."""
    equal = _views("w/s") | {"method.k": 5, "method.neighbor_weight": 0.0}
    quarter = "k=5, equal weights, nearest quarter"
    return Study(
        "Beyond the paper: only the nearest quarter of all neighbors counts",
        [
            Variant("k=1", _byol("w/s")),
            Variant("k=5, equal weights", equal),
            Variant(quarter, equal | {"method.neighbor_fraction": 0.25}),
        ],
        _ALL,
        [
            higher("The nearest quarter is better than all", quarter, "k=5, equal weights"),
            higher("The nearest quarter is better than none", quarter, "k=1"),
        ],
    )


def bank(sizes: Sequence[int]) -> Study:
    paper = {128_000: (62.0, 65.2), 1_024_000: (62.0, 64.9)}
    titles = [f"{size:,} rows" for size in sizes]
    large = titles[max(1, len(titles) - 2)]
    claims = [higher("A large bank is better than the smallest", large, titles[0], *_KNN)]
    if titles[-1] != large:
        claims.append(similar("The largest is like the one before", titles[-1], large, 1.0, *_KNN))
    return Study(
        "The size of the memory bank",
        [
            Variant(
                title,
                _views("w/s") | {"method.bank_size": size},
                dict(zip(_KNN, paper.get(size, ()), strict=False)),
                position=float(size),
            )
            for title, size in zip(titles, sizes, strict=True)
        ],
        (*_KNN, "purity"),
        claims,
        axis="rows in the bank",
    )


def augmentation(_: Sequence[int]) -> Study:
    return Study(
        "Weak and strong views, for the target and the online encoder",
        [
            *(_BYOL_SS, _BYOL_WS, Variant("BYOL-asym s/w", _byol("s/w")), _BYOL_WW),
            *(_MSF_SS, _MSF_WS, Variant("MSF s/w", _views("s/w")), _MSF_WW),
        ],
        _ALL,
        [
            similar("w/s changes little for BYOL", "BYOL-asym w/s", "BYOL-asym s/s", 1.0),
            higher("w/s improves MSF", "MSF w/s", "MSF s/s"),
            higher("With weak views alone MSF is better than BYOL", "MSF w/w", "BYOL-asym w/w"),
        ],
    )


def same_view(_: Sequence[int]) -> Study:
    same_view = {"method.same_view": True}
    return Study(
        "One view for both encoders",
        [
            _MSF_WS,
            Variant("MSF, the same weak view", _views("w/w") | same_view),
        ],
        (*_KNN, "rank", "agreement", "collapse at epoch"),
        [
            collapses("With one view for both MSF collapses", "MSF, the same weak view"),
            higher("Two views learn more than one", "MSF w/s", "MSF, the same weak view", *_KNN),
        ],
    )


def purity(_: Sequence[int]) -> Study:
    ks = {k: _views("w/s") | {"method.k": k} for k in (2, 5, 10, 20, 50)}
    return Study(
        "The purity of the neighbors",
        [
            *(Variant(f"w/s, k={k}", changes) for k, changes in ks.items()),
            Variant("s/s, k=5", _views("s/s") | {"method.k": 5}),
        ],
        ("purity", "purity, weak views", "purity, strong views"),
        [
            higher("Neighbors are purer with w/s than with s/s", "w/s, k=5", "s/s, k=5", "purity"),
            higher("Fewer neighbors are purer", "w/s, k=2", "w/s, k=50", "purity"),
            higher(
                "The target's neighbors are purer by weak views",
                *("w/s, k=10", "w/s, k=10", "purity, weak views", "purity, strong views"),
                across=True,
            ),
        ],
        figure="purity",
    )


def beyond(_: Sequence[int]) -> Study:
    """Not in the paper: options with which neighbors help in a short run."""
    white = {"method.whiten": True}
    filled = {"method.search_filled_only": True}
    unfilled = {"method.search_filled_only": False}
    byol = _byol("w/s") | unfilled
    msf = _views("w/s") | unfilled
    return Study(
        "Beyond the paper: whitened targets and no random rows",
        [
            Variant("BYOL-asym", byol),
            Variant("MSF", msf),
            Variant("MSF, filled rows only", msf | filled),
            Variant("BYOL-asym, whitened", byol | white),
            Variant("MSF, whitened", msf | white),
            Variant("MSF, whitened, filled rows only", msf | white | filled),
        ],
        (*_ALL, "purity", "rank"),
        [
            higher("Filled rows only improves MSF", "MSF, filled rows only", "MSF", *_ALL),
            higher("Whitened targets improve MSF", "MSF, whitened", "MSF", *_ALL),
            higher("Whitened targets improve BYOL", "BYOL-asym, whitened", "BYOL-asym", *_ALL),
            higher(
                "Without random rows whitened targets improve MSF",
                *("MSF, whitened, filled rows only", "MSF, filled rows only", *_ALL),
            ),
            higher(
                "With both, neighbors help",
                *("MSF, whitened, filled rows only", "BYOL-asym, whitened", *_ALL),
            ),
        ],
    )


def few_labels(_: Sequence[int]) -> Study:
    columns = ("1% of labels", "10% of labels")

    def paper(one: float, ten: float) -> dict[str, float]:
        return dict(zip(columns, (one, ten), strict=True))

    return Study(
        "A linear layer from few labels",
        [
            Variant("BYOL-asym s/s", _byol("s/s"), paper(47.9, 61.3)),
            Variant("MSF s/s", _views("s/s"), paper(53.5, 65.2)),
            Variant("MSF w/s", _views("w/s"), paper(55.5, 66.5)),
        ],
        columns,
        [
            higher("MSF needs fewer labels than BYOL-asym", "MSF s/s", "BYOL-asym s/s"),
            higher("w/s improves MSF", "MSF w/s", "MSF s/s"),
        ],
    )


def cost(sizes: Sequence[int]) -> Study:
    columns = ("search, % of a step", "GFLOPs per image", "MB")
    paper = {128_000: (0.72, 0.13), 1_024_000: (6.78, 1.05)}
    bank_sizes = sorted({*sizes, 128_000})
    return Study(
        "What finding the neighbors costs",
        [
            Variant(
                f"{size:,} rows",
                {},
                dict(zip(columns, paper.get(size, ()), strict=False)),
                position=float(size),
            )
            for size in bank_sizes
        ],
        columns,
        [below("128,000 rows add less than 1% to a step", "128,000 rows", columns[0], 1.0)],
        axis="rows in the bank",
        trains=False,
    )


STUDIES: dict[str, Callable[[Sequence[int]], Study]] = {
    make.__name__.replace("_", "-"): make
    for make in (
        *(main, baseline, k, equal_weights, nearest, bank, augmentation, same_view, purity, cost),
        *(few_labels, beyond),
    )
}
"""Each takes the bank sizes that the scale compares; the last one is as large as the dataset."""
