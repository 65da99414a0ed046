"""Learn image representations from unlabeled images by Mean Shift.

The names below are imported when they are first used, so that importing the package is instant.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meanshift.config import Config
    from meanshift.config.recipes import recipe
    from meanshift.methods.base import Method
    from meanshift.methods.memory_bank import MemoryBank
    from meanshift.methods.msf import MeanShift
    from meanshift.models.weights import load_encoder
    from meanshift.training.loop import pretrain

__version__ = "0.1.0"
__all__ = [
    "Config",
    "MeanShift",
    "MemoryBank",
    "Method",
    "__version__",
    "load_encoder",
    "pretrain",
    "recipe",
]

_MODULES = {
    "Config": "meanshift.config",
    "MeanShift": "meanshift.methods.msf",
    "MemoryBank": "meanshift.methods.memory_bank",
    "Method": "meanshift.methods.base",
    "load_encoder": "meanshift.models.weights",
    "pretrain": "meanshift.training.loop",
    "recipe": "meanshift.config.recipes",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'meanshift' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return __all__
