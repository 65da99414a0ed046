"""The format `torchvision`: a state dict for torchvision's own network, without its classifier."""

from __future__ import annotations

import torch
from torchvision import models

from meanshift.models.export.counterparts import Counterpart, in_torchvision, literal, missing
from meanshift.models.export.job import Job
from meanshift.models.weights import export
from meanshift.runtime import checkpoint

SUFFIXES = (".safetensors", ".pth", ".pt")


def write(job: Job) -> None:
    """Write the state dict: a safetensors file has metadata beside it, a torch file nothing."""
    job.create_parent()
    if job.out.suffix == ".safetensors":
        export(job.weights, job.out)
    else:
        checkpoint.write(job.out, job.state)


def loading(job: Job) -> dict[str, str]:
    """The code for torchvision; an error where it has not the network."""
    counterpart = in_torchvision(job.weights)
    if counterpart is None:
        raise missing(job.weights, "torchvision")
    read = "safetensors.torch.load_file" if job.out.suffix == ".safetensors" else "torch.load"
    imports = "safetensors.torch, torch" if job.out.suffix == ".safetensors" else "torch"
    code = f"""\
import {imports}, torchvision

network = {counterpart.call("torchvision.models.get_model")}
network.set_submodule("{_classifier(job, counterpart)}", torch.nn.Identity())  # not in the file
network.load_state_dict({read}({literal(job.out)}))
network.eval()
with torch.inference_mode():
    features = network(torch.from_numpy(images))"""
    return {"torchvision": code}


def _classifier(job: Job, counterpart: Counterpart) -> str:
    """The name of the layer that torchvision's network has and the backbone has not."""
    with torch.random.fork_rng(devices=[]):
        theirs = models.get_model(counterpart.name, weights=None, **counterpart.arguments)
    layers = {name.rpartition(".")[0] for name in theirs.state_dict().keys() - job.state.keys()}
    assert len(layers) == 1 and not job.state.keys() - theirs.state_dict().keys()
    return layers.pop()
