"""Values and help texts of settings, with errors that say what is accepted."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import math
import textwrap
import types
import typing
from typing import Any, Literal


def parse(value: Any, kind: Any, path: str) -> Any:
    """Convert a plain value or a text to the type of a setting, or say what is accepted."""
    origin = typing.get_origin(kind)
    args = typing.get_args(kind)
    if origin is Literal:
        if value in args:
            return value
        raise ValueError(f"{path}: got {value!r}, need one of {', '.join(map(str, args))}")
    if origin in (typing.Union, types.UnionType):
        for option in args:
            try:
                return parse(value, option, path)
            except ValueError:
                continue
        raise ValueError(f"{path}: got {value!r}, need {' or '.join(a.__name__ for a in args)}")
    if origin is tuple:
        parts = value.replace(",", " ").split() if isinstance(value, str) else value
        if args[1:] == (...,):
            if not isinstance(parts, (list, tuple)):
                raise ValueError(f"{path}: got {value!r}, need values with commas between them")
            args = args[:1] * len(parts)
        if not isinstance(parts, (list, tuple)) or len(parts) != len(args):
            raise ValueError(f"{path}: got {value!r}, need {len(args)} numbers, as in 0.2,1.0")
        return tuple(parse(part, arg, path) for part, arg in zip(parts, args, strict=True))
    if kind is bool:
        words = {"true": True, "false": False, "1": True, "0": False, "yes": True, "no": False}
        if isinstance(value, bool) or str(value).lower() in words:
            return words[str(value).lower()]
        raise ValueError(f"{path}: got {value!r}, need true or false")
    if kind is str:
        return str(value)
    try:
        number = kind(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{path}: got {value!r}, need {_NUMBER[kind]}") from None
    rounded = kind is int and not isinstance(value, str) and number != value
    if isinstance(value, bool) or rounded or not abs(number) < _LIMIT[kind]:
        raise ValueError(f"{path}: got {value!r}, need {_NUMBER[kind]}")
    return number


_NUMBER = {int: "a whole number below 2^63", float: "a finite number"}
_LIMIT = {int: 2**63, float: math.inf}


def setting_text(value: Any) -> str:
    """The value of a setting as it is typed on a command line; `parse` gives the value back."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def need(fits: bool, path: str, got: Any, wanted: str) -> None:
    """Raise the error for a setting with a value that does not fit."""
    if not fits:
        raise ValueError(f"{path}: got {got!r}, need {wanted}")


def close(name: str, known: list[str], others: list[str]) -> str:
    """The known names that are most similar to a mistyped one, or else the others."""
    import difflib

    def similarity(other: str) -> float:
        return difflib.SequenceMatcher(None, other, name).ratio()

    near = difflib.get_close_matches(name, list(dict.fromkeys(known)), n=3)
    near = [other for other in near if similarity(other) > similarity(near[0]) - 0.1]
    return " or ".join(near or others)


@functools.cache
def help_texts(kind: type) -> dict[str, str]:
    """The docstring under each field of a settings class and its bases, read from the source."""
    texts: dict[str, str] = {}
    for each in reversed(kind.__mro__[:-1]):
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(each))).body
        assert isinstance(body, ast.ClassDef)
        for node, after in itertools.pairwise(body.body):
            documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and documented:
                text = after.value.value  # type: ignore[attr-defined]
                texts[node.target.id] = " ".join(str(text).split())
    return texts
