"""Workflows and the Dockerfile: what they run and copy exists."""

import fnmatch
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import yaml

import meanshift

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def make_targets():
    return set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def workflow_commands(path):
    """The command lines of a workflow, as lists of words."""
    jobs = yaml.safe_load(path.read_text())["jobs"]
    steps = [step for job in jobs.values() for step in job["steps"]]
    return [
        shlex.split(line)
        for step in steps
        for line in step.get("run", "").splitlines()
        if line.strip()
    ]


def test_the_workflows_are_there():
    assert [path.stem for path in WORKFLOWS] == ["docs", "tests", "wheels"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_call_what_exists(path):
    commands = workflow_commands(path)
    assert commands
    for program, *arguments in commands:
        if program == "make":
            assert set(arguments) <= make_targets()
        else:
            assert (ROOT / program).stat().st_mode & 0o100, program  # as .ci/run


def test_the_tests_run_with_every_python_that_is_declared():
    text = (ROOT / ".github" / "workflows" / "tests.yml").read_text()
    matrix = yaml.safe_load(text)["jobs"]["test"]["strategy"]["matrix"]["python"]
    declared = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert matrix == declared
    assert PROJECT["requires-python"] == f">={declared[0]}"


def dockerfile():
    """The instructions of the Dockerfile as (name, rest)."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [tuple(line.split(maxsplit=1)) for line in lines]


def sent_to_docker(name):
    """Whether .dockerignore leaves a file in the build context; the last rule that fits decides."""
    sent = True
    for rule in (ROOT / ".dockerignore").read_text().splitlines():
        if rule and not rule.startswith("#") and fnmatch.fnmatch(name, rule.lstrip("!")):
            sent = rule.startswith("!")
    return sent


def test_the_dockerfile_copies_what_the_package_is_built_from():
    copied = [name for key, rest in dockerfile() if key == "COPY" for name in rest.split()[:-1]]
    needed = {"pyproject.toml", PROJECT["readme"], *PROJECT["license-files"], "meanshift"}
    assert needed | {"constraints.txt"} == set(copied)
    for name in copied:
        assert (ROOT / name).exists() and sent_to_docker(name), name
    assert not sent_to_docker("runs") and not sent_to_docker(".venv")


def test_the_image_runs_the_program_as_a_user_who_is_not_root():
    instructions = dockerfile()
    last = dict(instructions)
    assert last["ENTRYPOINT"] == f'["{next(iter(PROJECT["scripts"]))}"]'
    assert last["USER"] not in ("root", "0")
    (extras,) = [rest for key, rest in instructions if key == "ARG" and rest.startswith("EXTRAS=")]
    assert extras.partition("=")[2] in PROJECT["optional-dependencies"]
    base = re.fullmatch(r"python:(3\.\d+)-slim", last["FROM"])[1]
    assert f"Programming Language :: Python :: {base}" in PROJECT["classifiers"]


def test_one_version_everywhere():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {str(citation["version"]), PROJECT["version"]} == {meanshift.__version__}


def test_every_dependency_has_a_lower_bound():
    """`make test-lowest` installs it."""
    extras = PROJECT["optional-dependencies"].values()
    for line in [*PROJECT["dependencies"], *(line for extra in extras for line in extra)]:
        assert line.startswith("meanshift[") or re.fullmatch(r"[\w\[\]-]+>=[\d.]+", line), line
