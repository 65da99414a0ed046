"""The README: its length, its two commands, and the stored values behind the tables of results."""

import csv
import re
from pathlib import Path

import pytest

from meanshift.reproduce.claims import Measurement
from meanshift.reproduce.results import StudyResult
from meanshift.reproduce.studies import STUDIES

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"


@pytest.mark.parametrize("name", [file.stem for file in (ROOT / "docs/reproduced").glob("*.csv")])
def test_the_tables_and_verdicts_of_the_results_are_those_of_the_stored_values(name):
    study = STUDIES[name]((256, 2_048, 16_384, 45_000))
    table = {variant.title: {} for variant in study.variants}
    papers = {variant.title: variant.paper for variant in study.variants}
    with (ROOT / "docs/reproduced" / f"{name}.csv").open() as file:
        header, *rows = csv.reader(file)
    for _, variant, metric, _, _, paper, *seeds in rows:
        assert (float(paper) if paper else None) == papers[variant].get(metric)
        values = tuple(float(seed) for seed in seeds if seed)
        table[variant][metric] = Measurement(values, papers[variant].get(metric))
    result = StudyResult(name, study, table, {})
    assert result.csv().splitlines()[0] == ",".join(header)
    assert all(len(row) == len(header) and row[0] == name for row in rows)
    text = (ROOT / "docs" / "results.md").read_text()
    for line in result.markdown().splitlines():
        shown = line.removesuffix(" |") if line.startswith("|") else line  # a column may follow
        assert line.startswith("| ---") or shown in text, line


def test_the_two_commands_are_named_and_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in ("demo", "test"):
        assert f"make {target}" in README.read_text()
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


def test_it_is_short():
    assert len(README.read_text().splitlines()) <= 200
