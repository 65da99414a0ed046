"""C sources are compiled once; without a working compiler there is no library and no error."""

import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest

from meanshift.runtime import c_library
from meanshift.runtime.errors import Note

HAS_COMPILER = any(map(c_library.shutil.which, ("cc", "gcc", "clang")))
pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not HAS_COMPILER, reason="needs Linux and a C compiler"
)
SOURCE = "double twice(double value) { return 2 * value; }\n"


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(c_library.SWITCH, raising=False)
    path = tmp_path / "twice.c"
    path.write_text(SOURCE)
    return path


def load(source):
    """Load a source as a new process does."""
    c_library.load.cache_clear()
    return c_library.load(source)


def works(library):
    twice = library.functions.twice
    twice.restype = c_library.ctypes.c_double
    return twice(c_library.ctypes.c_double(1.5)) == 3.0


def cached(source):
    return list((source.parent / "cache" / "meanshift" / "kernels").iterdir())


def without_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))


def test_a_library_is_compiled_once(source, monkeypatch, tmp_path):
    first = load(source)
    assert works(first)
    [file] = cached(source)
    without_compiler(monkeypatch, tmp_path)
    again = load(source)
    assert works(again) and again.fingerprint == first.fingerprint
    assert cached(source) == [file]


def test_another_source_or_processor_has_its_own_library(source, monkeypatch):
    first = load(source)
    monkeypatch.setattr(c_library, "_processor", lambda: b"another one")
    assert works(load(source))
    source.write_text(SOURCE.replace("2 *", "2.0 + 0 *"))
    assert load(source).fingerprint != first.fingerprint
    assert len(cached(source)) == 3


def test_it_can_be_switched_off(source, monkeypatch):
    monkeypatch.setenv(c_library.SWITCH, "0")
    assert load(source) is None
    assert not (source.parent / "cache").exists()


def test_without_a_compiler_there_is_no_library_and_no_message(source, monkeypatch, tmp_path):
    without_compiler(monkeypatch, tmp_path)
    assert load(source) is None  # a warning would be an error


@pytest.mark.parametrize("cause", ["compiler", "source"])
def test_a_compiler_that_fails_is_reported_once(source, monkeypatch, tmp_path, cause):
    if cause == "source":
        source.write_text("not C\n")
    else:
        compiler = tmp_path / "bin" / "cc"
        compiler.parent.mkdir()
        compiler.write_text("#!/bin/sh\necho 'cannot find crt1.o' >&2\nexit 1\n")
        compiler.chmod(0o755)
        monkeypatch.setenv("PATH", f"{compiler.parent}:/usr/bin:/bin")
    reason = "error" if cause == "source" else r"cannot find crt1\.o"
    with pytest.warns(Note, match=rf"compiler does not work \(.*{reason}.*MEANSHIFT_C_KERNELS=0"):
        assert load(source) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert c_library.load(source) is None


def test_a_compiler_that_hangs_is_given_up(source, monkeypatch, tmp_path):
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\nexec sleep 60\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(c_library, "_TIMEOUT", 0.2)
    with pytest.warns(Note, match="timed out"):
        assert load(source) is None


def test_without_a_cache_it_is_compiled_into_a_temporary_folder(source, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(source))  # a file
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(c_library.tempfile, "tempdir", str(temporary))
    assert works(load(source))
    assert not list(temporary.iterdir())


def test_a_damaged_library_is_compiled_again(source, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    assert works(load(source))
    [file] = (tmp_path / "other").rglob("*.so")
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # the system knows no path twice
    damaged = tmp_path / "cache" / "meanshift" / "kernels" / file.name
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(file.read_bytes()[:100])
    assert works(load(source))
    assert cached(source) == []
    assert works(load(source))
    assert cached(source) == [damaged]


def test_many_processes_compile_at_once(source):
    code = (
        "import sys; from pathlib import Path; from meanshift.runtime.c_library import load\n"
        "print(load(Path(sys.argv[1])).fingerprint)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(c_library.__file__).parents[2])}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(source)],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    outputs = {process.communicate(timeout=120)[0] for process in processes}
    assert len(outputs) == 1 and outputs != {""}
    assert len(cached(source)) == 1


@pytest.fixture(params=["torch's", "new"])
def threads_of(request, monkeypatch):
    """Compute in the threads of torch, or in new ones where torch has another library."""
    c_library._openmp.cache_clear()
    if request.param == "new":
        monkeypatch.setattr(c_library.ctypes, "CDLL", lambda _: object())
    yield request.param
    c_library._openmp.cache_clear()


@pytest.mark.usefixtures("threads_of")
@pytest.mark.parametrize("count", [1, 2, 7, 100])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_each_item_is_computed_once_and_results_are_in_order(count, threads):
    done = []

    def compute(first, last):
        done.extend(range(first, last))
        return first

    results = c_library.compute_in_threads(compute, count, threads)
    assert sorted(done) == list(range(count))
    assert len(results) == min(count, threads) and results == sorted(results)


def test_parts_run_side_by_side(threads_of):
    together = threading.Barrier(2)  # breaks if one thread computes both parts

    def compute(first, last):
        together.wait(timeout=30)
        return last - first

    assert c_library.compute_in_threads(compute, 2, 2) == [1, 1]
    is_new = c_library._openmp() is c_library._run_in_new_threads
    assert is_new == (threads_of == "new")


@pytest.mark.usefixtures("threads_of")
def test_an_error_in_a_thread_is_raised_in_the_caller():
    def compute(first, _):
        if first:
            raise MemoryError("the second part")
        return 0

    with pytest.raises(MemoryError, match="the second part"):
        c_library.compute_in_threads(compute, 2, 2)
