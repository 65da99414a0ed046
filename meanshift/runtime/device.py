"""The device and the precision that this machine computes natively."""

from __future__ import annotations

import torch


def pick_device(wish: str) -> torch.device:
    """The wished device, or for `auto` a GPU where there is one."""
    if wish == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(wish)
    except RuntimeError:
        raise ValueError(f"train.device: got {wish!r}, need auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"train.device: got {wish!r}, need auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"train.device: got {wish!r}, but torch sees {torch.cuda.device_count()} GPUs here; "
            f"use auto or cpu"
        )
    return device


def pick_precision(wish: str, device: torch.device) -> torch.dtype:
    """The dtype of autocast; float32 means that there is none.

    A CPU without bfloat16 instructions only emulates it, slower than float32.
    """
    if wish == "float16" and device.type == "cpu":
        raise ValueError("train.precision: float16 needs a GPU; on a CPU use bfloat16 or float32")
    if wish != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[
            wish
        ]
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        able = torch.cpu.get_capabilities()
        native = bool(able.get("avx512_bf16") or able.get("amx_bf16") or able.get("bf16"))
    return torch.bfloat16 if native else torch.float32


def autocast(device: torch.device, precision: torch.dtype) -> torch.autocast:
    """The context in which encoders run."""
    return torch.autocast(device.type, dtype=precision, enabled=precision != torch.float32)
