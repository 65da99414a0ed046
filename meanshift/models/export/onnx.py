"""The format `onnx`: the network as a graph that many programs run, with its preprocessing.

What is written was compared with torch before: a file whose features differ never appears.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import warnings
from typing import Any

import numpy as np
import torch

from meanshift.models.export.counterparts import literal
from meanshift.models.export.job import Job
from meanshift.models.weights import fingerprint
from meanshift.runtime.extras import require
from meanshift.runtime.files import atomic_writer
from meanshift.runtime.run_directory import environment

SUFFIXES = (".onnx",)
_MOST_BYTES = 2**31 - 2**20
"""of one file: the limit of protocol buffers, with a megabyte for the graph"""


def write(job: Job) -> None:
    """Write the graph once onnxruntime computes the features of torch with it."""
    for module in ("onnx", "onnxruntime", "onnxscript"):
        require(module, extra="onnx", what="ONNX files")
    size = sum(value.numel() * value.element_size() for value in job.state.values())
    if size > _MOST_BYTES:
        raise ValueError(
            f"{job.weights.spec}: has {size / 2**30:.1f} GB of parameters, an ONNX file has at "
            f"most 2 GB; type --format safetensors"
        )
    content = _to_onnx(job)
    job.checks.append(_compare(job, content))
    job.create_parent()
    with atomic_writer(job.out) as file:
        file.write(content)


def loading(job: Job) -> dict[str, str]:
    """The code for onnxruntime."""
    code = f"""\
import onnxruntime

session = onnxruntime.InferenceSession({literal(job.out)}, providers=["CPUExecutionProvider"])
(features,) = session.run(None, {{"{job.input}": images}})"""
    return {"onnxruntime": code}


def metadata(job: Job) -> dict[str, str]:
    """What a program needs beside the graph, as text: numbers and lists are JSON."""
    values = {
        **job.preprocessing,
        "run": job.weights.spec,
        "title": job.weights.title,
        "weights": fingerprint(job.weights.backbone),
        "meanshift": environment()["versions"]["meanshift"],
    }
    return {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in values.items()
    }


def _to_onnx(job: Job) -> bytes:
    """The graph with its metadata, with a batch of any size."""
    import onnx

    samples = job.reference.samples
    # Two samples: a batch of one would become a constant of the graph.
    example = torch.cat([samples, samples])[:2]
    with _quiet():
        program = torch.onnx.export(
            job.weights.backbone,
            (example,),
            dynamo=True,
            verbose=False,
            input_names=[job.input],
            output_names=["features"],
            dynamic_shapes=({0: torch.export.Dim("batch")},),
        )
    assert program is not None
    model = program.model_proto
    _remove_traces(model)
    model.producer_name = "meanshift"
    model.producer_version = metadata(job)["meanshift"]
    onnx.helper.set_model_props(model, metadata(job))
    onnx.checker.check_model(model, full_check=True)
    content: bytes = model.SerializeToString()
    return content


@contextlib.contextmanager
def _quiet() -> Any:
    """Without the exporter's progress, and its warnings about its own parts."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _remove_traces(model: Any) -> None:
    """Remove what the exporter notes about the Python program, such as paths of its files."""
    graph = model.graph
    parts = [*graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer]
    for part in (graph, *parts, *model.functions):
        del part.metadata_props[:]
        part.doc_string = ""


def _compare(job: Job, content: bytes) -> str:
    """Compare onnxruntime with torch, on a whole batch and on a single sample."""
    import onnxruntime

    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    samples = job.reference.samples.numpy()
    (together,) = session.run(None, {job.input: samples})
    (alone,) = session.run(None, {job.input: samples[:1]})
    features = np.concatenate([alone, together[1:]])
    line = job.reference.compare(together, "onnxruntime")
    job.reference.compare(features, "onnxruntime, one sample alone")
    return line
