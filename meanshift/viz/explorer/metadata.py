"""What a user knows about the images: a CSV with a column `file` and any others."""

from __future__ import annotations

import csv
import math
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

MOST = 20  # categories that are told apart; the rarer ones are "other"


@dataclass(frozen=True)
class Metadata:
    """A table's columns, and the cells of the images that it knows, by index."""

    columns: list[str]
    cells: dict[int, list[str]]

    def row(self, index: int) -> dict[str, str]:
        """What is known about an image."""
        return dict(zip(self.columns, self.cells.get(index, []), strict=False))

    def colors(self, column: str, indices: Sequence[int]) -> dict[str, Any]:
        """A column for these images: numbers with their range, or categories by number."""
        if column not in self.columns:
            raise ValueError(f"got the column {column!r}, need one of {', '.join(self.columns)}")
        at = self.columns.index(column)
        told = [self.cells[index][at] if index in self.cells else "" for index in indices]
        known = [None if cell.lower() in ("", "na", "nan") else cell for cell in told]
        numbers = [None if cell is None else _number(cell) for cell in known]
        if any(known) and known.count(None) == numbers.count(None):
            return scale(numbers)
        return categories(known)

    @classmethod
    def read(cls, path: Path, titles: Sequence[str]) -> Metadata:
        """A CSV whose `file` is an image's title, or the last part of it where only one has it."""
        rows = _rows(path)
        columns = [name for name in rows[0] if name != "file"]
        at, index = rows[0].index("file"), {title: i for i, title in enumerate(titles)}
        names = Counter(PurePosixPath(title).name for title in titles)
        for i, title in enumerate(titles):
            name = PurePosixPath(title).name
            if names[name] == 1:
                index.setdefault(name, i)
        cells, unknown = dict[int, list[str]](), list[str]()
        for number, row in enumerate(rows[1:], start=2):
            if not any(row):
                continue
            if len(row) != len(rows[0]):
                raise ValueError(
                    f"{path}, line {number}: {len(row)} cells, need {len(rows[0])} as in the first "
                    f"line; put cells that hold commas in quotes"
                )
            which = index.get(PurePosixPath(row[at]).as_posix())
            if which is None:
                unknown.append(row[at])
                continue
            if which in cells:
                raise ValueError(
                    f"{path}, line {number}: {row[at]} is there twice; give one line a file"
                )
            cells[which] = [cell for i, cell in enumerate(row) if i != at]
        if not cells:
            given = rows[1][at] if len(rows) > 1 else "nothing"
            raise ValueError(
                f"{path}: none of its files is among the {len(titles)} training images; got "
                f"{given!r} first, need names such as {titles[0]!r}"
            )
        if unknown:
            warnings.warn(
                f"{path}: {len(unknown)} of its files are not among the training images, the "
                f"first is {unknown[0]!r}",
                stacklevel=2,
            )
        return cls(columns, cells)


def categories(told: Sequence[str | None], *, order: Sequence[str] = ()) -> dict[str, Any]:
    """Words by number, in their order or the most common first; the rarer ones put together."""
    counts = Counter(word for word in told if word is not None)
    fits = 0 < len(order) <= MOST
    names = list(order) if fits else [word for word, _ in counts.most_common(MOST)]
    values = {word: i for i, word in enumerate(names)}
    if len(counts) > MOST:
        names.append(f"other ({len(counts) - MOST} more)")
    sizes = [counts[word] for word in names[:MOST]]
    sizes += [counts.total() - sum(sizes)] if len(counts) > MOST else []
    return {
        "kind": "categories",
        "names": names,
        "sizes": sizes,
        "values": [None if word is None else values.get(word, MOST) for word in told],
    }


def scale(numbers: Sequence[float | None]) -> dict[str, Any]:
    """Numbers with their range."""
    known = [number for number in numbers if number is not None]
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    return {"kind": "scale", "low": low, "high": high, "values": list(numbers)}


def _rows(path: Path) -> list[list[str]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = [[cell.strip() for cell in row] for row in csv.reader(file)]
    except FileNotFoundError:
        raise ValueError(f"{path}: not found; need a CSV with a column file and others") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path}: not a readable CSV ({error}); save it as CSV in UTF-8") from None
    first = rows[0] if rows else []
    if len(first) == 1 and ";" in first[0]:
        raise ValueError(f"{path}: its cells are parted by semicolons; save it with commas")
    if first.count("file") != 1 or len(first) < 2 or len(set(first)) < len(first):
        raise ValueError(
            f"{path}: begins with {','.join(first) or 'nothing'!r}; need a first line with the "
            f"column file and others, each of its own name, as file,site,age"
        )
    return rows


def _number(cell: str) -> float | None:
    try:
        number = float(cell)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
