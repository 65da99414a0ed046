"""Learn image representations from unlabeled images by Mean Shift.

The names below are loaded when they are first used, so that importing the package is instant.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meanshift.config import Config
    from meanshift.methods.memory_bank import MemoryBank
    from meanshift.methods.msf import MeanShift
    from meanshift.models.weights import load_encoder
    from meanshift.training.loop import pretrain

__version__ = "0.1.0"
__all__ = ["Config", "MeanShift", "MemoryBank", "__version__", "load_encoder", "pretrain"]

_HOMES = {
    "Config": "meanshift.config",
    "MeanShift": "meanshift.methods.msf",
    "MemoryBank": "meanshift.methods.memory_bank",
    "load_encoder": "meanshift.models.weights",
    "pretrain": "meanshift.training.loop",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'meanshift' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
