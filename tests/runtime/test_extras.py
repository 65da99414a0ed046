"""Optional packages: what a user reads who has not installed one."""

import re

import pytest

from meanshift.runtime.extras import require
from tests.support.packages import hide_packages


def test_a_package_that_is_installed_is_accepted():
    require("json", extra="report", what="figures")


def test_a_missing_package_is_an_error_of_one_line_that_names_the_extra(monkeypatch):
    hide_packages(monkeypatch, "matplotlib", "sklearn")
    message = "figures need matplotlib; type: pip install 'meanshift[report]'"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        require("matplotlib", extra="report", what="figures")
    with pytest.raises(ValueError, match=r"^maps need scikit-learn; "):
        require("sklearn.manifold", extra="report", what="maps")


def test_a_package_that_lacks_a_package_itself_keeps_its_error(tmp_path, monkeypatch):
    (tmp_path / "broken_package.py").write_text("import no_such_module_here\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="no_such_module_here"):
        require("broken_package", extra="report", what="figures")
