"""What a CSV says of each file: its label (`file,label`) or its group (`file,group`)."""

from __future__ import annotations

import csv
import itertools
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path

from meanshift.data.remote_folder import RemotePath


def is_table(path: Path | RemotePath, column: str = "label") -> bool:
    """Whether a file named labels.csv has our header; warn if not, as it may be for another use."""
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        header = file.readline().strip()
    cells = next(csv.reader([header]), [])
    if [cell.strip().lower() for cell in cells[:2]] == ["file", column]:
        return True
    warnings.warn(f"{path}: begins with {header[:40]!r}, not file,{column}: not used", stacklevel=4)
    return False


def read_table(path: Path | RemotePath, column: str = "label") -> dict[str, str]:
    """The label of each file by its path inside the folder; one per file, empty is unknown."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = [[cell.strip() for cell in row] for row in csv.reader(file)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path}: not a readable CSV ({error})") from None
    if not rows or [cell.lower() for cell in rows[0][:2]] != ["file", column]:
        header = ",".join(rows[0]) if rows else "nothing"
        raise ValueError(f"{path}: begins with {header!r}; need the line file,{column} first")
    advice = f"give one {column} per file"
    labels: dict[str, str] = {}
    for number, row in enumerate(rows[1:], start=2):
        if not any(row):
            continue
        if len(row) < 2:
            raise ValueError(f"{path}, line {number}: got {row[0]!r}; need file,{column}")
        name = Path(row[0]).as_posix()
        label = row[1]
        columns = itertools.zip_longest(row[1:], rows[0][1:])
        given = [cell for cell, title in columns if cell and title != "confidence"]
        if len(given) > 1 or any(mark in label for mark in ";|"):
            raise ValueError(
                f"{path}, line {number}: {name} has several {column}s ({', '.join(given)}); "
                f"{advice}"
            )
        if labels.setdefault(name, label) != label:
            raise ValueError(
                f"{path}, line {number}: {name} is {label!r} here and {labels[name]!r} before; "
                f"{advice}"
            )
    return labels


def look_up(table: Mapping[str, str], title: str, prefixes: Iterable[str]) -> str:
    """The entry of a file by its path inside a split, with the split's folder in front or not."""
    paths = (prefix + title for prefix in (*prefixes, ""))
    return next((table[path] for path in paths if path in table), "")
