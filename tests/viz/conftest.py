"""Runs that are written by hand, for the tests of figures and pages."""

import pytest

from tests.support.runs import write_run, write_solid_images


@pytest.fixture
def solid(tmp_path):
    """An array file of 60 images, each of its own color, in three classes."""
    return write_solid_images(tmp_path)


@pytest.fixture
def make(tmp_path, solid):
    """Write a run directory: `make("name", lines=..., snapshots=..., method__k=10)`."""

    def make_run(name="run", **content):
        source = content.pop("data__source", solid)
        return write_run(tmp_path / name, source, **content)

    return make_run
