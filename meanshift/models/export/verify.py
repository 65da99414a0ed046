"""Read an export with another program in a fresh process, and compare the features."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from jaxtyping import Float
from torch import Tensor

from meanshift.models.export.job import Job
from meanshift.runtime.extras import require

_EXTRAS = {"timm": "timm", "onnxruntime": "onnx"}
"""the extras of programs that are optional"""


def require_programs(programs: Iterable[str]) -> None:
    """Check that the programs that read an export are installed."""
    for program in programs:
        if program in _EXTRAS:
            require(program, extra=_EXTRAS[program], what=f"checks by {program}")


def verify(program: str, code: str, job: Job) -> str:
    """Compare the features that `code` computes with those of the run; return one line."""
    features = _run_fresh(program, code, job.reference.samples)
    return job.reference.compare(features, f"{job.out}: read by {program}")


def _run_fresh(
    program: str, code: str, samples: Float[Tensor, "n *shape"]
) -> Float[np.ndarray, "..."]:
    """The `features` that code computes of `images` in a Python process of its own."""
    with tempfile.TemporaryDirectory(prefix="meanshift-") as folder:
        given = Path(folder) / "images.npy"
        result = Path(folder) / "features.npy"
        np.save(given, samples.numpy())
        script = (
            f"import numpy\nimages = numpy.load({str(given)!r})\n{code}\n"
            f"numpy.save({str(result)!r}, features)\n"
        )
        # The modules are those of this process, and none that happens to be in this folder.
        paths = os.pathsep.join(filter(None, sys.path))
        done = subprocess.run(
            [sys.executable, "-P", "-c", script],
            env={**os.environ, "PYTHONPATH": paths},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            raise ValueError(f"{program} cannot read what was exported: {lines[-1]}")
        features: np.ndarray = np.load(result)
        return features
