"""The methods: one file a paper, behind the contract of `base`."""

from __future__ import annotations

import importlib
import inspect
import sys
from types import ModuleType
from typing import Any

from meanshift.config import METHODS, Config, MethodSettings, ViewSpec
from meanshift.config.methods import load_class
from meanshift.methods.base import Batch, BuildContext, Method, Progress, StepOutput
from meanshift.methods.msf import MeanShift

__all__ = [
    "Batch",
    "BuildContext",
    "MeanShift",
    "Method",
    "Progress",
    "StepOutput",
    "method_class",
    "view_specs",
]

_CLASSES = {
    "msf": "msf:MeanShift",
    "byol-asym": "msf:MeanShift",
    "byol": "byol:BYOL",
    "simsiam": "simsiam:SimSiam",
    "vicreg": "vicreg:VICReg",
    "cmsf": "cmsf:CMSF",
    "swav": "swav:SwAV",
    "deepcluster-v2": "deepcluster_v2:DeepClusterV2",
    "sela-v2": "sela_v2:SeLaV2",
    "invp": "invp:InvP",
    "pirl": "pirl:PIRL",
    "compress": "compress:CompRess",
    "supervised": "supervised:Supervised",
    "moco": "moco:MoCo",
    "co2": "co2:CO2",
    "isd": "isd:ISD",
    "simclr": "simclr:SimCLR",
}


def method_class(settings: MethodSettings) -> type[Method]:
    """The class that implements a method of this program, or one from outside."""
    if not settings.module:
        module, _, name = _CLASSES[settings.name].partition(":")
        chosen: type[Method] = getattr(importlib.import_module(f"{__name__}.{module}"), name)
        return chosen
    found: Any = load_class(settings.module)
    if not (isinstance(found, type) and issubclass(found, Method)):
        raise ValueError(
            f"method.module: {settings.module} is no method; need a subclass of "
            f"meanshift.methods.Method"
        )
    return found


def view_specs(config: Config) -> tuple[ViewSpec, ...]:
    """The views that the method of a config declares."""
    return method_class(config.method).views(config.method, config.views)


class _Methods(ModuleType):
    """This package, which can be called: `meanshift.methods()` lists the methods."""

    def __call__(self) -> dict[str, str]:
        """Every method by name, with its paper, loss and needs."""
        return {name: inspect.cleandoc(kind.__doc__ or "") for name, kind in METHODS.items()}


sys.modules[__name__].__class__ = _Methods
