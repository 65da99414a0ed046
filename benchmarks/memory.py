"""The peak of a training process against the sum of its parts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.apart import Apart
from benchmarks.table import Row
from benchmarks.training import HALF
from meanshift.config import Config
from meanshift.reproduce.laps import Laps
from meanshift.reproduce.step import Contender
from meanshift.runtime.malloc import keep_memory

NAMES = {
    "half width, bank 65,536": HALF,
    "half width, bank 524,288": replace(HALF, method=replace(HALF.method, bank_size=524_288)),
    "half width, batch 1,024": replace(HALF, train=replace(HALF.train, batch_size=1024)),
}
SMALL = HALF.with_overrides(
    {"encoder.width": 0.125, "method.bank_size": 64, "train.batch_size": 4, "data.image_size": 8}
)


def rows(_: int) -> Iterator[Row]:
    for name, config in NAMES.items():
        told, returned = (_ask(config, keep=keep) for keep in (True, False))
        peak = told.pop("peak")
        told["freed, and kept for the next step"] = peak - returned["peak"]
        parts = ", ".join(f"{part} {size / peak:.0%}" for part, size in told.items())
        yield Row(f"memory, {name}: not explained / the peak", (1 - sum(told.values()) / peak,),
                  0.1, at_most=True, note=f"{peak / 2**20:,.0f} MB: {parts}")  # fmt: skip


def _ask(config: Config, *, keep: bool) -> dict[str, float]:
    apart = Apart(peak_and_parts, config, keep)
    told: dict[str, float] = apart.ask()
    apart.end()
    return told


def peak_and_parts(config: Config, keep: bool) -> Iterator[dict[str, float]]:
    """Bytes of a process that trains, and of what it is known to hold at its peak."""
    if keep:
        keep_memory()
    yield {}
    Contender(SMALL).step(Laps())  # much of torch is loaded by the first step
    python = resident("RssAnon")
    reset_peak()
    contender = Contender(config)
    method, optimizer = contender.method, contender.optimizer
    for _ in range(3):
        contender.step(Laps())
    peak, code = resident("VmHWM"), resident("RssFile") + resident("RssShmem")
    bank = size_of(method.bank.buffers()) if method.bank is not None else 0
    weights = size_of(method.parameters()) + size_of(method.buffers()) - bank
    learning = size_of(p for p in method.parameters() if p.requires_grad)
    momentum = size_of(v for state in optimizer.state.values() for v in state.values()
                       if isinstance(v, Tensor))  # fmt: skip
    saved, working = activations(contender)
    yield {
        "peak": peak,
        "code": code,
        "Python and torch": python,
        "weights": weights,
        "gradients": learning,
        "optimizer": momentum,
        "bank": bank,
        # Bytes of the images; as floats the fixed batch, the target's view and the online one.
        "views": contender.images.nbytes + 3 * contender.fixed.nbytes,
        "activations": saved,
        "the target's forward": working,
    }


def activations(contender: Contender) -> tuple[int, int]:
    """Bytes kept for the backward pass, and the most that the target's forward needs besides."""
    method, kept = contender.method, dict[int, int]()
    known = {held.untyped_storage().data_ptr() for held in (*method.parameters(), contender.fixed)}

    def keep(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        v = method.predict(contender.fixed)
    sizes = list[int]()
    hooks = [
        module.register_forward_hook(lambda _m, _i, out: sizes.append(out.nbytes))
        for module in method.target.modules()
        if not list(module.children())
    ]
    method.project(contender.fixed)
    for hook in hooks:
        hook.remove()
    del v
    return sum(kept.values()), 3 * max(sizes)  # what goes in, what comes out, and the shortcut


def size_of(tensors: Iterator[Tensor] | Iterator[nn.Parameter]) -> int:
    return sum(held.nbytes for held in tensors)


def resident(which: str) -> int:
    """Bytes of this process that are in memory, by the name that the system has for them."""
    status = Path("/proc/self/status").read_text()
    found = re.search(rf"{which}:\s+(\d+) kB", status)
    assert found is not None
    return 1024 * int(found[1])


def reset_peak() -> None:
    """From now on VmHWM counts anew."""
    Path("/proc/self/clear_refs").write_text("5")
