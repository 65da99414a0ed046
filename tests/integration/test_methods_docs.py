"""docs/methods.md: every method with the cost that the program computes."""

import re
from pathlib import Path

import pytest

from meanshift.config import METHODS

PAGE = (Path(__file__).parents[2] / "docs" / "methods.md").read_text()


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_listed_as_it_is(name):
    method = METHODS[name]
    (row,) = re.findall(rf"^\| \[`{name}`\].*$", PAGE, re.MULTILINE)
    link, paper, loss, needs, cost, *_ = [cell.strip() for cell in row.strip("|").split("|")]
    assert (loss, needs) == (method.loss, ", ".join(method.needs) or "-")
    assert float(cost) == pytest.approx(method().relative_cost, abs=0.06)
    assert re.search(r"https://arxiv\.org/abs/\S+(?=\))", paper)[0] in method.__doc__
    file = Path(__file__).parents[2] / "docs" / re.search(r"\((.*)\)", link)[1]
    assert file.resolve().is_file()
