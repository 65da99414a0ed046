"""Every setting of a run as a flag; which settings there are depends on the method."""

from __future__ import annotations

import argparse
import itertools
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from meanshift.cli.arguments import Parser
from meanshift.cli.output import print_status
from meanshift.config import (
    METHODS,
    Config,
    MethodSettings,
    check_setting_name,
    differences,
    settings,
)
from meanshift.config.parsing import setting_text
from meanshift.config.recipes import RECIPES, recipe


def add_settings(parser: argparse.ArgumentParser, config: Config) -> None:
    """Add a flag for each setting of a configuration; the help shows the values that it has."""
    short_usage = parser.format_usage().removeprefix("usage: ").strip()
    parser.usage = f"{short_usage} [--SETTING VALUE ...]"
    values = config.to_dict()
    every = settings(type(config.method))
    for group, members in itertools.groupby(every, key=lambda each: each[0].partition(".")[0]):
        summary = (type(getattr(config, group)).__doc__ or "").partition("\n")[0]
        flags = parser.add_argument_group(f"{group} settings", summary.replace("%", "%%"))
        for path, kind, _, text in members:
            value = values[group][path.partition(".")[2]]
            _add_flag(flags, path, kind, help=f"{text} [{setting_text(value)}]".replace("%", "%%"))


def typed_settings(args: argparse.Namespace) -> dict[str, str]:
    """The settings that were typed, by their dotted names."""
    return {name: value for name, value in vars(args).items() if "." in name}


def configure(args: argparse.Namespace) -> Config:
    """The configuration of `pretrain` and `demo`: a recipe or a file, changed by the flags.

    Another method brings its own views, optimizer and schedule, and given weights need a lower
    learning rate: these changes are printed.
    """
    base = load_base_config(args.recipe, args.config)
    typed = typed_settings(args)
    if getattr(args, "data", None) is not None:
        typed["data.source"] = args.data
    config = base.with_overrides(typed)
    changes = _implied_changes(base, config, typed)
    if changes:
        name = args.recipe or args.config
        lines = [f"  {path}: {new} ({name}: {old})" for path, (old, new) in changes.items()]
        cause = "encoder.weights" if _same_method(base, config) else _describe_method(config)
        print_status("\n".join([f"{cause} changes these settings:", *lines]))
    return config


def load_base_config(recipe_name: str | None, file: Path | None) -> Config:
    """The configuration that flags change: that of a recipe, or of a file."""
    if recipe_name is not None and file is not None:
        raise ValueError(f"got the recipe {recipe_name} and --config {file}; need one of them")
    if recipe_name is not None:
        return recipe(recipe_name)
    if file is None:
        raise ValueError(f"need a recipe ({', '.join(RECIPES)}) or --config FILE")
    try:
        return Config.from_json(file.expanduser().read_text())
    except OSError as error:
        raise ValueError(
            f"--config: {file} cannot be read ({error.strerror}); need a file as RUN/config.json"
        ) from None
    except ValueError as error:
        raise ValueError(f"--config: {file}: {error}") from None


def prescan_base_config(
    argv: Sequence[str],
    positionals: Sequence[str] = ("recipe",),
    options: Sequence[str] = ("--data", "--out"),
) -> Config:
    """The recipe or file on a command line, with its method, before the other flags are known.

    The flags of the real parser are those of this method. What cannot be parsed is left for the
    real parser to report.
    """
    scanner = Parser(add_help=False, exit_on_error=False)
    scanner.add_argument("-h", "--help", action="store_true")
    scanner.add_argument("--config", type=Path)
    scanner.add_argument("--method.module", default="")
    try:
        found = vars(scanner.parse_known_args(argv)[0])
        base = Config() if found["config"] is None else load_base_config(None, found["config"])
        if found["method.module"]:
            base = base.with_overrides({"method.module": found["method.module"]})
        # With the flags of every method the scanner can tell a recipe from the value of a flag.
        for path, kind in _settings_of([*METHODS.values(), type(base.method)]).items():
            if path != "method.module":
                _add_flag(scanner, path, kind)
        for positional in positionals:
            scanner.add_argument(positional, nargs="?")
        for option in options:
            scanner.add_argument(option)
        namespace, unknown = scanner.parse_known_args(argv)
    except argparse.ArgumentError:
        return Config()
    refuse_unknown_settings(base, unknown)
    if any(word.startswith("-") for word in unknown):  # what follows it is no recipe
        return base
    found = vars(namespace)
    if found["recipe"] is not None:
        base = load_base_config(found["recipe"], found["config"])
    method = {path: found[path] for path in ("method.name", "method.module") if found.get(path)}
    if method:  # what its defaults depend on and must fit
        paths = ("data.image_size", "encoder.batch_groups", "train.batch_size")
        method |= {path: found[path] for path in paths if path in found}
    return base.with_overrides(method)


def refuse_unknown_settings(config: Config, words: Sequence[str]) -> None:
    """Raise ValueError for a flag such as --method.kk, with the names of the nearest settings."""
    for word in words:
        if is_setting(word):
            path, _, _ = word.removeprefix("--").partition("=")
            check_setting_name(config, path.replace("-", "_"))


def is_setting(word: str) -> bool:
    """Whether a word of a command line is meant as a setting, as --method.k or --method.k=5."""
    return word.startswith("--") and "." in word.partition("=")[0]


def _same_method(one: Config, other: Config) -> bool:
    """Whether two configurations have the same method, whatever its settings."""
    return (one.method.name, one.method.module) == (other.method.name, other.method.module)


def _implied_changes(
    base: Config, config: Config, typed: dict[str, str]
) -> dict[str, tuple[str, str]]:
    """The settings that changed by themselves: those that both have, and none that was typed."""
    not_printed = {*typed, "method.name", "method.module"}
    return {
        path: (setting_text(old), setting_text(new))
        for path, (old, new) in differences(base, config).items()
        if path not in not_printed and old is not None and new is not None
    }


def _describe_method(config: Config) -> str:
    """The name of the method, and where it comes from if not from this program."""
    module = f" of {config.method.module}" if config.method.module else ""
    return f"the method {config.method.name}{module}"


def _settings_of(methods: Sequence[type[MethodSettings]]) -> dict[str, Any]:
    """The types of the settings of several methods, by dotted name."""
    return {path: kind for method in methods for path, kind, *_ in settings(method)}


def _add_flag(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup, path: str, kind: Any, **more: Any
) -> None:
    """A flag whose value stays text until the configuration parses it."""
    optional: dict[str, Any] = {"nargs": "?", "const": "true"} if kind is bool else {}
    parser.add_argument(
        f"--{path}",
        dest=path,
        default=argparse.SUPPRESS,
        metavar=_metavar(Literal[*METHODS] if path == "method.name" else kind),
        **optional,
        **more,
    )


def _metavar(kind: Any) -> str:
    """What a value may be, as the help shows it."""
    if typing.get_origin(kind) is Literal:
        return "{" + ",".join(map(str, typing.get_args(kind))) + "}"
    if typing.get_origin(kind) is tuple:
        kinds = typing.get_args(kind)
        return ",".join("..." if each is ... else _metavar(each) for each in kinds)
    names = {int: "INT", float: "FLOAT", str: "TEXT", bool: "true|false"}
    return names.get(kind, "VALUE")
