"""The README runs: its commands and its Python, in its order. All documents: commands parse."""

import csv
import re
import shlex
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from benchmarks import TABLES
from meanshift.cli import COMMANDS, main, parse_arguments
from meanshift.cli.settings import configure
from meanshift.reproduce.claims import Measurement
from meanshift.reproduce.results import StudyResult
from meanshift.reproduce.studies import STUDIES
from tests.support.layouts import write_copy
from tests.support.voc import write_voc

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TINY = (  # in float32: bfloat16 on the CPU is unsafe for so small images (docs/experiments.md)
    "--data.image_size 16 --data.workers 0 --encoder.width 0.125 --train.batch_size 8 "
    "--method.bank_size 64 --train.epochs 3 --train.device cpu --train.precision float32"
).split()
FEW = "--iterations 2 --size 64 --batch-size 2 --rois 8".split()


def typed_commands(text):
    """The commands of a page: indented lines and blocks without a language.

    Lines that end in a backslash are joined.
    """
    text = re.sub(r"^```\w+\n.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    blocks = re.findall(r"^```\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    indented = re.findall(r"^    (\w.*\n)", text.replace("\\\n", " "), re.MULTILINE)
    lines = "".join([*indented, *blocks]).replace("\\\n", " ").splitlines()
    programs = ("meanshift", "torchrun", "make", "pip", "python", "git")
    return [shlex.split(line, comments=True) for line in lines if line.split()[0] in programs]


def quoted_commands(text):
    """Commands between backticks."""
    return [shlex.split(line) for line in re.findall(r"`((?:meanshift|python -m) [^`\n]+)`", text)]


def is_complete(words):
    """Whether a command can be typed as it stands: a synopsis has brackets, dots or a NAME."""
    return not any("[" in word or word.endswith(("...", "|")) or word == "NAME" for word in words)


def run_explorer(words):
    """Start the live page, load it, and stop it."""
    command = [sys.executable, "-m", "meanshift", *words, "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        address = re.search(r"http://\S+", server.stdout.readline())
        with urllib.request.urlopen(address[0], timeout=30) as page:
            assert b"<html" in page.read()
        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=30) == 0


@pytest.mark.slow
def test_every_command_and_every_block_of_python_runs(tmp_path, monkeypatch, make_images, capsys):
    make_images(tmp_path / "PHOTOS", {"cats": 60, "dogs": 60}, size=(20, 24))
    for name in ("cifar10", "flowers102"):
        write_copy(name, tmp_path / "DATASETS", monkeypatch)
    write_voc(tmp_path / "VOCDEVKIT")
    monkeypatch.chdir(tmp_path)
    text = README.read_text()
    commands = [c for c in typed_commands(text) if c[0] in ("meanshift", "torchrun")]
    assert len(commands) >= 15
    for program, *typed in commands:
        words = [word.replace(":IMAGENET1K_V1", ":random") for word in typed]  # no download
        if words == ["demo"]:  # takes minutes; tests/cli runs a short one
            continue
        if program == "torchrun":
            launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", *words, *TINY]
            done = subprocess.run(launch, capture_output=True, text=True, check=False)
            assert done.returncode == 0 and "finished" in done.stdout, done.stderr
            continue
        if words[0] == "explore":
            run_explorer(words)
            continue
        smaller = TINY if words[0] == "pretrain" else FEW if "detect" in words else []
        if "--method.name" in words:  # what is typed for msf belongs to msf
            pairs = zip(smaller[::2], smaller[1::2], strict=True)
            smaller = [word for pair in pairs if "--method." not in pair[0] for word in pair]
        assert main([*words, *smaller]) == 0, capsys.readouterr().err
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 2
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})


def parse(words, capsys):
    """Parse a command of `meanshift`, and its settings."""
    try:
        args = parse_arguments(words)
    except SystemExit:
        pytest.fail(f"meanshift {shlex.join(words)}: {capsys.readouterr().err}")
    if args.command in ("pretrain", "demo"):
        configure(args)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_of_the_documents_parses(page, tmp_path, monkeypatch, capsys):
    text = page.read_text()
    examples = dict(re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```", text, re.M | re.S))
    for name, code in examples.items():  # --method.module reads the file
        (tmp_path / name).write_text(code)
    monkeypatch.chdir(tmp_path)
    for program, *words in filter(is_complete, [*typed_commands(text), *quoted_commands(text)]):
        if program == "torchrun":
            words = words[words.index("meanshift") + 1 :]
        if program in ("meanshift", "torchrun") and words[0] in COMMANDS and len(words) > 1:
            parse(words, capsys)
        elif program == "meanshift":
            assert words[0] in COMMANDS, words
        elif program == "make":
            assert re.search(rf"^{words[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_benchmark_of_the_documents_exists(page):
    names = {*TABLES, "scale", "step", "cost", "transfer"}
    for words in re.findall(r"python -m benchmarks ([a-z ]*[a-z])", page.read_text()):
        assert set(words.split()) <= names, words


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = page.read_text()
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.exists(), target
        if anchor:
            assert anchor in anchors(linked.read_text()), target
    for path in re.findall(r"`((?:tests|tools|benchmarks|meanshift)/[\w/]+\.py)`", text):
        assert (ROOT / path).exists(), path


def anchors(text):
    """The anchors of a page's headings, as GitHub forms them."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_setting_of_the_documents_exists():
    from meanshift.config import METHODS, settings

    known = {name for method in METHODS.values() for name, *_ in settings(method)}
    groups = {name.partition(".")[0] for name in known}
    for page in PAGES:
        flags = re.findall(r"--([a-z]+\.[a-z_]+)", page.read_text())
        unknown = {flag for flag in flags if flag.partition(".")[0] in groups} - known
        assert unknown <= {"method.uniformity"}, page  # that of the example in architecture.md


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
