"""Standard output and error that outlive their reader."""

import os
import subprocess
import sys

import pytest

from meanshift.runtime.output import survive_closed_output

PROGRAM = """
import os, sys
from meanshift.runtime.output import survive_closed_output
with survive_closed_output(), open("file", "w") as file:
    print("lost")
    print("lost", file=sys.stderr)
    assert not sys.stderr.isatty() and file.fileno() > 2
"""


@pytest.mark.parametrize("name", ["stdout", "stderr"])
@pytest.mark.parametrize("buffering", [1, -1])
def test_what_is_printed_to_a_closed_pipe_vanishes(monkeypatch, name, buffering):
    reader, writer = os.pipe()
    with os.fdopen(writer, "w", buffering=buffering) as stream:
        monkeypatch.setattr(sys, name, stream)
        with survive_closed_output():
            os.close(reader)
            for _ in range(2):
                print("lost", file=getattr(sys, name))
        assert getattr(sys, name) is stream


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no full device here")  # noqa: PTH110
def test_a_log_on_a_full_disk_ends_nothing(monkeypatch):
    with open("/dev/full", "w", buffering=1) as stream:  # noqa: PTH123
        monkeypatch.setattr(sys, "stderr", stream)
        with survive_closed_output():
            print("lost", file=sys.stderr)


def test_a_program_without_output_gives_its_numbers_to_no_file(tmp_path):
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(
        command, cwd=tmp_path, check=False, preexec_fn=lambda: os.closerange(1, 3)
    )
    assert done.returncode == 0 and (tmp_path / "file").read_text() == ""
