"""Inner products of all pairs of rows, by the fastest matrix product of this processor."""

from __future__ import annotations

import functools

import torch
from jaxtyping import Shaped
from torch import Tensor


def inner_products(
    rows: Shaped[Tensor, "n dim"], others: Shaped[Tensor, "m dim"]
) -> Shaped[Tensor, "n m"]:
    """The product of the rows and the transposed others, by oneDNN where torch has it.

    torch multiplies float32 matrices by MKL, which leaves half of the speed of an AMD processor
    with AVX-512 unused (docs/performance.md).
    """
    if rows.dtype == torch.float32 and rows.device.type == "cpu" and _has_onednn():
        product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, others, None, "none", [], "")
        return product
    return rows @ others.T


@functools.cache
def _has_onednn() -> bool:
    """Whether torch was built with oneDNN and has its product of plain tensors."""
    operators = torch.ops.mkldnn
    return torch.backends.mkldnn.is_available() and hasattr(operators, "_linear_pointwise")
