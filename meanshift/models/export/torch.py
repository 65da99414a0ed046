"""The format `torch`: as `safetensors`, but a file of `torch.save`."""

from __future__ import annotations

from meanshift.models.export.safetensors import loading, write

SUFFIXES = (".pt", ".pth")

__all__ = ["SUFFIXES", "loading", "write"]
