"""Tables of a reproduction inside a document that is written by hand.

Between `<!-- reproduce FOLDER NAME -->` and `<!-- end -->` the document has the study NAME of the
archive FOLDER; all other text is left as it is.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from meanshift.runtime.files import write_text


def update(document: Path, folder: str, tables: Mapping[str, str]) -> list[str]:
    """Replace the tables of the named studies; returns those that the document has."""
    text = document.read_text()
    updated = []
    for name, table in tables.items():
        start = f"<!-- reproduce {folder} {name} -->\n"
        before, marker, rest = text.partition(start)
        _, end, after = rest.partition("<!-- end -->")
        if marker and end:
            text = f"{before}{start}\n{table}\n{end}{after}"
            updated.append(name)
    if updated:
        write_text(document, text)
    return updated


def add_image(document: Path, image: Path, name: str) -> str:
    """Copy an image into the folder `images` beside a document; returns its relative path."""
    folder = document.parent / "images"
    folder.mkdir(exist_ok=True)
    shutil.copyfile(image, folder / name)
    return f"images/{name}"
