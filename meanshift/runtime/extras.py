"""Packages that are optional: each belongs to an extra of this program."""

from __future__ import annotations

import importlib

_DISTRIBUTIONS = {"PIL": "pillow", "sklearn": "scikit-learn"}
"""names on PyPI, where they differ from the name that is imported"""


def require(module: str, *, extra: str, what: str) -> None:
    """Check that an optional package can be imported; the error names the extra to install.

    >>> require("matplotlib", extra="report", what="figures")
    >>> from matplotlib.figure import Figure
    """
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != package:
            raise  # the package is there, but one that it needs is not
        name = _DISTRIBUTIONS.get(package, package)
        raise ValueError(f"{what} need {name}; type: pip install 'meanshift[{extra}]'") from None


def require_report() -> None:
    """Check the packages of the extra `report` before long work that ends with a page."""
    for module in ("jinja2", "matplotlib", "sklearn"):
        require(module, extra="report", what="report pages")
