"""Labels from a CSV with the columns `file,label`, for folders without class subfolders."""

from __future__ import annotations

import csv
import warnings
from pathlib import Path

_ADVICE = "images with more than one label cannot be evaluated: give one label per file"


def is_table(path: Path) -> bool:
    """Whether a file named labels.csv has our header; warn if not, as it may be for another use."""
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        header = file.readline().strip()
    cells = next(csv.reader([header]), [])
    if [cell.strip().lower() for cell in cells[:2]] == ["file", "label"]:
        return True
    warnings.warn(f"{path}: begins with {header[:40]!r}, not file,label: not used", stacklevel=4)
    return False


def read_labels(path: Path) -> dict[str, str]:
    """The label of each file by its path inside the folder; one per file, empty is unknown."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = [[cell.strip() for cell in row] for row in csv.reader(file)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path}: not a readable CSV ({error})") from None
    if not rows or [cell.lower() for cell in rows[0][:2]] != ["file", "label"]:
        header = ",".join(rows[0]) if rows else "nothing"
        raise ValueError(f"{path}: begins with {header!r}; need the line file,label first")
    labels: dict[str, str] = {}
    for number, row in enumerate(rows[1:], start=2):
        if not any(row):
            continue
        if len(row) < 2:
            raise ValueError(f"{path}, line {number}: got {row[0]!r}; need file,label")
        name = Path(row[0]).as_posix()
        label = row[1]
        given = [cell for cell in row[1:] if cell]
        if len(given) > 1 or any(mark in label for mark in ";|"):
            raise ValueError(
                f"{path}, line {number}: {name} has several labels ({', '.join(given)}); {_ADVICE}"
            )
        if labels.setdefault(name, label) != label:
            raise ValueError(
                f"{path}, line {number}: {name} is {label!r} here and {labels[name]!r} before; "
                f"{_ADVICE}"
            )
    return labels
