"""The README: its length, its two commands, and the stored values behind the tables of results."""

import csv
import json
import re
from pathlib import Path

import pytest

from meanshift.reproduce.claims import Measurement
from meanshift.reproduce.experiment import Experiment
from meanshift.reproduce.reproduction import Reproduction
from meanshift.reproduce.results import with_paper
from meanshift.reproduce.scales import SCALES

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"


STORED = ROOT / "docs/reproduced"


@pytest.mark.parametrize("file", sorted((STORED / "cpu-resnet18-cifar10").glob("*.csv")))
def test_the_tables_of_resnets_are_those_of_the_stored_values(file):
    text = (ROOT / "docs" / "results-resnet.md").read_text()
    rows = {}
    with file.open() as lines:
        _, *measurements = csv.reader(lines)
    for _, variant, _, _, _, paper, *seeds in measurements:
        values = tuple(float(seed) for seed in seeds if seed)
        cell = with_paper(Measurement(values, float(paper) if paper else None))
        rows.setdefault(variant, [variant]).append(cell)
    assert rows
    for cells in rows.values():
        assert f"| {' | '.join(cells)} |" in text


@pytest.mark.parametrize(
    ("scale", "data", "images", "split"),
    [
        ("cpu", "cifar10.npz", 45_000, "test"),
        ("cpu-paper", "cifar10.npz", 45_000, "test"),
        ("cpu", "fashion-mnist", 54_000, "test"),
        ("small", "photos", 540, "val"),
        ("small", "flowers", 540, "val"),
    ],
)
def test_the_tables_and_verdicts_of_the_results_are_those_of_the_stored_runs(
    scale, data, images, split, tmp_path, monkeypatch
):
    text = (ROOT / "docs" / "results.md").read_text()
    folder = f"{scale}-{data.removesuffix('.npz')}"
    names = re.findall(rf"<!-- reproduce {folder} (\S+) -->", text)
    runs = {
        content["config"]["train"]["seed"]: content["environment"]
        for path in (STORED / folder).glob("*.json")
        if (content := json.loads(path.read_text()))
    }
    assert names
    monkeypatch.setattr(
        Experiment, "fingerprint", lambda _, seed: runs.get(seed, {}).get("source", "")
    )
    experiment = Experiment(
        scale,
        SCALES[scale],
        SCALES[scale].config.with_overrides({"data.source": data}),
        images=images,
        classes=10,
        split=split,
        teacher=SCALES[scale].teacher,
    )
    reproduction = Reproduction(names, experiment, tmp_path, 3, STORED / folder)
    for result in reproduction.results():
        assert result.markdown().strip() in text, f"meanshift reproduce {result.name} renews it"


def test_the_two_commands_are_named_and_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in ("demo", "test"):
        assert f"make {target}" in README.read_text()
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


def test_it_is_short():
    assert len(README.read_text().splitlines()) <= 200
