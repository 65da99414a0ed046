"""Shapes are proven here: every annotated function is checked while the tests run."""

import os
import shutil

os.environ["OMP_NUM_THREADS"] = "1"  # the test workers share few cores; set before torch loads

from jaxtyping import install_import_hook

install_import_hook("meanshift", "beartype.beartype")

import numpy as np
import pytest
import torch
from PIL import Image

torch.set_num_threads(1)


@pytest.fixture
def make_images():
    """Writes a folder of small random JPEGs: `{class or "": count}` to files, reproducibly."""

    def make(root, counts, size=(40, 48), seed=0):
        random = np.random.default_rng(seed)
        for name, count in counts.items():
            folder = root / name
            folder.mkdir(parents=True, exist_ok=True)
            for index in range(count):
                pixels = random.integers(0, 256, (*size, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{index:03d}.jpg")
        return root

    return make


@pytest.fixture
def call(capsys):
    """Runs a command in this process: (exit code, standard output, standard error)."""
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
    """A real browser, driven by Playwright; where there is none, the tests say so."""
    found = shutil.which("chromium") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("no chromium here; install it with: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    flags = (
        "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
        "--disable-component-update --disable-sync"
    )
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=flags.split())
        yield browser
        browser.close()
