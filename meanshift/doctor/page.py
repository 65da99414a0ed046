"""A diagnosis for a person: one screen of text, a page, and a sheet of views."""

from __future__ import annotations

import base64
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meanshift.doctor import Diagnosis
from meanshift.doctor.inspection import Finding, Inspection
from meanshift.doctor.trial import Trial, ViewSheet
from meanshift.runtime.files import write_text
from meanshift.viz import style
from meanshift.viz.figures.views import enlarge, fit
from meanshift.viz.report.template import render

_WIDTH = 100
_LABEL = 13
_SIDE = 128


def text(diagnosis: Diagnosis) -> str:
    """One screen."""
    lines = list[str]()
    for label, content in [*facts(diagnosis), *notices(diagnosis)]:
        lines += _row(label, content)
    if diagnosis.advice is not None:
        lines.append("")
        for choice in diagnosis.advice.choices:
            lines += _row(choice.name, f"{choice.value:<14}{choice.reason}", indent=14)
        lines += ["", "next:", f"  {diagnosis.advice.command}"]
    return "\n".join(lines)


def facts(diagnosis: Diagnosis) -> Iterator[tuple[str, str]]:
    """What is there, what is broken and what the machine takes, as (label, words)."""
    yield (
        "data",
        f"{diagnosis.source}: {diagnosis.counts}" if diagnosis.counts else diagnosis.source,
    )
    for note in diagnosis.notes:
        yield "note", note
    inspection = diagnosis.inspection
    if inspection is not None:
        yield "samples", _samples(inspection)
        findings = {
            "unreadable": inspection.unreadable,
            "constant": inspection.constant,
            "duplicates": inspection.duplicates,
            "near copies": inspection.near_duplicates,
        }
        if len(inspection.splits) > 1:
            findings |= {"leaks": inspection.leaks, "near leaks": inspection.near_leaks}
        if inspection.spec.kind != "image":
            findings = {name: found for name, found in findings.items() if "near" not in name}
        clean = [name for name, finding in findings.items() if not finding.count]
        for name, finding in findings.items():
            if finding.count:
                yield name, _finding(finding)
        if clean:
            yield "none found", ", ".join(clean)
    if diagnosis.trial is not None:
        yield from _machine(diagnosis.trial)


def notices(diagnosis: Diagnosis) -> Iterator[tuple[str, str]]:
    for problem in diagnosis.problems:
        yield "PROBLEM", problem
    for warning in diagnosis.warnings:
        yield "warning", warning


def write_page(diagnosis: Diagnosis, path: Path) -> None:
    """Write a self-contained HTML page."""
    sheet = ""
    if diagnosis.trial is not None:
        with tempfile.TemporaryDirectory() as folder:
            image = write_sheet(diagnosis.trial.sheet, Path(folder) / "views.png")
            sheet = f"data:image/png;base64,{base64.b64encode(image.read_bytes()).decode()}"
    inspection = diagnosis.inspection
    page: dict[str, Any] = {
        "facts": [fact for fact in facts(diagnosis) if fact[0] != "data"],
        "splits": {} if inspection is None else inspection.splits,
        "choices": [] if diagnosis.advice is None else diagnosis.advice.choices,
        "command": "" if diagnosis.advice is None else diagnosis.advice.command,
    }
    content = render(
        "doctor.html", title=diagnosis.source, diagnosis=diagnosis, sheet=sheet, **page
    )
    write_text(path, content.encode("utf-8", "replace").decode())


def write_sheet(sheet: ViewSheet, path: Path) -> Path:
    """Write an image of samples and their views, one row a sample."""
    cells = [
        [fit(row[0], _SIDE), *(enlarge(view, _SIDE) for view in row[1:])] for row in sheet.rows
    ]
    figure, axes = style.sheet(style.mosaic(cells, gap=8), top=36, dpi=style.SCREEN_DPI)
    for column, name in enumerate(sheet.columns):
        color = style.INK if column == 0 else style.QUIET
        axes.text(column * (_SIDE + 8), -8, name, size=6, color=color, va="bottom")
    views = ", ".join(dict.fromkeys(sheet.columns[1:]))
    description = f"{len(cells)} samples and their views in two epochs: {views}."
    stem = path.with_suffix("") if path.suffix == ".png" else path
    (written,) = style.save(figure, stem, title="Views", text=description, suffixes=[".png"])
    return written


def _row(label: str, content: str, *, indent: int = 0) -> list[str]:
    rest = " " * (_LABEL + indent)
    content = " ".join(content.split("\n"))
    return textwrap.wrap(
        content,
        _WIDTH,
        initial_indent=f"{label:<{_LABEL}}",
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _samples(inspection: Inspection) -> str:
    parts = [inspection.spec.describe()]
    if inspection.gray_as_rgb:
        parts[0] += ", all of them gray"
    sizes = [" x ".join(map(str, size)) for size in inspection.sizes if size]
    if sizes:
        unit = "pixels" if inspection.spec.kind == "image" else "values"
        same = len(set(sizes)) == 1
        spread = sizes[0] if same else f"{sizes[0]} to {sizes[2]}, median {sizes[1]}"
        parts.append(f"{spread} {unit}")
    looked_at = sum(split.looked_at for split in inspection.splits.values())
    total = sum(split.samples for split in inspection.splits.values())
    looked = f"looked at {looked_at:,} of {total:,}"
    parts.append(looked + (", chosen at random" if looked_at < total else ""))
    return "; ".join(parts)


def _finding(finding: Finding) -> str:
    shown = "; ".join(finding.examples)
    more = finding.count - len(finding.examples)
    return f"{finding.count}: {shown}" + (f"; and {more} more" if more else "")


def _machine(trial: Trial) -> Iterator[tuple[str, str]]:
    memory = f", {_bytes(trial.machine_memory)} memory" if trial.machine_memory else ""
    speed = (
        f"{trial.samples_per_second:,.0f} samples/s in {trial.steps} steps of {trial.batch_size}"
    )
    yield "machine", f"{trial.device} in {trial.precision}, {trial.cores} cores{memory}; {speed}"
    peak = f"; memory {_bytes(trial.memory)}" if trial.memory else ""
    disk = f"{_bytes(trial.disk)} of checkpoints ({_bytes(trial.free_disk)} free)"
    duration = _duration(trial.run_seconds)
    yield "the run", f"{trial.run_steps:,} steps, about {duration}{peak}; {disk}"


def _bytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{max(1, round(count / 1e6))} MB"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds))} seconds"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} minutes"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.1f} hours"
    return f"{seconds / 86400:.1f} days"
