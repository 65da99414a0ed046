"""Values that are not finite (NaN or infinity): found in the step that has them, and named.

On a CPU a check is immediate. A GPU is not waited for: whether values are finite is copied to the
host behind the work of the step, and a later step reads it once it has arrived.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class NotFiniteError(ValueError):
    """An input or a memory has values that are not finite."""


class DivergedError(NotFiniteError):
    """The network gives values that are not finite for an input that is."""


class FiniteCheck:
    """Raises an error that names the first of several places whose values are not finite."""

    def __init__(self) -> None:
        self._flags: dict[str, tuple[Tensor, Tensor]] = {}  # where: on the device, on the host

    def add(self, where: str, values: Tensor) -> None:
        """Check the values of a place; on a CPU this raises at once."""
        values = values.detach()
        if values.device.type == "cpu":
            require_finite(values, where)
        else:
            self._send(where, ~values.isfinite().all())

    def raise_arrived(self) -> None:
        """Raise if an earlier step is known to have had such values; never waits."""
        where = next((where for where, (_, host) in self._flags.items() if host), None)
        if where is not None:
            self._flags.clear()  # whoever goes on, with other weights, starts anew
            raise NotFiniteError(f"NaN or infinity in {where} in one of the last steps")

    def _send(self, where: str, bad: Tensor) -> None:
        """Copy a flag to the host, where it stays set: a copy that is late is read later."""
        if where not in self._flags:
            self._flags[where] = (torch.zeros_like(bad), _pinned_flag())
        on_device, host = self._flags[where]
        on_device |= bad
        host.copy_(on_device, non_blocking=True)


def _pinned_flag() -> Tensor:
    """A flag in memory that a GPU writes to by itself."""
    return torch.zeros((), dtype=torch.bool, pin_memory=True)


def require_finite(values: Tensor, what: str) -> None:
    """Raise an error if values on a CPU are not finite; those on a GPU are left to `FiniteCheck`.

    The sum is the quick test: a tenth of the time of the exact one.
    """
    if values.device.type != "cpu" or not values.numel():
        return
    if values.sum(dtype=torch.promote_types(values.dtype, torch.float32)).isfinite():
        return
    finite = values.reshape(len(values) if values.ndim else 1, -1).isfinite().all(1)
    if finite.all():
        return
    rows = (~finite).nonzero()[:, 0].tolist()
    which = f" in {len(rows)} of {len(finite)} rows, first in row {rows[0]}" if values.ndim else ""
    kind = "NaN" if values.isnan().any() else "infinity"
    raise NotFiniteError(f"{kind} in {what}{which}")


def first_with_nan(module: nn.Module) -> str | None:
    """The name of the first parameter or buffer with a NaN; waits for the device."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    found = (name for name, t in tensors if t.is_floating_point() and bool(t.isnan().any()))
    return next(found, None)
