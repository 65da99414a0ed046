"""What the process does with memory that it has freed."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # the names that glibc's mallopt has for them


def keep_memory() -> bool:
    """Freed memory stays with the process instead of going back to the system; whether it does.

    By default glibc maps every large tensor anew and gives it back when it is freed, and the system
    clears each page at its first touch: of a training step on a CPU that is about a tenth, and
    more of making views of 224 pixels. The price is that the process keeps its peak until it ends.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library has no such setting
        return False
    return bool(mallopt(_MMAP_MAX, 0)) and bool(mallopt(_TRIM_THRESHOLD, 2**31 - 1))
