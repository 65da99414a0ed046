"""Hooks of the documentation site (`mkdocs.yml`): pages from files that are outside docs/.

CONTRIBUTING.md and CHANGELOG.md become pages. A notebook becomes a page with its stored outputs. A
source file that a page links to becomes a page with its code. The links of the repository, as
`../meanshift/methods/msf.py`, lead to these pages.
"""

from __future__ import annotations

import base64
import json
import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
ROOT_PAGES = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
"""pages, and the files of the repository that they are made of"""
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made from other files."""
    pages = {name: (ROOT / path).read_text() for name, path in ROOT_PAGES.items()}
    texts = {ROOT / path: pages[name] for name, path in ROOT_PAGES.items()}
    texts |= {path: path.read_text() for path in DOCS.rglob("*.md")}
    for path, text in texts.items():
        for target in linked_files(path, text):
            if target.suffix == ".py":
                pages[page_of(target)] = source_page(target)
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        for name, content in notebook_files(path):
            files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links to files outside docs/ lead to their pages."""
    del config
    here = page.file.src_uri
    folder = (ROOT / ROOT_PAGES[here] if here in ROOT_PAGES else DOCS / here).parent

    def moved(match: re.Match[str]) -> str:
        name = page_of(Path(os.path.normpath(folder / match[1])))
        if files.get_file_from_path(name) is None:
            return match[1]  # the strict build reports it
        return posixpath.relpath(name, posixpath.dirname(here) or ".")

    return LINK.sub(moved, markdown)


def linked_files(path: Path, text: str) -> Iterator[Path]:
    """The existing files outside docs/ that a page links to."""
    for target in LINK.findall(text):
        file = Path(os.path.normpath(path.parent / target))
        if file.is_file() and file.is_relative_to(ROOT) and not file.is_relative_to(DOCS):
            yield file


def page_of(file: Path) -> str:
    """The page of a file of the repository, relative to docs/."""
    if file.is_relative_to(DOCS):
        return file.relative_to(DOCS).as_posix()
    if not file.is_relative_to(ROOT):
        return file.as_posix()
    name = file.relative_to(ROOT).as_posix()
    if file.suffix == ".ipynb":
        return name.removesuffix(".ipynb") + ".md"
    roots = {"README.md": "index.md"} | {path: page for page, path in ROOT_PAGES.items()}
    return roots.get(name, f"source/{name}.md")


def source_page(file: Path) -> str:
    """The code of a file as a page that the search leaves out."""
    name = file.relative_to(ROOT).as_posix()
    code = file.read_text()
    return f"---\nsearch: {{exclude: true}}\n---\n\n# {name}\n\n````python\n{code}````\n"


def notebook_files(file: Path) -> Iterator[tuple[str, str | bytes]]:
    """The page of a notebook, the images of its stored outputs, and the notebook itself."""
    cells = json.loads(file.read_text())["cells"]
    name = f"notebooks/{file.stem}"
    page: list[str] = []
    for number, cell in enumerate(cells):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            page.append(source)
            if number == 0:
                page.append(f"[Download this notebook]({file.name}), with the outputs below.")
            continue
        page.append(f"```python\n{source}\n```")
        for place, output in enumerate(cell["outputs"]):
            kind, image = stored_image(output)
            if image:
                shown = f"{file.stem}-{number}-{place}.{kind}"
                yield f"notebooks/{shown}", base64.b64decode(image)
                page.append(f"![output of the cell above]({shown})")
            elif text := output_text(output):
                page.append(f"```text\n{text}\n```")
    yield f"{name}.md", "\n\n".join(page) + "\n"
    yield f"{name}.ipynb", file.read_bytes()


def output_text(output: dict[str, Any]) -> str:
    """The text of an output: what was printed, or the last value."""
    text = output.get("text") or output.get("data", {}).get("text/plain", "")
    return "".join(text).rstrip()


def stored_image(output: dict[str, Any]) -> tuple[str, str]:
    """The format and the base64 text of an image among the outputs, or ("", "")."""
    for kind in ("png", "jpeg"):
        if image := output.get("data", {}).get(f"image/{kind}"):
            return kind, "".join(image)
    return "", ""
