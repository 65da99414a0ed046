"""The Markdown pages of the project: their code blocks, and the commands in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
TASKS = [
    ROOT / "README.md",
    ROOT / "docs" / "index.md",
    ROOT / "docs" / "getting-started.md",
    *sorted((ROOT / "docs" / "guides").glob("*.md")),
]
"""pages whose commands are run, in their order; those of other pages are parsed"""
PROGRAMS = ("meanshift", "torchrun", "make", "pip", "python", "git")
SHELL = ("", "bash", "console", "sh", "shell")  # languages of blocks that hold commands

_FENCE = re.compile(r"^ {0,3}(`{3,})\s*(\w*)")
_COMMENT = re.compile(r"^<!-- *(not run|needs)(.*?) *-->$")
_NOT_TEXT = re.compile(r"^\s*([-*+] |\d+\. |!!! )")  # what follows, indented, is no code


@dataclass(frozen=True)
class Block:
    """A block of code of a page."""

    page: Path
    line: int
    language: str
    """"" for indented blocks and for fences without a language"""
    text: str
    not_run: str = ""
    """why it is not run: `<!-- not run: needs two machines -->` before it"""
    needs: str = ""
    """an optional library without which it is not run: `<!-- needs: timm -->` before it"""

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def commands(self) -> list[list[str]]:
        """The words of each command, without prompt, variables, comments and redirections."""
        if self.language not in SHELL:
            return []
        lines = self.text.replace("\\\n", " ").splitlines()
        return [words for line in lines for words in _split(line)]


def blocks(page: Path, text: str | None = None) -> list[Block]:
    """The code blocks of a page in its order, fenced and indented ones."""
    lines = (page.read_text() if text is None else text).splitlines()
    found = []
    marker: dict[str, str] = {}
    in_list = False
    number = 0
    while number < len(lines):
        line = lines[number]
        if comment := _COMMENT.match(line):
            marker = _read_marker(comment, f"{page.name}:{number + 1}")
            number += 1
            continue
        end, language = _block_at(lines, number, in_list)
        if end > number:
            body = lines[number + 1 : end - 1] if _FENCE.match(line) else lines[number:end]
            code = "".join(f"{row.removeprefix('    ') if not language else row}\n" for row in body)
            found.append(Block(page, number + 1, language, code, **marker))
            marker = {}
            number = end
            continue
        if line.strip():
            if marker:
                raise ValueError(f"{page.name}:{number + 1}: a comment for a block, but no block")
            in_list = bool(_NOT_TEXT.match(line)) or (in_list and line.startswith(" "))
        number += 1
    return found


def quoted_commands(text: str) -> list[list[str]]:
    """Commands between backticks."""
    return [shlex.split(line) for line in re.findall(r"`((?:meanshift|python -m) [^`\n]+)`", text)]


def is_complete(words: list[str]) -> bool:
    """Whether a command can be typed as it stands: a synopsis has brackets, dots or a NAME."""
    return not any("[" in word or word.endswith("...") or word == "NAME" for word in words[1:])


def _block_at(lines: list[str], number: int, in_list: bool) -> tuple[int, str]:
    """The line after the block that begins here and its language; this line if none begins."""
    fence = _FENCE.match(lines[number])
    if fence:
        for end in range(number + 1, len(lines)):
            if lines[end].strip() == fence[1]:
                return end + 1, fence[2]
        raise ValueError(f"line {number + 1}: a code block that does not end")
    if in_list or not lines[number].startswith("    ") or not lines[number].strip():
        return number, ""
    end = number
    while end < len(lines) and (lines[end].startswith("    ") or not lines[end].strip()):
        end += 1
    return end, ""


def _read_marker(comment: re.Match[str], place: str) -> dict[str, str]:
    name, value = comment.groups()
    if not re.fullmatch(r": *\S.*", value):
        raise ValueError(f"{place}: got <!-- {name}{value} -->, need <!-- {name}: why -->")
    return {name.replace(" ", "_"): value.removeprefix(":").strip()}


def _split(line: str) -> Iterator[list[str]]:
    """The commands of a line that begin with one of our programs."""
    typed = re.sub(r"^\s*(\$ )?([A-Z_]+=\S+ )*", "", line)
    if typed.partition(" ")[0] not in PROGRAMS:
        return
    words: list[str] = []
    redirected = False
    for word in [*shlex.split(typed, comments=True), "&&"]:
        if word == "&&":
            yield words
            words = []
            redirected = False
        redirected = redirected or word in ("|", ">", ">>", "&")
        if word != "&&" and not redirected:
            words.append(word)
