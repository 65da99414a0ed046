"""Every setting of a run: frozen dataclasses that check themselves, and the named recipes."""

from meanshift.config.methods import DEFAULT_METHOD, METHODS, MSF, BYOLAsym, MethodSettings
from meanshift.config.samples import SampleSpec
from meanshift.config.schema import (
    FORMAT,
    RESUME_SAFE,
    Config,
    Data,
    Encoder,
    Optim,
    Train,
    check_setting_name,
    differences,
    resume_safe,
    settings,
)
from meanshift.config.views import Strength, Views, ViewSpec

__all__ = [
    "DEFAULT_METHOD",
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
    "SampleSpec",
    "Strength",
    "Train",
    "ViewSpec",
    "Views",
    "check_setting_name",
    "differences",
    "resume_safe",
    "settings",
]
