"""The process keeps freed memory, so that its pages are not cleared again."""

import subprocess
import sys

import pytest

from meanshift.runtime import malloc

PROGRAM = """
import resource, sys, torch
from meanshift.runtime.malloc import keep_memory
torch.set_num_threads(1)
if sys.argv[1] == "keep":
    assert keep_memory()
def work():
    torch.zeros(2**24).add_(1)  # 64 MB
for _ in range(12):  # at first freed blocks are a few bytes too short for the next
    work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(8):
    work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(mode):
    """Page faults of eight tensors of 64 MB, one after the other."""
    command = [sys.executable, "-c", PROGRAM, mode]
    return int(subprocess.run(command, capture_output=True, check=True).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="a setting of glibc")
@pytest.mark.slow
def test_freed_memory_is_reused():
    kept = page_faults("keep")
    default = page_faults("default")
    assert 20 * kept < default, (kept, default)


@pytest.mark.parametrize("error", [AttributeError, OSError, TypeError])
def test_another_c_library_is_not_changed(monkeypatch, error):
    def missing(_):
        raise error("none here")

    monkeypatch.setattr(malloc.ctypes, "CDLL", missing)
    assert malloc.keep_memory() is False
