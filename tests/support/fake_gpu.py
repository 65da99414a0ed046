"""A GPU that is not there: tensors on `cuda` have shapes and a device but no values.

CPU tensors are real, so that the random numbers of the views are computed as ever. What would wait
for a GPU raises an error: torch's fake tensors refuse to give a value (`.item()`, `.tolist()`,
`if tensor`, boolean indexing), and this module refuses copies that block. So do tensors of two
devices in one operation. There is no backward pass and no autocast on fake tensors.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meanshift.methods import finite
from meanshift.ops import image

GPU = torch.device("cuda")
_aten = torch.ops.aten

DELIBERATE = {
    "_channel_constant": "constants of the image operators: one copy for each device, kept",
    "feature_batches": "features are stored on the CPU: one copy for each batch of evaluation",
    "Whitening._eigenvectors": "torch checks on the CPU whether the eigenvectors were found",
    "MemoryBank.lookup": "a sharded bank needs the number of rows to ask of each process",
}
"""functions in which the CPU waits for a GPU within a step or an evaluation batch, with the reason;
docs/reliability.md has the same table"""


class Waits(AssertionError):
    """An operation for which the CPU would wait for the GPU."""


class _NoWaiting(TorchDispatchMode):
    """Runs operations on real CPU tensors, and those on the GPU on fake ones."""

    strict = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        fake = any(isinstance(leaf, FakeTensor) for leaf in leaves)
        if not fake and torch.device(kwargs.get("device") or "cpu").type == "cpu":
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if self.strict and _waits(func, args, kwargs) and not _is_deliberate():
            raise Waits(f"{func} waits for the GPU: use non_blocking=True, or compute it there")
        if func is _aten.copy_.default and not isinstance(args[0], FakeTensor):
            return args[0]  # on its way to the CPU; it does not arrive
        return func(*args, **kwargs)


def _waits(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if func is _aten._linalg_eigh.default:
        return True
    if func is _aten._to_copy.default:
        to = kwargs.get("device")
        moves = to is not None and to.type != args[0].device.type
        return moves and not kwargs.get("non_blocking", False)
    if func is _aten.copy_.default:
        non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        return args[0].device != args[1].device and not non_blocking
    if func is _aten.index.Tensor or func is _aten.index_put_.default:
        return any(isinstance(i, Tensor) and not isinstance(i, FakeTensor) for i in args[1])
    return False


def _is_deliberate() -> bool:
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_qualname in DELIBERATE:
            return True
        frame = frame.f_back
    return False


@contextmanager
def fake_gpu(monkeypatch: Any) -> Iterator[_NoWaiting]:
    """Within it there is a device `cuda`; nothing may wait for it while `strict` is set."""
    monkeypatch.setattr(finite, "_pinned_flag", lambda: torch.zeros((), dtype=torch.bool))
    monkeypatch.setattr(nn.Module, "to", _module_to)
    with (
        warnings.catch_warnings(),
        FakeTensorMode(allow_non_fake_inputs=True),
        _NoWaiting() as mode,
    ):
        # Copies from memory that is not pinned, and a gradient scaler that is off.
        warnings.filterwarnings("ignore", ".*pin_memory|.*CUDA is not available")
        image._channel_constant.cache_clear()
        yield mode
    image._channel_constant.cache_clear()  # no fake constant outlives its mode


def _module_to(
    module: nn.Module, device: torch.device | None = None, **_: torch.memory_format
) -> nn.Module:
    """Move a module by new tensors: torch's own `to` cannot replace a tensor by a fake one."""
    for part in module.modules() if device is not None else ():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                moved = parameter.detach().to(device)
                part._parameters[name] = nn.Parameter(moved, parameter.requires_grad)
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else buffer.to(device)
    return module
