"""The benchmark of indexes: its rows, and a small one with the real FAISS."""

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.index import Mixture, measure_index


def test_rows_are_a_function_of_their_seed_and_have_unit_length():
    mixture = Mixture(16)
    rows = mixture.rows(500, 3)
    assert torch.equal(rows, Mixture(16).rows(500, 3))
    assert not torch.equal(rows, mixture.rows(500, 4))
    assert torch.allclose(rows.norm(dim=1), torch.ones(500))


def test_wrong_sizes_and_a_folder_that_is_there_are_refused(tmp_path, capsys):
    assert main(["index", "--rows", "1", "--out", str(tmp_path / "x")]) == 2
    assert "got 1 rows of 128 dimensions, need 2 or more" in capsys.readouterr().err
    assert main(["index", "--rows", "9", "--out", str(tmp_path)]) == 2
    assert "is there already; choose another --out" in capsys.readouterr().err
    assert main(["index", "step"]) == 2


@pytest.mark.extras
def test_memory_and_recall_are_measured(tmp_path):
    pytest.importorskip("faiss")
    out = tmp_path / "index"
    report = measure_index(5000, 16, out, memory=4.0, kind="ivf-sq8")
    lines = report.splitlines()
    assert lines[0].startswith("  5,000 x 16, ivf-sq8 (IVF128,SQ8")
    assert "recall@10 of 200 new rows   0.9" in report and "within 8 GB" in lines[-1]
    assert not out.exists()
