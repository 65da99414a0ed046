"""The cost of the search: its table, the cost study, and the results of a run."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.__main__ import main as run_benchmarks
from meanshift.config.recipes import recipe
from meanshift.methods.memory_bank import MemoryBank
from meanshift.reproduce import jobs
from meanshift.reproduce.cost import PhaseTimer, measure_cost
from meanshift.viz.figures import Options
from meanshift.viz.figures import cost as cost_figure
from meanshift.viz.run_reader import Run
from tests.support.reproductions import (
    make_reproduction,
    read_files,
    read_table,
    reproduce_command,
    run_command,
)

TINY = recipe("sample-resnet10").with_overrides(
    {
        "data.image_size": 16,
        "encoder.width": 0.125,
        "encoder.stem": "small-stride2",
        "train.batch_size": 4,
        "train.device": "cpu",
        "method.bank_size": 2048,
    }
)


@pytest.fixture
def clock(monkeypatch):
    """A phase of a step takes one second, a search one for each 1,024 rows that it reads."""
    searched = []
    search = MemoryBank.search

    def watched(bank, *arguments, **options):
        searched.append(bank.filled if options.get("filled_only") else len(bank.rows))
        return search(bank, *arguments, **options)

    def time(timer, name, work):
        result = work()
        seconds = searched[-1] / 1024 if name == "search" else 1.0
        timer.seconds.setdefault(name, []).append(seconds)
        return result

    monkeypatch.setattr(MemoryBank, "search", watched)
    monkeypatch.setattr(PhaseTimer, "time", time)


@pytest.mark.usefixtures("clock")
def test_the_cost_of_a_run_is_a_result_with_a_figure(tmp_path, capsys):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.json").write_text(TINY.to_json())
    assert run_benchmarks(["cost", str(folder), "--rounds", "1"]) == 0
    output = capsys.readouterr().out
    result = json.loads((folder / "results" / "cost.json").read_text())
    card = result["card"]
    table = card["settings"]["table"]
    dim = card["settings"]["dim"]
    assert [row["bank"] for row in table] == [1024, 2048, 4096, 16384, 65536, 131072]
    for row in table:
        seconds = row["bank"] / 1024
        assert row["fraction"] == pytest.approx(seconds / (seconds + 7)), "a step has seven phases"
        assert row["gflops"] == pytest.approx(2 * row["bank"] * dim * 4 / 1e9)
        assert row["bytes"] == row["bank"] * dim * 4
        assert f"{row['bank']:,}" in output and f"{row['fraction']:.2%}" in output
    assert result["metrics"]["bank 2048, %"] == pytest.approx(100 * table[1]["fraction"])
    assert {"versions", "date", "threads", "device"} <= set(card)
    drawing = cost_figure.draw([Run(folder)], Options())
    widths = np.array([bar.get_width() for bar in drawing.figure.axes[0].patches])
    fractions = np.array([row["fraction"] for row in table])
    assert widths / widths.max() == pytest.approx(fractions / fractions.max())
    bold = [t.get_text() for t in drawing.figure.axes[0].texts if t.get_weight() == "bold"]
    assert "2,048" in bold and "4,096" not in bold


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method.k": 1}, "needs a method with a memory bank"),
        ({"method.name": "byol-asym"}, "needs a method with a memory bank; got byol-asym"),
        ({"method.symmetric": True}, r"without --method\.symmetric"),
    ],
)
def test_a_step_without_a_search_has_no_cost(changes, message):
    with pytest.raises(ValueError, match=message):
        measure_cost(TINY.with_overrides(changes), rounds=1)


@pytest.mark.slow
@pytest.mark.usefixtures("clock")
def test_the_cost_is_measured_once_and_nothing_is_trained(dataset, tmp_path, monkeypatch):
    monkeypatch.setattr(jobs.sys, "executable", "/bin/false")
    out = tmp_path / "out"
    words = reproduce_command("cost", dataset, out)
    output = run_command(words)
    assert not (out / "runs").exists()
    means = read_table(out / "cost.csv")
    assert {title for title, _ in means} == {"179 rows", "128,000 rows"}
    assert all(float(value) > 0 for value in means.values())
    for title, seconds in {"179 rows": 179 / 1024, "128,000 rows": 125.0}.items():
        percent = float(means[title, "search, % of a step"])
        assert percent == pytest.approx(100 * seconds / (seconds + 7), rel=1e-4)
    assert float(means["128,000 rows", "MB"]) == pytest.approx(128_000 * 64 / 1e6, rel=0.01)
    gflops = float(means["128,000 rows", "GFLOPs per image"])
    assert gflops == pytest.approx(2e-9 * 128_000 * 16, rel=0.01)
    before = read_files(out)
    other = make_reproduction("cost", dataset, out, **{"train.batch_size": 32})
    markdown = other.results()[0].markdown()
    assert "Not run yet: 179 rows, 128,000 rows." in markdown, "reading measures nothing"
    assert read_files(out) == before
    assert run_command(words) == output
    assert before[Path("cost-0.json")] == read_files(out)[Path("cost-0.json")]
    run_command([*words, "--train.batch_size", "32"])
    assert before[Path("cost-0.json")] != read_files(out)[Path("cost-0.json")]
