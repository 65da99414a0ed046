"""C sources of this package, compiled at their first use by the system's compiler."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from meanshift.runtime.errors import Note
from meanshift.runtime.files import atomic_writer

SWITCH = "MEANSHIFT_C_KERNELS"
"""environment variable; 0 uses torch's operators instead of compiled ones"""

# Not -ffast-math: with it, older versions of gcc make a library that changes the floating-point
# mode of the whole process.
_FLAGS = (
    *("-O3", "-march=native", "-std=gnu11", "-shared", "-fPIC", "-s"),
    *("-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros"),
)
FINITE = "-ffinite-math-only"
"""flag of a source that computes faster where no value is infinite or not a number"""
_COMPILERS = ("cc", "gcc", "clang")
_TIMEOUT = 120  # seconds for a compiler that takes about one


@dataclass(frozen=True)
class CLibrary:
    """A compiled library."""

    functions: ctypes.CDLL
    fingerprint: str
    """of its machine code, which results depend on"""


@functools.cache
def load(source: Path, *flags: str) -> CLibrary | None:
    """Compile and load a C source, or return None where that is not possible or switched off.

    The library is kept in the user's cache, by source, flags and processor.
    """
    if sys.platform != "linux" or os.environ.get(SWITCH) == "0":
        return None
    try:
        return _load_from(_cache(), source, flags)
    except (OSError, RuntimeError):  # there is no home, or it is read-only or allows no programs
        pass
    except subprocess.SubprocessError as error:
        _report(error)
        return None
    try:
        with tempfile.TemporaryDirectory(prefix="meanshift-") as folder:  # of this user alone
            return _load_from(Path(folder), source, flags)
    except (OSError, subprocess.SubprocessError) as error:
        _report(error)
        return None


def compute_in_threads(compute: Callable[[int, int], int], count: int, threads: int) -> list[int]:
    """Call `compute(first, last)` for equal parts of `count` items, in up to as many threads.

    Returns what the calls return. ctypes releases Python's lock while a function of C runs. The
    threads are those of torch, which may still wait busily for its next operator: new ones would
    share a core with this thread until the scheduler moves them, some milliseconds later.
    """
    threads = min(threads, count)
    if threads <= 1:
        return [compute(0, count)]
    limits = [count * part // threads for part in range(threads + 1)]
    parts = deque(enumerate(itertools.pairwise(limits)))
    results = dict[int, int]()
    errors: list[BaseException] = []

    def work(_: object) -> None:
        """Take parts until none is left, as there may be fewer threads than parts."""
        with suppress(IndexError):
            while True:
                number, (first, last) = parts.popleft()
                try:
                    results[number] = compute(first, last)
                except BaseException as error:  # the library that calls this knows no exceptions
                    errors.append(error)

    _openmp()(_OpenMPFunction(work), None, threads, 0)
    if errors:
        raise errors[0]
    return [results[number] for number in range(threads)]


_OpenMPFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@functools.cache
def _openmp() -> Callable[..., object]:
    """The function of torch's OpenMP library that runs a function in its threads.

    Where torch has another library, new threads do the same.
    """
    try:
        parallel = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError):
        return _run_in_new_threads
    parallel.argtypes = (_OpenMPFunction, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    parallel.restype = None
    return parallel


def _run_in_new_threads(work: Callable[[object], None], data: None, threads: int, _: int) -> None:
    with ThreadPoolExecutor(threads - 1) as pool:
        for _ in range(threads - 1):
            pool.submit(work, data)
        work(data)


def address(tensor: Tensor | None) -> ctypes.c_void_p:
    """The address of a tensor's values for a function of C; NULL for None."""
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if Path(base).is_absolute() else Path.home() / ".cache"
    return root / "meanshift" / "kernels"


def _load_from(folder: Path, source: Path, flags: tuple[str, ...]) -> CLibrary | None:
    """Load the library from a folder, and compile it into the folder if it is not there."""
    content = [source.read_bytes(), " ".join(_FLAGS + flags).encode(), _processor()]
    key = hashlib.sha256(b"\0".join(content)).hexdigest()[:16]
    file = folder / f"{source.stem}-{key}.so"
    if not file.exists():
        compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
        if compiler is None:
            return None
        folder.mkdir(parents=True, exist_ok=True)
        _compile(compiler, source, file, flags)
    fingerprint = hashlib.sha256(file.read_bytes()).hexdigest()[:8]
    try:
        return CLibrary(ctypes.CDLL(str(file)), fingerprint)
    except OSError:  # damaged: the next process compiles it again
        with suppress(OSError):
            file.unlink()
        raise


def _compile(compiler: str, source: Path, file: Path, flags: tuple[str, ...]) -> None:
    with tempfile.TemporaryDirectory(prefix="meanshift-") as folder:
        output = Path(folder) / file.name
        command = [compiler, *_FLAGS, *flags, source.name, "-o", str(output), "-lm"]
        subprocess.run(
            command, cwd=source.parent, check=True, capture_output=True, timeout=_TIMEOUT
        )
        with atomic_writer(file, shared=True) as cached:  # other processes may compile it too
            cached.write(output.read_bytes())


def _report(error: Exception) -> None:
    """Say once that a compiler is there and does not work."""
    reason = str(error)
    if isinstance(error, subprocess.CalledProcessError):
        lines = error.stderr.decode(errors="replace").strip().splitlines()
        reason = lines[0] if lines else f"exit code {error.returncode}"
    warnings.warn(
        f"the C compiler does not work ({reason}), so torch's slower operators are used; "
        f"{SWITCH}=0 avoids this message",
        Note,
        stacklevel=3,
    )


def _processor() -> bytes:
    """The model and the instructions of this processor."""
    names = (b"vendor_id", b"cpu family", b"model", b"flags", b"Features", b"CPU")
    lines = [platform.machine().encode()]
    with suppress(OSError):
        first = Path("/proc/cpuinfo").read_bytes().partition(b"\n\n")[0]
        lines += [line for line in first.splitlines() if line.startswith(names)]
    return b"\n".join(lines)
