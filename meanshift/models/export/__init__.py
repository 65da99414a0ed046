"""Export a backbone for other programs: one file per format, each checked against its run.

A format is a module with `SUFFIXES` (of what it writes; an empty one is a folder), `write(job)`,
and `loading(job)`: for each program that reads what was written, the Python code that computes the
`features` of `images` with it. This code is printed, is part of model cards, and is what `verify`
runs in a fresh process.
"""

from __future__ import annotations

import copy
import importlib
import re
from dataclasses import replace
from pathlib import Path

from meanshift.config.parsing import close
from meanshift.data.open import SourceSpec
from meanshift.models.export.job import Job
from meanshift.models.export.reference import Reference
from meanshift.models.export.verify import require_programs, verify
from meanshift.models.weights import Weights, writable_dir

FORMATS = {
    "torchvision": "meanshift.models.export.torchvision",
    "timm": "meanshift.models.export.timm",
    "safetensors": "meanshift.models.export.safetensors",
    "torch": "meanshift.models.export.torch",
    "onnx": "meanshift.models.export.onnx",
    "huggingface": "meanshift.models.export.huggingface",
}
"""the module of each format"""

_BY_SUFFIX = {".safetensors": "safetensors", ".pt": "torch", ".pth": "torch", ".onnx": "onnx"}
"""the format of a file whose format is not given"""
_DEFAULT_NAMES = {name: name for name in ("torchvision", "timm", "huggingface")}
"""names without suffix in `RUN/export`; others are called model, as their suffix says the rest"""


def export_weights(
    weights: Weights,
    out: Path | None = None,
    *,
    format: str | None = None,
    data: SourceSpec | None = None,
    license: str = "unknown",
    check: bool = False,
) -> Job:
    """Write the backbone of a run for other programs; return what was written, and its checks.

    Without `format` it follows from the suffix of `out`; without `out` it is in `RUN/export/`.
    `data` are the samples that features are compared on (default: those of the run). With `check`
    the result is read by each of its programs in a fresh process, and features that differ are an
    error. `license` is for the model card of the format `huggingface`.
    """
    if weights.config is None:
        raise ValueError(
            f"{weights.spec}: has no settings of a run; need a run directory or one of its "
            f"checkpoints"
        )
    if not re.fullmatch(r"[\w.+-]+", license):
        raise ValueError(f"license: got {license!r}, need a name such as mit or apache-2.0")
    name = _format_name(format, out)
    module = importlib.import_module(FORMATS[name])
    if out is None:
        stem = "-".join(filter(None, [_DEFAULT_NAMES.get(name, "model"), weights.name]))
        out = writable_dir(weights.output_dir) / "export" / f"{stem}{module.SUFFIXES[0]}"
    _check_suffix(name, out, module.SUFFIXES)
    # A model in memory may be on a GPU, and goes on to be used there.
    weights = replace(weights, backbone=copy.deepcopy(weights.backbone).cpu().eval())
    job = Job(weights, out, Reference(weights, data), license)
    job.programs.update(module.loading(job))  # before writing: it refuses unknown networks
    if check:
        require_programs(job.programs)
    module.write(job)
    for program, code in job.programs.items() if check else ():
        job.checks.append(verify(program, code, job))
    return job


def _format_name(format: str | None, out: Path | None) -> str:
    """The name of a format that was given, or that the suffix of a file shows."""
    if format is None:
        format = _BY_SUFFIX.get("" if out is None else out.suffix)
        if format is None:
            got = "neither --format nor --out" if out is None else f"{out} without --format"
            raise ValueError(
                f"export: got {got}; need --format ({', '.join(FORMATS)}), or a name that ends in "
                f".safetensors, .pt, .pth or .onnx"
            )
    if format not in FORMATS:
        near = close(format, list(FORMATS), list(FORMATS))
        raise ValueError(f"export: unknown format {format!r}; did you mean {near}?")
    return format


def _check_suffix(format: str, out: Path, suffixes: tuple[str, ...]) -> None:
    is_folder = suffixes == ("",)
    if is_folder and out.suffix in _BY_SUFFIX:
        raise ValueError(f"{out}: need the name of a folder for {format}, without {out.suffix}")
    if not is_folder and out.suffix not in suffixes:
        raise ValueError(f"{out}: need a name that ends in {' or '.join(suffixes)} for {format}")
    if out.is_dir() != is_folder and out.exists():
        there, need = ("a file", "a folder") if is_folder else ("a folder", "a file")
        raise ValueError(f"{out}: is {there}, need {need} for {format}; choose another --out")
