"""Every setting of a run: frozen dataclasses that check themselves, and the named recipes."""

from meanshift.config.methods import METHODS, MSF, BYOLAsym, MethodSettings
from meanshift.config.schema import (
    FORMAT,
    RESUME_SAFE,
    Config,
    Data,
    Encoder,
    Optim,
    Train,
    differences,
    settings,
)
from meanshift.config.views import Strength, Views, ViewSpec

__all__ = [
    "FORMAT",
    "METHODS",
    "MSF",
    "RESUME_SAFE",
    "BYOLAsym",
    "Config",
    "Data",
    "Encoder",
    "MethodSettings",
    "Optim",
    "Strength",
    "Train",
    "ViewSpec",
    "Views",
    "differences",
    "settings",
]
