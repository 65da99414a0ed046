"""`meanshift completion`: a script that completes commands, options and their values by Tab.

The script asks this same command for the candidates, because the settings that are flags depend on
the method. Where there is none, the shell completes a path.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from meanshift.cli.arguments import Parser
from meanshift.cli.settings import add_settings
from meanshift.config import METHODS, Config
from meanshift.config.recipes import RECIPES
from meanshift.evaluation import PROTOCOLS
from meanshift.reproduce.scales import SCALES
from meanshift.reproduce.studies import STUDIES

HELP = "print the script for completion by Tab in bash, zsh or fish"

_INSTALL = {
    "bash": "add to ~/.bashrc: source <(meanshift completion bash)",
    "zsh": "add to ~/.zshrc, after compinit: source <(meanshift completion zsh)",
    "fish": "add to ~/.config/fish/config.fish: meanshift completion fish | source",
}

_SCRIPTS = {
    # bash divides words at : and =, and `default` completes paths where there is no candidate.
    "bash": """\
_meanshift() {
    local IFS=$'\\n'
    COMPREPLY=($("$1" completion bash -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
}
complete -o default -F _meanshift meanshift
""",
    "zsh": """\
#compdef meanshift
_meanshift() {
    local -a found
    found=(${(f)"$("${words[1]}" completion zsh -- "${(@)words[2,CURRENT]}" 2>/dev/null)"})
    if (( $#found )); then _describe meanshift found; else _files; fi
}
compdef _meanshift meanshift
""",
    "fish": """\
function __meanshift_complete
    set -l words (commandline -opc)
    set -l current (commandline -ct)
    set -l found ($words[1] completion fish -- $words[2..] "$current" 2>/dev/null)
    if test (count $found) -gt 0
        printf '%s\\n' $found
    else
        __fish_complete_path "$current"
    end
end
complete -c meanshift -f -a '(__meanshift_complete)'
""",
}

_NAMES: dict[tuple[str, str], Iterable[str]] = {
    ("pretrain", "recipe"): RECIPES,
    ("doctor", "recipe"): RECIPES,
    ("evaluate", "words"): PROTOCOLS,
    ("methods", "name"): METHODS,
    ("reproduce", "names"): (*STUDIES, "all"),
    ("reproduce", "scale"): SCALES,
}
"""the names that an argument of a command takes, where its parser does not list them"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=list(_SCRIPTS), help="; ".join(_INSTALL.values()))
    parser.add_argument("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)  # typed so far


def run(args: argparse.Namespace) -> int:
    if not args.words:
        print(_SCRIPTS[args.shell], end="")
        return 0
    *typed, current = _join(args.words) if args.shell == "bash" else args.words
    found = {word: text for word, text in candidates(typed, current) if word.startswith(current)}
    for word, text in found.items():
        print(_format(args.shell, word, " ".join(text.split()), current))
    return 0


def candidates(typed: Sequence[str], current: str) -> Iterator[tuple[str, str]]:
    """The words that may follow those that were typed, each with a description or none.

    `current` is the word that is being typed; it is empty after a space.
    """
    from meanshift.cli import COMMANDS

    if typed and typed[0] not in COMMANDS:
        return
    parser = _parser(typed)
    option, equals, _ = current.partition("=")
    if not typed and not current.startswith("-"):
        yield from ((name, command.HELP) for name, command in COMMANDS.items())
    elif equals:
        for action in parser._actions:
            if option in action.option_strings:
                yield from ((f"{option}={value}", "") for value in _values(typed, action))
    elif current.startswith("-"):
        for action in parser._actions:
            text = (action.help or "").replace("%%", "%")
            yield from ((name, text) for name in action.option_strings)
    elif (expected := _expected(parser, typed[1:])) is not None:
        yield from ((value, "") for value in _values(typed, expected) if value not in typed)


def _parser(typed: Sequence[str]) -> Parser:
    """The parser of the command that was typed, with the settings of its method as flags."""
    from meanshift.cli import COMMANDS, build_parsers

    _, parser = build_parsers(typed)
    command: Any = COMMANDS.get(typed[0]) if typed else None
    if hasattr(command, "base_config"):
        try:
            base = command.base_config(typed[1:])
        except (ValueError, OSError):  # not complete yet, or wrong
            base = Config()
        add_settings(parser, base)
    return parser


def _expected(parser: Parser, words: Sequence[str]) -> argparse.Action | None:
    """The option or the positional argument that the next word belongs to."""
    positionals = [action for action in parser._actions if not action.option_strings]
    pending: argparse.Action | None = None
    for word in words:
        if word.startswith("-"):
            pending = None if "=" in word else parser._option_string_actions.get(word)
            pending = None if pending is not None and pending.nargs == 0 else pending
        elif pending is not None:
            pending = pending if pending.nargs in ("+", "*") else None
        elif positionals and positionals[0].nargs not in ("+", "*"):
            positionals.pop(0)
    return pending or next(iter(positionals), None)


def _values(typed: Sequence[str], action: argparse.Action) -> Iterable[str]:
    """The values that an argument takes, as far as they are names."""
    if action.choices is not None:
        return action.choices
    metavar = str(action.metavar or "")
    if metavar.startswith("{") and metavar.endswith("}"):  # a setting with few values
        return metavar[1:-1].split(",")
    if "|" in metavar:
        return metavar.split("|")
    return _NAMES.get((typed[0], action.dest), ()) if typed else ()


def _join(words: Sequence[str]) -> list[str]:
    """The words of bash, which divides them at : and =, as they were typed."""
    joined: list[str] = []
    divided = False
    for word in words:
        separator = word in (":", "=")
        if joined and (separator or divided):
            joined[-1] += word
        else:
            joined.append(word)
        divided = separator
    return joined


def _format(shell: str, word: str, text: str, current: str) -> str:
    """A candidate as the script of a shell reads it."""
    if shell == "bash":  # only what follows the last place where bash divides the word
        return word[max(current.rfind(":"), current.rfind("=")) + 1 :]
    if shell == "zsh":
        return word.replace(":", "\\:") + (f":{text}" if text else "")
    return f"{word}\t{text}"
