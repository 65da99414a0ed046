"""Settings of every test run, and fixtures that many tests share.

Shapes are proven here: every annotated function of the package is checked while the tests run.
"""

import os
import shutil

# Before torch is loaded: the test workers share few cores, and forked processes print only what
# the program itself prints.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from jaxtyping import install_import_hook

install_import_hook("meanshift", "beartype.beartype")

import hypothesis
import numpy as np
import pytest
import torch
from PIL import Image

torch.set_num_threads(1)

# No test depends on the speed of the machine, whose cores may be busy.
hypothesis.settings.register_profile(
    "any speed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any speed")


@pytest.fixture
def make_images():
    """Write a folder of small random JPEG files: `{class or "": count}`, reproducibly."""

    def make(root, counts, size=(40, 48), seed=0):
        rng = np.random.default_rng(seed)
        for name, count in counts.items():
            folder = root / name
            folder.mkdir(parents=True, exist_ok=True)
            for index in range(count):
                pixels = rng.integers(0, 256, (*size, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{index:03d}.jpg")
        return root

    return make


@pytest.fixture
def call(capsys):
    """Run a command in this process: (exit code, standard output, standard error)."""
    from meanshift.cli import main

    def run(*arguments):
        capsys.readouterr()
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as left:
            code = left.code
        return code, *capsys.readouterr()

    return run


@pytest.fixture(scope="session")
def chromium():
    """A real browser, driven by Playwright; without one the tests are skipped."""
    found = shutil.which("chromium") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("no chromium here; install it with: apt-get install chromium")
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=30_000)  # not 5 seconds: the cores may be busy
    flags = (
        "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
        "--disable-component-update --disable-sync"
    )
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=flags.split())
        yield browser
        browser.close()
