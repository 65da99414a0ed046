"""Every setting of a run as a flag."""

from __future__ import annotations

import argparse

from meanshift.config import Config, settings


def add_settings(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("settings", "any of them, over those of the recipe")
    for name, kind, default, text in settings():
        group.add_argument(
            f"--{name}",
            dest=f"setting {name}",
            nargs="?" if kind is bool else None,
            const="true" if kind is bool else None,
            metavar="VALUE",
            help=f"{text} [{default}]".replace("%", "%%"),
        )


def configure(given: argparse.Namespace, base: Config) -> Config:
    own = {} if getattr(given, "data", None) is None else {"data.source": given.data}
    return base.with_overrides(chosen(given) | own)


def chosen(given: argparse.Namespace) -> dict[str, str]:
    """The settings that were typed."""
    return {
        key.removeprefix("setting "): value
        for key, value in vars(given).items()
        if key.startswith("setting ") and value is not None
    }
