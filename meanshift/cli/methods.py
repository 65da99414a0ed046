"""`meanshift methods`: every method with its loss, its cost, its paper and its settings."""

from __future__ import annotations

import argparse
import inspect
import textwrap
from collections.abc import Iterable

from meanshift.config import METHODS, MethodSettings, settings
from meanshift.config.methods import settings_class

HELP = "every method with its loss, its cost, its paper and its settings"

_WIDTH = 96


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name", nargs="*", help=f"methods to describe with their settings: {', '.join(METHODS)}"
    )


def run(args: argparse.Namespace) -> int:
    chosen = {name: settings_class(name) for name in args.name}
    if chosen:
        for name, method in chosen.items():
            print(f"{name}\n{textwrap.indent(describe_method(method), '  ')}\n")
    else:
        print("\n".join(summarize_methods(METHODS.items())))
    print(
        "train with one of them:  meanshift pretrain small --data SOURCE --out RUN --method.name "
        "NAME\nits settings:            meanshift methods NAME\n"
        "with one of your own:    --method.module FILE.py:CLASS (docs/architecture.md)"
    )
    return 0


def summarize_methods(methods: Iterable[tuple[str, type[MethodSettings]]]) -> list[str]:
    """A table of the methods: cost of a step relative to MSF's, needs, loss and paper."""
    lines = [f"{'method':<16}{'cost':>5}  needs"]
    for name, method in methods:
        cost = method().relative_cost
        lines.append(f"{name:<16}{cost:>5.2g}  {', '.join(method.needs) or 'nothing else'}")
        indent = " " * 23
        lines += textwrap.wrap(method.loss, _WIDTH, initial_indent=indent, subsequent_indent=indent)
        lines.append(f"{indent}{_paper(method)}")
    lines += [
        "",
        "cost: of a step relative to msf's, by its passes through the network (a backward pass",
        "counts as two forward passes); measured times: docs/performance.md",
        "",
    ]
    return lines


def describe_method(method: type[MethodSettings]) -> str:
    """The docstring of a method's settings, and each setting with its default."""
    lines = [inspect.cleandoc(method.__doc__ or "")]
    for path, _, default, text in settings(method):
        if path.startswith("method.") and path not in ("method.name", "method.module"):
            flag = f"--{path} {default}"
            lines += textwrap.wrap(
                text, _WIDTH, initial_indent=f"{flag:35} ", subsequent_indent=" " * 36
            )
    return "\n".join(lines)


def _paper(method: type[MethodSettings]) -> str:
    """The line of the docstring that names the paper."""
    lines = inspect.cleandoc(method.__doc__ or "").splitlines()
    return next((line.removeprefix("paper: ") for line in lines if line.startswith("paper:")), "")
