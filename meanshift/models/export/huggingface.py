"""The format `huggingface`: a folder with config, model card and weights, for the Hub.

`load("hf:FOLDER")` reads it, and timm does if it has the network.
"""

from __future__ import annotations

import json
import math
from typing import Any

from meanshift.models import hub
from meanshift.models.export.card import model_card
from meanshift.models.export.counterparts import Counterpart, call_code, in_timm
from meanshift.models.export.job import Job
from meanshift.models.export.safetensors import meanshift_code
from meanshift.models.export.timm import timm_code
from meanshift.models.view_whitening import without_whitening
from meanshift.models.weights import export, fingerprint
from meanshift.runtime import checksum
from meanshift.runtime.files import write_text
from meanshift.runtime.run_directory import environment

SUFFIXES = ("",)


def write(job: Job) -> None:
    """Write the three files; config.json is the last one and has the checksum of the weights."""
    _refuse_other_files(job)
    job.create_parent()
    job.out.mkdir(exist_ok=True)
    counterpart = in_timm(job.weights)
    classifier = "" if counterpart is None else counterpart.classifier
    model = export(job.weights, job.out / hub.MODEL_FILE, classifier=classifier)
    write_text(job.out / "README.md", model_card(job, loading(job)))
    described = {
        "version": environment()["versions"]["meanshift"],
        "title": job.weights.title,
        "weights": fingerprint(job.weights.backbone),
        "checksum": checksum.recorded(model),
        "preprocessing": job.preprocessing,
    }
    config = {} if counterpart is None else timm_config(job, counterpart)
    text = json.dumps({**config, hub.CONFIG_KEY: described}, indent=2)
    write_text(job.out / hub.CONFIG_FILE, text + "\n")


def loading(job: Job) -> dict[str, str]:
    """The code for this program, and for timm where it has the network."""
    programs = {"meanshift": meanshift_code(f"hf:{job.out}")}
    if in_timm(job.weights) is not None:
        create = call_code("timm.create_model", f"local-dir:{job.out}", {"pretrained": True})
        programs["timm"] = timm_code(create)
    return programs


def timm_config(job: Job, counterpart: Counterpart) -> dict[str, Any]:
    """What timm builds the network and its preprocessing from."""
    values = job.preprocessing
    size = values["image_size"]
    state = without_whitening(job.weights.backbone).state_dict()
    return {
        "architecture": counterpart.name,
        "num_classes": counterpart.arguments["num_classes"],
        "num_features": job.features,
        "model_args": {k: v for k, v in counterpart.arguments.items() if k != "num_classes"},
        "pretrained_cfg": {
            "input_size": [values["channels"], size, size],
            "fixed_input_size": "img_size" in counterpart.arguments,
            "interpolation": values["interpolation"],
            "crop_pct": crop_fraction(size, values["resize"]),
            "crop_mode": values["crop"],
            "mean": values["mean"],
            "std": values["std"],
            "num_classes": counterpart.arguments["num_classes"],
            **({"classifier": counterpart.classifier} if counterpart.classifier else {}),
            "first_conv": next(n for n in state if state[n].ndim == 4).removesuffix(".weight"),
        },
    }


def crop_fraction(size: int, short: int) -> float:
    """The `crop_pct` from which timm computes the short side: the size divided by it, rounded down.

    >>> crop_fraction(224, 256)
    0.875
    """
    fraction = size / short
    return fraction if math.floor(size / fraction) == short else math.nextafter(fraction, 0)


def _refuse_other_files(job: Job) -> None:
    """Refuse a folder with files that are not of an earlier export; those of git may be there."""
    if not job.out.exists():
        return
    config = job.out / hub.CONFIG_FILE
    others = [path.name for path in job.out.iterdir() if not path.name.startswith(".")]
    if config.exists():
        hub.read_config(config)
    elif set(others) - {"README.md", hub.MODEL_FILE}:
        raise ValueError(
            f"{job.out}: contains other files ({', '.join(sorted(others)[:3])}) and no export; "
            f"choose another --out"
        )
