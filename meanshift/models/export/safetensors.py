"""The format `safetensors`: parameters with the settings of the run, for this program."""

from __future__ import annotations

from meanshift.models.export.counterparts import literal
from meanshift.models.export.job import Job
from meanshift.models.weights import export

SUFFIXES = (".safetensors",)


def write(job: Job) -> None:
    """Write the file with its checksum."""
    job.create_parent()
    export(job.weights, job.out)


def loading(job: Job) -> dict[str, str]:
    """The code for each program that reads it."""
    return {"meanshift": meanshift_code(str(job.out))}


def meanshift_code(spec: str) -> str:
    """The code by which this program computes features with exported weights."""
    return f"""\
import meanshift, torch

network = meanshift.load_encoder({literal(spec)})
with torch.inference_mode():
    features = network(torch.from_numpy(images))"""
