"""One file a protocol: a frozen encoder and images in, named figures and a card out."""

from __future__ import annotations

NAMES = ("knn", "linear", "semi", "cluster", "transfer", "detect")
"""Each is a file here whose `evaluate(...)` takes what is judged and returns a `Result`."""
