"""Folders that cannot be written to, also not by root."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Make a folder read-only: by its permissions, or for root by a mount over itself."""
    if os.geteuid() == 0:
        with _mounted(folder):
            yield
        return
    folders = [folder, *(path for path in folder.rglob("*") if path.is_dir())]
    for path in folders:
        path.chmod(0o555)
    try:
        yield
    finally:
        for path in folders:
            path.chmod(0o755)


@contextmanager
def _mounted(folder: Path) -> Iterator[None]:
    def run(*command: str) -> bool:
        return not subprocess.run([*command, folder], capture_output=True, check=False).returncode

    if shutil.which("mount") is None or not run("mount", "--bind", str(folder)):
        pytest.skip("root can write everywhere, and mounts are not allowed here")
    try:
        assert run("mount", "-o", "remount,bind,ro")
        yield
    finally:
        assert run("umount", "--lazy")
