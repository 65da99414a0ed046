"""Plain-text tables: of metrics, and of any text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def table(columns: Mapping[str, Mapping[str, float]], *, as_rows: bool = False) -> str:
    """Format metrics by name, with one column per title, or one row if `as_rows`.

    A single column is a plain list without its title. Titles with few metrics become rows, which
    are easier to compare. A metric `NAME std` is printed behind the metric `NAME`.
    """
    cells = {title: _format_metrics(metrics) for title, metrics in columns.items()}
    names = list(dict.fromkeys(name for column in cells.values() for name in column))
    if as_rows or (len(cells) > 1 and len(names) <= 4):
        cells = {
            name: {title: column[name] for title, column in cells.items() if name in column}
            for name in names
        }
        names = list(dict.fromkeys(title for column in cells.values() for title in column))
    name_width = max(map(len, names), default=0)
    widths = {
        title: max(8, len(title), *map(len, column.values())) for title, column in cells.items()
    }
    header = "".join(f"  {title:>{width}}" for title, width in widths.items())
    lines = [" " * (name_width + 2) + header]
    for name in names:
        row = "".join(f"  {cells[title].get(name, ''):>{widths[title]}}" for title in cells)
        lines.append(f"  {name:{name_width}}{row}".rstrip())
    if len(cells) == 1 and not as_rows:
        del lines[0]
    return "\n".join(lines)


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, right: str = "") -> str:
    """Format rows of text below a header; columns whose names are in `right` end at the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    aligned = [">" if name in right.split() else "<" for name in header]
    return "\n".join(
        "  "
        + "  ".join(
            f"{cell:{side}{width}}" for cell, side, width in zip(row, aligned, widths, strict=True)
        ).rstrip()
        for row in (header, *rows)
    )


def _format_metrics(metrics: Mapping[str, float]) -> dict[str, str]:
    stds = {f"{name} std" for name in metrics}
    cells = {}
    for name, value in metrics.items():
        if name not in stds:
            std = metrics.get(f"{name} std")
            cells[name] = f"{value:.2f}" + ("" if std is None else f" ± {std:.2f}")
    return cells
