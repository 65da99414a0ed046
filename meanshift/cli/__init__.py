"""The front door: the only room that parses arguments; heavy imports happen inside the commands."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from meanshift import __version__
from meanshift.cli import judging, packing, pretrain, repeating, seeing, showing
from meanshift.cli.speaking import complain, refuse_many, say
from meanshift.runtime.malloc import keep_memory

Command = Callable[[str, Callable[[argparse.Namespace], int], str], argparse.ArgumentParser]
"""How a file of commands adds one: its name, what runs it, its help."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; a user's mistake becomes one clear message and exit code 2."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.run is None:
        parser.print_help()
        return 0
    warnings.showwarning = _show_warning
    keep_memory()
    _wait_asleep()
    try:
        if not given.processes:
            refuse_many(given.command)
        code: int = given.run(given)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        complain(error)
        return 2
    except KeyboardInterrupt:
        print("meanshift: interrupted", file=sys.stderr)
        return 130


def _wait_asleep() -> None:
    """Threads that wait for each other sleep sooner; before torch is loaded, which asks once.

    By default they keep their cores busy for so long that loader workers, or anything else that
    computes, get too little of them.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "30000")
    # A lost process is told of in a sentence; the frames of a library's stack would bury it.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    say(f"warning: {message}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="meanshift",
        description="Learn from images without labels, by Mean Shift.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"meanshift {__version__}")
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    def command(
        name: str, run: Callable[[argparse.Namespace], int], help: str
    ) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=help, description=help, allow_abbrev=False)
        added.set_defaults(run=run, command=name, processes=False)
        return added

    for part in (pretrain, packing, judging, seeing, repeating, showing):
        part.add(command)
    return parser
