"""The peak memory of a training process against the sum of its parts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.step import HALF_WIDTH, BareStep
from benchmarks.table import Row
from benchmarks.worker import Worker
from meanshift.config import Config
from meanshift.reproduce.cost import PhaseTimer
from meanshift.runtime.malloc import keep_memory

CONFIGS = {
    "half width, bank 65,536": HALF_WIDTH,
    "half width, bank 524,288": HALF_WIDTH.with_overrides({"method.bank_size": 524_288}),
    "half width, batch 1,024": HALF_WIDTH.with_overrides({"train.batch_size": 1024}),
}
TINY = HALF_WIDTH.with_overrides(
    {"encoder.width": 0.125, "method.bank_size": 64, "train.batch_size": 4, "data.image_size": 8}
)


def rows(_: int) -> Iterator[Row]:
    for name, config in CONFIGS.items():
        parts = _measure(config, keep_freed=True)
        peak = parts.pop("peak")
        parts["freed, reused by the next step"] = peak - _measure(config, keep_freed=False)["peak"]
        listed = ", ".join(f"{part} {size / peak:.0%}" for part, size in parts.items())
        yield Row(
            f"memory, {name}: not explained / the peak",
            (abs(1 - sum(parts.values()) / peak),),  # parts may also be counted twice
            0.1,
            at_most=True,
            note=f"{peak / 2**20:,.0f} MB: {listed}",
        )


def _measure(config: Config, *, keep_freed: bool) -> dict[str, float]:
    worker = Worker(peak_and_parts, config, keep_freed)
    parts: dict[str, float] = worker.next()
    worker.close()
    return parts


def peak_and_parts(config: Config, keep_freed: bool) -> Iterator[dict[str, float]]:
    """Bytes of a process that trains, and of what is known to be in memory at its peak."""
    if keep_freed:
        keep_memory()
    yield {}
    BareStep(TINY).step(PhaseTimer())  # much of torch is loaded by the first step
    python = resident("RssAnon")
    reset_peak()
    timed_step = BareStep(config)
    method = timed_step.method
    for _ in range(3):
        timed_step.step(PhaseTimer())
    peak = resident("VmHWM")
    code = resident("RssFile") + resident("RssShmem")
    bank = size_of(method.bank.buffers()) if method.bank is not None else 0
    states = [value for state in timed_step.optimizer.state.values() for value in state.values()]
    saved, target_forward = activations(timed_step)
    yield {
        "peak": peak,
        "code": code,
        "Python and torch": python,
        "weights": size_of(method.parameters()) + size_of(method.buffers()) - bank,
        "gradients": size_of(p for p in method.parameters() if p.requires_grad),
        "optimizer": size_of(state for state in states if isinstance(state, Tensor)),
        "bank": bank,
        # The images as bytes; as floats the random view, the target's view and the online view.
        "views": timed_step.images.nbytes + 3 * timed_step.view.nbytes,
        "activations": saved,
        "the target's forward": target_forward,
    }


def activations(timed_step: BareStep) -> tuple[int, int]:
    """Bytes saved for the backward pass, and the most that the target's forward pass adds."""
    method = timed_step.method
    counted = (*method.parameters(), timed_step.view)
    excluded = {tensor.untyped_storage().data_ptr() for tensor in counted}
    saved: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in excluded:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        v = method.predict(method.embed(timed_step.view))
    outputs: list[int] = []
    hooks = [
        module.register_forward_hook(lambda _module, _input, out: outputs.append(out.nbytes))
        for module in method.target.modules()
        if not list(module.children())
    ]
    method.project(timed_step.view)
    for hook in hooks:
        hook.remove()
    del v
    return sum(saved.values()), 3 * max(outputs)  # input, output, and the shortcut


def size_of(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def resident(name: str) -> int:
    """Bytes of this process that are in memory, by a name of /proc/self/status."""
    status = Path("/proc/self/status").read_text()
    match = re.search(rf"{name}:\s+(\d+) kB", status)
    assert match is not None
    return 1024 * int(match[1])


def reset_peak() -> None:
    """Let VmHWM start again from the present memory."""
    Path("/proc/self/clear_refs").write_text("5")
