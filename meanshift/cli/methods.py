"""`meanshift methods`: every method with its paper, its cost and its settings."""

from __future__ import annotations

import argparse
import inspect
import textwrap

from meanshift.config import METHODS, MethodSettings, settings

HELP = "every method with its paper, its cost and its settings"


def add_arguments(_: argparse.ArgumentParser) -> None:
    pass


def run(_: argparse.Namespace) -> int:
    for name, method in METHODS.items():
        print(f"{name}\n{textwrap.indent(describe_method(method), '  ')}\n")
    print(
        "train with one of them:  meanshift pretrain small --data SOURCE --out RUN --method.name "
        "NAME\nwith one of your own:    --method.module FILE.py:CLASS (docs/architecture.md)"
    )
    return 0


def describe_method(method: type[MethodSettings]) -> str:
    """The docstring of a method's settings, and each setting with its default."""
    lines = [inspect.cleandoc(method.__doc__ or "")]
    for path, _, default, text in settings(method):
        if path.startswith("method.") and path not in ("method.name", "method.module"):
            flag = f"--{path} {default}"
            lines += textwrap.wrap(
                text, 96, initial_indent=f"{flag:35} ", subsequent_indent=" " * 36
            )
    return "\n".join(lines)
