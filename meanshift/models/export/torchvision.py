"""The format `torchvision`: a state dict for torchvision's own network, without its classifier.

A whitened output is a linear layer, so it is written as the classifier, with as many outputs as
there are features.
"""

from __future__ import annotations

from meanshift.models.export.counterparts import in_torchvision, literal, missing
from meanshift.models.export.job import Job
from meanshift.models.view_whitening import ViewWhitening, as_classifier
from meanshift.models.weights import export
from meanshift.runtime import checkpoint

SUFFIXES = (".safetensors", ".pth", ".pt")


def write(job: Job) -> None:
    """Write the state dict of torchvision's network."""
    counterpart = in_torchvision(job.weights)
    assert counterpart is not None
    write_state(job, counterpart.classifier)


def write_state(job: Job, classifier: str) -> None:
    """Write a state dict: a safetensors file has metadata beside it, a torch file nothing."""
    job.create_parent()
    if job.out.suffix == ".safetensors":
        export(job.weights, job.out, classifier=classifier)
        return
    backbone = job.weights.backbone
    state = backbone.state_dict()
    if isinstance(backbone, ViewWhitening):
        state = as_classifier(backbone, classifier)
    checkpoint.write(job.out, {name: value.contiguous() for name, value in state.items()})


def loading(job: Job) -> dict[str, str]:
    """The code for torchvision; an error where it has not the network."""
    counterpart = in_torchvision(job.weights)
    if counterpart is None:
        raise missing(job.weights, "torchvision")
    is_safetensors = job.out.suffix == ".safetensors"
    lines = [
        f"import {'safetensors.torch, ' if is_safetensors else ''}torch, torchvision",
        "",
        f"network = {counterpart.call('torchvision.models.get_model')}",
    ]
    if "num_classes" not in counterpart.arguments:
        identity = f"{literal(counterpart.classifier)}, torch.nn.Identity()"
        lines.append(f"network.set_submodule({identity})  # the file has no classifier")
    read = "safetensors.torch.load_file" if is_safetensors else "torch.load"
    lines += [
        f"network.load_state_dict({read}({literal(job.out)}))",
        "network.eval()",
        "with torch.inference_mode():",
        "    features = network(torch.from_numpy(images))",
    ]
    return {"torchvision": "\n".join(lines)}
