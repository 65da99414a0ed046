"""The command line. Only this package parses arguments; commands import heavy modules when run.

Each command is a module with `HELP`, `add_arguments(parser)` and `run(args)`. A command whose flags
are the settings of a run also has `base_config(argv)`, the configuration that they change.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from meanshift.cli import (
    completion,
    demo,
    doctor,
    embed,
    evaluate,
    explore,
    export,
    figures,
    index,
    methods,
    pack,
    predict,
    pretrain,
    recipes,
    report,
    reproduce,
    search,
)
from meanshift.cli.arguments import Parser, ShowVersions
from meanshift.cli.output import check_single_process, print_error, print_status
from meanshift.cli.settings import add_settings, is_setting, refuse_unknown_settings
from meanshift.config import Config
from meanshift.config.parsing import close
from meanshift.runtime import signals
from meanshift.runtime.errors import Note
from meanshift.runtime.malloc import keep_memory
from meanshift.runtime.output import survive_closed_output

COMMANDS: dict[str, Any] = {
    "demo": demo,
    "doctor": doctor,
    "pretrain": pretrain,
    "evaluate": evaluate,
    "embed": embed,
    "export": export,
    "figures": figures,
    "report": report,
    "explore": explore,
    "predict": predict,
    "index": index,
    "search": search,
    "reproduce": reproduce,
    "recipes": recipes,
    "methods": methods,
    "pack": pack,
    "completion": completion,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; an error of the user becomes one message and the exit code 2."""
    with survive_closed_output():
        return _run(sys.argv[1:] if arguments is None else arguments)


def _run(argv: Sequence[str]) -> int:
    _set_environment()
    warnings.showwarning = _warning_printer()
    trains = bool(argv) and hasattr(COMMANDS.get(argv[0]), "base_config")
    try:
        with signals.stop_at_once() if trains else nullcontext():
            args = parse_arguments(argv)
            if not args.several_processes:
                check_single_process(args.command)
            keep_memory()
            code: int = COMMANDS[args.command].run(args)
            return code
    except signals.Stopped as stopped:
        print_status(f"meanshift: {stopped}")
        return stopped.code
    except RuntimeError as error:
        if not str(error).startswith("DataLoader worker"):
            raise
        print_error(_describe_lost_worker(error))
        return 2
    except (ValueError, OSError) as error:
        print_error(error)
        named = any(word.startswith(("--method.module", "--views.module")) for word in argv)
        if named and not os.environ.get("MEANSHIFT_TRACEBACK"):  # it may be the file's own error
            print_status("set MEANSHIFT_TRACEBACK=1 to see where it was raised")
        return 2
    except KeyboardInterrupt:
        print("meanshift: interrupted", file=sys.stderr)
        return 130


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments of a command; only the command that is named gets its flags."""
    parser, chosen = build_parsers(argv)
    if argv and not argv[0].startswith("-") and argv[0] not in COMMANDS:
        near = close(argv[0], list(COMMANDS), list(COMMANDS))
        parser.error(f"unknown command {argv[0]}; did you mean {near}?")
    base: Config | None = None
    if chosen is not parser and hasattr(COMMANDS[argv[0]], "base_config"):
        base = COMMANDS[argv[0]].base_config(argv[1:])
        add_settings(chosen, base)
    args: argparse.Namespace
    args, unknown = parser.parse_known_args(argv)
    chosen.refuse_options([word for word in unknown if base is None or not is_setting(word)])
    if args.command is None:
        parser.print_help()
        parser.exit()
    if base is not None:
        refuse_unknown_settings(base, unknown)
    if unknown:
        chosen.error(f"unrecognized arguments: {' '.join(unknown)}")
    return args


def build_parsers(argv: Sequence[str]) -> tuple[Parser, Parser]:
    """The parser of the program, and that of the command in `argv` or else the same one.

    The flags that are settings are not there yet: they depend on the other arguments.
    """
    parser = Parser(
        prog="meanshift", description="Learn from images without labels, by Mean Shift."
    )
    parser.add_argument(
        "--version", action=ShowVersions, nargs=0, help="show versions and device, and exit"
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    chosen = parser
    for name, command in COMMANDS.items():
        added = commands.add_parser(name, help=command.HELP, description=command.HELP)
        added.set_defaults(several_processes=False)
        if argv and argv[0] == name:
            chosen = added
            command.add_arguments(added)
    return parser, chosen


def _set_environment() -> None:
    """Set what torch reads when it is imported.

    OpenMP threads that wait for each other busily take the cores from loader workers: they sleep
    sooner. A lost process is reported in one sentence, without the stack of a library.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "30000")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def _describe_lost_worker(error: RuntimeError) -> OSError:
    """What to do about a loader process that was killed, as the system does without memory."""
    return OSError(
        f"{str(error).strip().rstrip('.')}, perhaps because the memory is full; type the same "
        f"command again, with fewer workers if it happens again (pretrain continues from its last "
        f"checkpoint)"
    )


def _warning_printer() -> Callable[..., None]:
    """What prints warnings; a note only once, as a command may open a source several times."""
    notes = set[str]()

    def print_warning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        if not issubclass(category, Note):
            print_status(f"warning: {message}")
        elif str(message) not in notes:
            notes.add(str(message))
            print_status(str(message))

    return print_warning
