"""The page of a reproduction: tables beside the paper's, a verdict a claim, cards and commands."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meanshift.config.recipes import command_for
from meanshift.reproduce.jobs import Job
from meanshift.reproduce.sheet import CHOSEN_BY, Sheet
from meanshift.runtime.run_directory import write_text
from meanshift.viz.run_reader import Run
from meanshift.viz.style import DPI, page

if TYPE_CHECKING:
    from meanshift.reproduce import Reproduction


def write(
    whole: Reproduction, sheets: Sequence[Sheet], images: Mapping[str, tuple[Path, str]]
) -> Path:
    """Write `reproduce.html` beside the tables."""
    text = page(
        "reproduce.html",
        title=f"Mean Shift, reproduced at scale {whole.base.name}",
        summary=_summary(whole),
        failed=[(job.title, job.failure) for job in whole.jobs if job.failure],
        sheets=[_sheet(whole, sheet, images.get(sheet.name)) for sheet in sheets],
        card=_card(whole),
        runs=[_run(job) for job in whole.jobs],
        chosen_by=CHOSEN_BY,
        command=whole.command(),
    )
    out = whole.out / "reproduce.html"
    write_text(out, text)
    return out


def _summary(whole: Reproduction) -> str:
    base, config = whole.base, whole.base.config
    done = sum(job.trained for job in whole.jobs)
    where = f"the {base.split} images" if base.split else "the cut held out from training"
    return (
        f"{base.images:,} images of {config.data.source}, {config.encoder.name} "
        f"({config.encoder.stem} stem, width {config.encoder.width:g}), {config.train.epochs} "
        f"epochs; accuracies in % on {where}. {done} of {len(whole.jobs)} runs are trained."
    )


def _sheet(whole: Reproduction, sheet: Sheet, image: tuple[Path, str] | None) -> dict[str, Any]:
    data = base64.b64encode(image[0].read_bytes()).decode() if image else ""
    return {
        "name": sheet.name,
        "title": sheet.study.title,
        "columns": sheet.study.columns,
        "rows": [
            {
                "title": title,
                "cells": [(str(cell), cell.paper, cell.values) for cell in cells.values()],
                "validation": str(sheet.validation[title]) if sheet.validation else "",
            }
            for title, cells in sheet.table.items()
        ],
        "validated": bool(sheet.validation),
        "claims": [(c.text, r.verdict, r.why) for c, r in sheet.rulings()],
        "best": sheet.best(),
        "beside": any(variant.paper for variant in sheet.study.variants),
        "image": f"data:image/png;base64,{data}" if data else "",
        "words": image[1] if image else "",
        "wide": _width(image[0]) if image else 0,
        "command": whole.command([sheet.name]),
    }


def _width(path: Path) -> int:
    """Of an image at the size of the page's type, in CSS pixels."""
    from PIL import Image

    with Image.open(path) as image:
        return round(image.width * 100 / DPI)


def _card(whole: Reproduction) -> list[tuple[str, str]]:
    """What all runs share, and on what they ran."""
    base, config = whole.base, whole.base.config
    runs = [run for job in whole.jobs if (run := job.look()) is not None]
    cut = f"held out: {config.data.validation}; figures of: {base.split or 'the cut held out'}"
    linear = " ".join(base.scale.linear) or "on views"
    return [
        ("scale", f"{base.name}: {base.scale.about}"),
        ("images", f"{config.data.source}: {base.images:,} to train on; {cut}"),
        ("seeds", ", ".join(str(config.train.seed + at) for at in range(whole.seeds))),
        ("k-NN", "exact, cosine, plain vote, on the frozen online backbone"),
        ("linear and few labels", f"the paper's layer, {linear}"),
        ("± and ranges", "one standard deviation over seeds (n - 1)"),
        ("a claim holds", "where deviations do not overlap, in all of its columns"),
        *_where(runs),
    ]


def _where(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Machines, versions and commits of the runs; more than one is said."""
    told: dict[str, dict[str, None]] = {}
    for run in runs:
        for here in [*run.environment.get("earlier", []), run.environment]:
            machine = here.get("machine", {})
            versions = here.get("versions", {})
            facts = {
                "device": here.get("device"),
                "precision": here.get("precision"),
                "threads": here.get("threads"),
                "cores": machine.get("cores"),
                "torch": versions.get("torch"),
                "meanshift": versions.get("meanshift"),
                "commit": here.get("commit"),
            }
            for name, value in facts.items():
                if value:
                    told.setdefault(name, {})[str(value)] = None
    return [(name, ", ".join(values)) for name, values in told.items()]


def _run(job: Job) -> dict[str, Any]:
    done, total = job.steps
    state = "trained" if job.trained else f"step {done} of {total}" if total else "not begun"
    return {
        "title": job.title,
        "state": f"failed: {job.failure}" if job.failure else state,
        "folder": str(job.folder),
        "command": command_for(job.config, str(job.folder)),
    }
