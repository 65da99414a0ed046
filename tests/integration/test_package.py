"""The wheel and the source distribution: what they contain, and that they work on their own."""

import email
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import meanshift

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
BUILT_FROM = ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in")
NOT_DISTRIBUTED = {".gitignore", ".dockerignore"}
PROGRAM = """
import sys
from importlib.metadata import distribution
(script,) = distribution("meanshift").entry_points.select(group="console_scripts")
sys.argv[0] = script.name
sys.exit(script.load()())
"""
TINY = (
    "--train.epochs 1 --train.batch_size 500 --data.image_size 16 --encoder.width 0.125 "
    "--method.bank_size 512 --train.device cpu --train.precision float32 --data.workers 0"
).split()


def build(kind, source, out):
    """Build a distribution from a folder, with the setuptools of this environment."""
    command = [sys.executable, "-m", "build", f"--{kind}", "--no-isolation", "--outdir", out]
    done = subprocess.run([*command, source], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = out.iterdir()
    return file


def package_files(folder):
    """Every file of the package but bytecode, relative to the folder that contains it."""
    files = (folder / "meanshift").rglob("*")
    return {
        path.relative_to(folder).as_posix()
        for path in files
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel, built from a copy: building writes into the folder."""
    copy = tmp_path_factory.mktemp("source")
    for name in BUILT_FROM:
        shutil.copy(ROOT / name, copy)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "meanshift", copy / "meanshift", ignore=ignored)
    return build("wheel", copy, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A folder with the unpacked wheel, which is what pip's --target makes of it."""
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture
def run(installed, tmp_path):
    """Run the installed program in an empty folder, where the repository cannot be imported."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment = kept | {"PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"}

    def start(*arguments, code=PROGRAM):
        done = subprocess.run(
            [sys.executable, "-P", "-c", code, *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return start


def test_the_wheel_contains_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == package_files(ROOT)
    assert {"meanshift/py.typed", "meanshift/viz/assets/report.html"} < names
    assert wheel.stat().st_size < 15e6


def test_the_metadata(installed):
    (folder,) = installed.glob("meanshift-*.dist-info")
    metadata = email.message_from_string((folder / "METADATA").read_text())
    assert metadata["Version"] == meanshift.__version__
    assert metadata["License-Expression"] == "MIT"
    assert (folder / "licenses" / "LICENSE").exists()
    assert metadata["Keywords"].startswith("self-supervised learning,")
    assert not any("License ::" in text for text in metadata.get_all("Classifier"))
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload().startswith("# meanshift")


def test_the_installed_program_is_the_one_that_runs(run, installed):
    location = run(code="import meanshift; print(meanshift.__file__)")
    assert Path(location.strip()).is_relative_to(installed)


def test_installed_commands_that_describe(run):
    assert run("--version").startswith(f"meanshift {meanshift.__version__}\nPython 3.")
    assert "pretrain" in run("--help")
    assert "cifar10-cpu" in run("recipes")
    assert "complete -o default" in run("completion", "bash")


def test_installed_weights_are_evaluated_on_installed_images(run, tmp_path):
    run("evaluate", "knn", "meanshift:cifar10-small", "--data", "sample", "--out", "results")
    (card,) = (tmp_path / "results").rglob("knn*.json")
    assert json.loads(card.read_text())["metrics"]["20-NN"] > 60


def test_an_installed_program_trains_and_reports(run, tmp_path):
    assert "finished: runs/tiny" in run(
        "pretrain", "demo", "--data", "sample", "--out", "runs/tiny", *TINY
    )
    run("report", "runs/tiny")
    assert "</html>" in (tmp_path / "runs" / "tiny" / "report.html").read_text()


def repository_files():
    """The files of the repository, also those that are not committed yet."""
    listed = ["git", "-C", ROOT, "ls-files", "--cached", "--others", "--exclude-standard"]
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("no git repository here")
    names = subprocess.run(listed, capture_output=True, text=True, check=True).stdout.splitlines()
    return [name for name in names if (ROOT / name).exists()]


def test_the_source_distribution_builds_the_same_wheel(wheel, tmp_path):
    copy = tmp_path / "copy"
    for name in (names := repository_files()):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    sdist = build("sdist", copy, tmp_path / "dist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (source,) = (tmp_path / "unpacked").iterdir()
    contained = {path.relative_to(source).as_posix() for path in source.rglob("*")}
    assert set(names) - contained <= NOT_DISTRIBUTED  # the tests and what they read are there
    added = {name for name in contained - set(names) if (source / name).is_file()}
    assert all(re.match(r"PKG-INFO|setup.cfg|meanshift.egg-info/", name) for name in added), added
    assert sdist.stat().st_size < 20e6
    with (
        zipfile.ZipFile(wheel) as direct,
        zipfile.ZipFile(build("wheel", source, tmp_path / "wheel")) as indirect,
    ):
        assert set(indirect.namelist()) == set(direct.namelist())
