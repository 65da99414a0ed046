"""The device, and the precision that it computes natively."""

from __future__ import annotations

import platform
from pathlib import Path

import torch


def pick_device(name: str) -> torch.device:
    """Return the device of a setting; `auto` is a GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    got = f"--train.device or --device: got {name!r}"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"{got}, need auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"{got}, need auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"{got}, but torch finds {torch.cuda.device_count()} GPUs here; use auto or cpu"
        )
    return device


def pick_precision(name: str, device: torch.device) -> torch.dtype:
    """Return the data type of autocast for a setting; float32 means no autocast.

    `auto` is bfloat16 only where it is native: a CPU without bfloat16 instructions emulates it,
    which is slower than float32.
    """
    if name == "float16" and device.type == "cpu":
        raise ValueError(
            "--train.precision or --precision: got 'float16', which needs a GPU; on a CPU use "
            "bfloat16 or float32"
        )
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name != "auto":
        return dtypes[name]
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        capabilities = torch.cpu.get_capabilities()
        native = any(capabilities.get(key) for key in ("avx512_bf16", "amx_bf16", "bf16"))
    return torch.bfloat16 if native else torch.float32


def autocast(device: torch.device, precision: torch.dtype) -> torch.autocast:
    """Return the context in which encoders run."""
    return torch.autocast(device.type, dtype=precision, enabled=precision != torch.float32)


def processor_name() -> str:
    """The processor's name, on Linux with family and model, since clouds shorten the name."""
    try:
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return platform.processor()
    pairs = (line.partition(":") for line in first.splitlines())
    fields = {name.strip(): value.strip() for name, _, value in pairs}
    if "model name" not in fields:
        return platform.processor() or platform.machine()
    details = {"family": "cpu family", "model": "model"}
    known = [f"{word} {fields[name]}" for word, name in details.items() if name in fields]
    return ", ".join([fields["model name"], *known])
