"""One run for all tests of a file that do not change it."""

import pytest

from meanshift.viz.explorer.model import Explorer
from meanshift.viz.run_reader import Run
from tests.support.explorer import log, serving_explorer, write_arrays, write_live_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tmp_path_factory.mktemp("explorer")
    folder = write_live_run(root / "run", write_arrays(root / "images.npz"))
    for step in (10, 20):
        log(folder, step, loss=1 / step, images_per_second=100.0)
    return folder


@pytest.fixture(scope="module")
def explorer(run):
    return Explorer(Run(run))


@pytest.fixture(scope="module")
def port(explorer):
    with serving_explorer(explorer) as number:
        yield number
