"""The result of a protocol: metrics, and a card that says how they were obtained."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool
from torch import Tensor

from meanshift.runtime.files import atomic_writer
from meanshift.runtime.run_directory import RunDirectory, environment


@dataclass(frozen=True)
class Result:
    """The metrics of one protocol, its settings, and arrays to store beside them."""

    name: str
    """the protocol, such as `knn`"""
    metrics: dict[str, float]
    """numbers by name; accuracies are in percent"""
    settings: dict[str, Any]
    """how the protocol was carried out"""
    arrays: dict[str, Any] = field(default_factory=dict, compare=False)
    """what is stored beside the metrics, such as which test images were classified correctly"""
    card: dict[str, Any] = field(default_factory=dict)
    """entries that the card has beside or instead of the usual ones"""
    options: dict[str, Any] = field(default_factory=dict)
    """settings that differ from the default; they are part of the name of its file"""


def percent(correct: Bool[Tensor, " tested"]) -> float:
    """The accuracy in percent, from which test images are classified correctly."""
    return 100 * int(correct.sum()) / len(correct)


def result_name(*words: str, options: Mapping[str, Any]) -> str:
    """The name of a result's file: words, then the options that are not the default.

    Numbers are written out; a short hash stands for paths and long lists. Results that differ have
    different names, so none replaces another one.
    """
    parts = [*words]
    hashed = {}
    for name, value in options.items():
        text = "-".join(map(str, value)) if isinstance(value, list) else str(value)
        if re.fullmatch(r"[\w.-]{1,24}", text):
            parts.append(f"{name.replace('_', '-')}-{text}")
        else:
            hashed[name] = value
    if hashed:
        parts.append(short_hash(sorted(hashed.items())))
    return "-".join(filter(None, parts))


def short_hash(value: Any) -> str:
    """Six characters that stand for a value in a name."""
    return hashlib.sha256(repr(value).encode("utf-8", "surrogateescape")).hexdigest()[:6]


def make_card(result: Result, context: Mapping[str, Any]) -> dict[str, Any]:
    """What metrics need to be trusted later: protocol, context, versions, command and date.

    `context` describes the data, the weights and how they were computed.
    """
    here = environment()
    return {
        "protocol": result.name,
        "settings": result.settings,
        **context,
        "versions": here["versions"],
        "command": here["command"],
        "date": here["date"],
    } | result.card


def save_result(result: Result, context: Mapping[str, Any], *, output_dir: Path, name: str) -> Path:
    """Write `results/NAME.json` with metrics and card, the arrays to `results/NAME.npz`.

    Returns the path of the JSON file.
    """
    results = output_dir / "results"
    results.mkdir(parents=True, exist_ok=True)
    if result.arrays:
        with atomic_writer(results / f"{name}.npz", shared=True) as file:
            np.savez_compressed(file, **result.arrays)
    content = {"metrics": result.metrics, "card": make_card(result, context)}
    return RunDirectory(output_dir).save_result(name, content)
