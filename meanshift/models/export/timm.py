"""The format `timm`: a checkpoint for timm's own network, as `torchvision` for torchvision's."""

from __future__ import annotations

from meanshift.models.export.counterparts import in_timm, missing
from meanshift.models.export.job import Job
from meanshift.models.export.torchvision import write_state

SUFFIXES = (".safetensors", ".pth", ".pt")


def write(job: Job) -> None:
    """Write the state dict of timm's network."""
    counterpart = in_timm(job.weights)
    assert counterpart is not None
    write_state(job, counterpart.classifier)


def loading(job: Job) -> dict[str, str]:
    """The code for timm; an error where it has not the network."""
    counterpart = in_timm(job.weights)
    if counterpart is None:
        raise missing(job.weights, "timm")
    create = counterpart.call("timm.create_model", checkpoint_path=job.out)
    return {"timm": timm_code(create)}


def timm_code(create: str) -> str:
    """The code by which timm computes features, from a call of `timm.create_model`."""
    return f"""\
import timm, torch

network = {create}
network.eval()
with torch.inference_mode():
    features = network(torch.from_numpy(images))"""
