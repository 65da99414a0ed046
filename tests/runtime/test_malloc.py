"""Memory that a process has freed stays with it, so that its pages are not cleared again."""

import subprocess
import sys

import pytest

from meanshift.runtime import malloc

FAULTS = """
import resource, sys, torch
from meanshift.memory import keep_memory
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


def faults(how):
    """Pages that the system had to find for eight tensors of 64 MB, one after the other."""
    command = [sys.executable, "-c", FAULTS, how]
    return int(subprocess.run(command, capture_output=True, check=True).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="a setting of glibc")
def test_freed_memory_is_used_again_instead_of_mapped_anew():
    with_it, without = faults("keep"), faults("plain")
    assert 20 * with_it < without, (with_it, without)


@pytest.mark.parametrize("error", [AttributeError, OSError, TypeError])
def test_another_c_library_is_left_as_it_is(monkeypatch, error):
    def missing(_):
        raise error("none here")

    monkeypatch.setattr(malloc.ctypes, "CDLL", missing)
    assert malloc.keep_memory() is False
