"""One file a protocol: a frozen encoder and pictures in, named figures and a card out."""

from __future__ import annotations

NAMES = ("knn", "linear", "semi", "cluster")
"""Each is a file here whose `evaluate(subject, ...)` returns a `Result`."""
