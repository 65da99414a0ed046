"""A user's table about the images: a CSV with a column `file` and any others."""

from __future__ import annotations

import csv
import math
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

MAX_CATEGORIES = 20  # the rarer ones are "other"


@dataclass(frozen=True)
class Metadata:
    """The columns of a table, and the cells of each image that it lists, by index."""

    columns: list[str]
    cells: dict[int, list[str]]

    def row(self, index: int) -> dict[str, str]:
        """The cells of an image by column; empty if the table does not list it."""
        return dict(zip(self.columns, self.cells.get(index, []), strict=False))

    def colors(self, column: str, indices: Sequence[int]) -> dict[str, Any]:
        """A column of these images: numbers with their range, or categories."""
        if column not in self.columns:
            raise ValueError(f"got the column {column!r}, need one of {', '.join(self.columns)}")
        at = self.columns.index(column)
        texts = [self.cells[index][at] if index in self.cells else "" for index in indices]
        values = [None if text.lower() in ("", "na", "nan") else text for text in texts]
        numbers = [None if value is None else _to_number(value) for value in values]
        if any(values) and values.count(None) == numbers.count(None):
            return scale(numbers)
        return categories(values)

    @classmethod
    def read(cls, path: Path, titles: Sequence[str]) -> Metadata:
        """Read a CSV whose `file` is the title of an image, or a file name that only one has."""
        header, *rows = _read_csv(path)
        index_of = _indices_by_name(titles)
        file_column = header.index("file")
        cells = dict[int, list[str]]()
        unknown = list[str]()
        for line, row in enumerate(rows, start=2):
            if not any(row):
                continue
            if len(row) != len(header):
                raise ValueError(
                    f"{path}, line {line}: {len(row)} cells, need {len(header)} as in the first "
                    f"line; put cells that contain commas in quotes"
                )
            file = row[file_column]
            index = index_of.get(PurePosixPath(file).as_posix())
            if index is None:
                unknown.append(file)
                continue
            if index in cells:
                raise ValueError(f"{path}, line {line}: {file} is listed twice; need one line each")
            cells[index] = [cell for column, cell in enumerate(row) if column != file_column]
        if not cells:
            first = rows[0][file_column] if rows else "nothing"
            raise ValueError(
                f"{path}: none of its files is among the {len(titles)} training images; got "
                f"{first!r} first, need names such as {titles[0]!r}"
            )
        if unknown:
            warnings.warn(
                f"{path}: {len(unknown)} of its files are not among the training images, the "
                f"first is {unknown[0]!r}",
                stacklevel=2,
            )
        return cls([name for name in header if name != "file"], cells)


def _indices_by_name(titles: Sequence[str]) -> dict[str, int]:
    """The index of each title, and of each file name that only one title has."""
    indices = {title: index for index, title in enumerate(titles)}
    names = [PurePosixPath(title).name for title in titles]
    counts = Counter(names)
    for index, name in enumerate(names):
        if counts[name] == 1:
            indices.setdefault(name, index)
    return indices


def categories(values: Sequence[str | None], *, order: Sequence[str] = ()) -> dict[str, Any]:
    """Categories by number, in the given order or the most common first; rare ones are merged."""
    counts = Counter(value for value in values if value is not None)
    names = [value for value, _ in counts.most_common(MAX_CATEGORIES)]
    if 0 < len(order) <= MAX_CATEGORIES:
        names = list(order)
    number_of = {name: number for number, name in enumerate(names)}
    sizes = [counts[name] for name in names]
    if len(counts) > MAX_CATEGORIES:
        names.append(f"other ({len(counts) - MAX_CATEGORIES} more)")
        sizes.append(counts.total() - sum(sizes))
    return {
        "kind": "categories",
        "names": names,
        "sizes": sizes,
        "values": [
            None if value is None else number_of.get(value, MAX_CATEGORIES) for value in values
        ],
    }


def scale(numbers: Sequence[float | None]) -> dict[str, Any]:
    """Numbers with their range."""
    known = [number for number in numbers if number is not None]
    return {
        "kind": "scale",
        "low": min(known, default=0.0),
        "high": max(known, default=1.0),
        "values": list(numbers),
    }


def _read_csv(path: Path) -> list[list[str]]:
    """The rows of a CSV, the header first; every cell is stripped."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = [[cell.strip() for cell in row] for row in csv.reader(file)]
    except FileNotFoundError:
        raise ValueError(f"{path}: not found; need a CSV with a column file and others") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path}: not a readable CSV ({error}); save it as CSV in UTF-8") from None
    header = rows[0] if rows else []
    if len(header) == 1 and ";" in header[0]:
        raise ValueError(f"{path}: its cells are separated by semicolons; save it with commas")
    if header.count("file") != 1 or len(header) < 2 or len(set(header)) < len(header):
        raise ValueError(
            f"{path}: starts with {','.join(header) or 'nothing'!r}; need a first line with the "
            f"column file and others, each of its own name, as file,site,age"
        )
    return rows


def _to_number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
