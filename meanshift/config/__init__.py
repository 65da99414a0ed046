"""Every setting of a run: frozen dataclasses that check themselves, and the named recipes."""

from meanshift.config.schema import (
    HARMLESS,
    Config,
    Data,
    Encoder,
    Method,
    Strength,
    Train,
    Views,
    differences,
    settings,
)

__all__ = [
    "HARMLESS",
    "Config",
    "Data",
    "Encoder",
    "Method",
    "Strength",
    "Train",
    "Views",
    "differences",
    "settings",
]
