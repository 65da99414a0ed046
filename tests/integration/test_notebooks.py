"""The notebooks run, and their stored outputs are those of a run of the same code."""

import json
import re

import pytest

from tests.support.pages import ROOT
from tools.run_notebooks import clean_outputs, run_notebook

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
notebooks = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def images(cells):
    """The number of images among the outputs."""
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    return sum(
        1 for output in outputs if {"image/png", "image/jpeg"} & output.get("data", {}).keys()
    )


@notebooks
def test_the_stored_outputs_are_whole_and_small(path):
    assert path.stat().st_size < 1_000_000
    cells = json.loads(path.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert images(code) >= 3
    outputs = [output for cell in code for output in cell["outputs"]]
    assert all(output["output_type"] != "error" for output in outputs)
    texts = "".join("".join(output.get("text", "")) for output in outputs)
    assert not re.search(r"(/home|/root|/tmp|/usr|\.venv)/|img/s", texts)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:zmq", "ignore::RuntimeWarning:zmq")
@notebooks
def test_it_runs(path, tmp_path, monkeypatch):
    monkeypatch.setenv("EPOCHS", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = run_notebook(path, tmp_path)
    assert images(notebook.cells) == images(json.loads(path.read_text())["cells"])


def test_outputs_are_stored_as_they_end_on_a_screen():
    nbformat = pytest.importorskip("nbformat")
    stream = nbformat.v4.new_output
    outputs = [
        stream("stream", name="stderr", text="a:   0%|   | 0/4 [?img/s]\ra: 100%|##| 4/4 [9img/s]"),
        stream("stream", name="stdout", text="one\r\n"),  # of a terminal
        stream("stream", name="stderr", text="\nepoch 1/2 step 3/4 loss 1 |##| 5img/s\n1-NN 50\n"),
        stream("stream", name="stdout", text="two"),
    ]
    cleaned = clean_outputs(outputs)
    assert [(each.name, each.text) for each in cleaned] == [
        ("stderr", "1-NN 50"),
        ("stdout", "one\ntwo"),
    ]
