"""Learn representations from unlabeled data by Mean Shift.

>>> import meanshift as ms
>>> model = ms.fit("photos/", out="runs/photos")
>>> features = model.embed(["a.jpg", "b.jpg"])

The names below are imported when they are first used, so that importing the package is instant.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meanshift.api import Model, evaluate, fit, load, recipes
    from meanshift.config import Config
    from meanshift.config.recipes import recipe
    from meanshift.estimator import MeanShiftEncoder
    from meanshift.evaluation.index import Index
    from meanshift.evaluation.samples import Neighbors
    from meanshift.methods.base import Method
    from meanshift.methods.memory_bank import MemoryBank
    from meanshift.methods.msf import MeanShift
    from meanshift.models.weights import load_encoder
    from meanshift.training.loop import pretrain

    def methods() -> dict[str, str]: ...


__version__ = "0.1.0"
__all__ = [
    "Config",
    "Index",
    "MeanShift",
    "MeanShiftEncoder",
    "MemoryBank",
    "Method",
    "Model",
    "Neighbors",
    "__version__",
    "evaluate",
    "fit",
    "load",
    "load_encoder",
    "methods",
    "pretrain",
    "recipe",
    "recipes",
]

_MODULES = {
    "Config": "meanshift.config",
    "Index": "meanshift.evaluation.index",
    "MeanShift": "meanshift.methods.msf",
    "MemoryBank": "meanshift.methods.memory_bank",
    "MeanShiftEncoder": "meanshift.estimator",
    "Method": "meanshift.methods.base",
    "Model": "meanshift.api",
    "Neighbors": "meanshift.evaluation.samples",
    "evaluate": "meanshift.api",
    "fit": "meanshift.api",
    "load": "meanshift.api",
    "load_encoder": "meanshift.models.weights",
    "pretrain": "meanshift.training.loop",
    "recipe": "meanshift.config.recipes",
    "recipes": "meanshift.api",
}


def __getattr__(name: str) -> Any:
    if name == "methods":  # a package, which lists the methods when it is called
        return import_module("meanshift.methods")
    if name == "MeanShiftEncoder":
        from meanshift.runtime.extras import require

        try:
            require("sklearn", extra="sklearn", what="scikit-learn estimators")
        except ValueError as missing:
            raise ImportError(str(missing)) from None
    if name not in _MODULES:
        raise AttributeError(f"module 'meanshift' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return __all__
