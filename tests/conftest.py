"""Shapes are proven here: every annotated function is checked while the tests run."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # the test workers share few cores; set before torch loads

from jaxtyping import install_import_hook

install_import_hook("meanshift", "beartype.beartype")

import numpy as np
import pytest
import torch
from PIL import Image

torch.set_num_threads(1)


@pytest.fixture
def make_pictures():
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
