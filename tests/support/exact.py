"""Equality of nested states, to the bit."""

from __future__ import annotations

from typing import Any

import torch


def assert_same(one: Any, two: Any, where: str = "state", *, unless: str = "") -> None:
    """Every tensor and value is the same, but for the one at the address `unless`."""
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, two), where
    elif isinstance(one, dict):
        assert one.keys() == two.keys(), where
        for key in one:
            assert_same(one[key], two[key], f"{where}.{key}", unless=unless)
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(two), where
        for index, (a, b) in enumerate(zip(one, two, strict=True)):
            assert_same(a, b, f"{where}[{index}]", unless=unless)
    elif where != unless:
        assert one == two, where
