"""The pages are true: commands parse, those of the guides run, Python runs, links lead somewhere.

A block that cannot run says why, in a comment before it: `<!-- not run: needs two machines -->`.
"""

import importlib.util
import re
import shlex
import signal
import subprocess
import sys
import tomllib
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from benchmarks.__main__ import _check, _parser
from meanshift import api
from meanshift.cli import COMMANDS, main, parse_arguments
from meanshift.cli.settings import configure
from meanshift.config import METHODS, recipes, settings
from tests.support.layouts import write_copy
from tests.support.pages import PAGES, ROOT, TASKS, blocks, is_complete, quoted_commands
from tests.support.voc import write_voc

TINY = {  # in float32: bfloat16 on the CPU is unsafe for so small images (docs/experiments.md)
    "data.image_size": 16,
    "data.workers": 0,
    "encoder.width": 0.125,
    "train.batch_size": 8,
    "method.bank_size": 64,
    "train.epochs": 2,
    "train.device": "cpu",
    "train.precision": "float32",
}
FEW = "--iterations 2 --size 64 --batch-size 2 --rois 8".split()
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]
every_page = pytest.mark.parametrize("page", PAGES, ids=NAMES)


# commands


def has_examples(page):
    """Whether a page has something that runs."""
    found = [block for block in blocks(page) if not block.not_run]
    return any(b.language == "python" or (page in TASKS and b.commands()) for b in found)


def parse(words, capsys):
    """Parse a command of `meanshift`, and its settings."""
    try:
        args = parse_arguments(words)
    except SystemExit as left:
        if left.code == 0:  # --help
            return
        pytest.fail(f"meanshift {shlex.join(words)}: {capsys.readouterr().err}")
    if args.command in ("pretrain", "demo"):
        configure(args)


def check_command(words, capsys):
    """Fail if a command could not be typed."""
    if words[0] == "torchrun" or words[:3] == ["python", "-m", "meanshift"]:
        words = words[words.index("meanshift") :]
    program, *rest = words
    if program == "meanshift" and len(rest) > 1:
        parse(rest, capsys)
    elif program == "meanshift" and rest:
        assert rest[0] in COMMANDS or rest[0].startswith("-"), words
    elif words[:3] == ["python", "-m", "benchmarks"]:
        check_benchmark(words[3:])
    elif program == "python" and rest[0].endswith(".py"):
        assert (ROOT / rest[0]).exists(), words
    elif program == "make":
        assert re.search(rf"^{rest[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), words
    elif words[:2] == ["pip", "install"]:
        check_extras(" ".join(rest))


def check_benchmark(words):
    """Fail if a benchmark or one of its options does not exist; its files need not be there."""
    args = _parser().parse_args(words)
    args.features = None
    _check(args)


def check_extras(text):
    """Fail if an extra that is installed does not exist."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for names in re.findall(r"(?:\.|meanshift)\[([\w,]+)\]", text):
        assert set(names.split(",")) <= set(project["optional-dependencies"]), text


@every_page
def test_every_command_parses(page, tmp_path, monkeypatch, capsys):
    found = blocks(page)
    write_modules(found, tmp_path)
    (tmp_path / "runs/photos").mkdir(parents=True)
    config = recipes.recipe("small").with_overrides({"data.source": "PHOTOS"})
    (tmp_path / "runs/photos/config.json").write_text(config.to_json())
    monkeypatch.chdir(tmp_path)
    typed = [words for block in found for words in block.commands()]
    for words in filter(is_complete, [*typed, *quoted_commands(page.read_text())]):
        check_command(words, capsys)


def test_a_wrong_command_is_found(capsys):
    for wrong in (
        "meanshift pretrian small --data PHOTOS",
        "meanshift pretrain small --data PHOTOS --out RUN --method.kk 3",
        "meanshift pretrain unknown --data PHOTOS --out RUN",
        "torchrun --nproc-per-node 2 -m meanshift pretrain small --data X --out Y --train.epoch 3",
        "python -m benchmarks unknown",
        "python tools/unknown.py",
        "make unknown",
        "pip install '.[unknown]'",
    ):
        (words,) = blocks(ROOT / "page.md", f"```\n{wrong}\n```\n")[0].commands()
        with pytest.raises((AssertionError, ValueError, SystemExit, pytest.fail.Exception)):
            check_command(words, capsys)


def test_blocks_and_commands_are_found_as_they_are_shown():
    text = (
        "# Page\n\n    $ A=1 meanshift demo && make test  # both\n    output\n\n"
        "- an item\n\n    more of it\n\nText.\n\n<!-- not run: needs two machines -->\n"
        "```bash\nmeanshift embed RUN \\\n    PHOTOS --out x.npz | tee log\n```\n\n"
        "<!-- needs: timm -->\n\n```python\nprint(1)\n```\n"
    )
    first, second, third = blocks(ROOT / "page.md", text)
    assert first.commands() == [["meanshift", "demo"], ["make", "test"]]
    assert second.commands() == [["meanshift", "embed", "RUN", "PHOTOS", "--out", "x.npz"]]
    assert second.not_run == "needs two machines" and second.place == "page.md:13"
    assert (third.language, third.text, third.needs) == ("python", "print(1)\n", "timm")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- not run -->\n```\nmake demo\n```\n", "need <!-- not run: why -->"),
        ("<!-- not run:  -->\n    make demo\n", "need <!-- not run: why -->"),
        ("<!-- not run: no GPU -->\nText.\n", "no block"),
        ("```python\nx = 1\n", "does not end"),
    ],
)
def test_a_block_that_is_not_run_says_why(text, message):
    with pytest.raises(ValueError, match=message):
        blocks(ROOT / "page.md", text)


# examples


def write_modules(found, folder):
    """Write the Python blocks that begin with the name of a file, as `# mine.py`."""
    for block in found:
        if name := re.match(r"# (\w+\.py)\n", block.text):
            (folder / name[1]).write_text(block.text)


@pytest.fixture
def sources(tmp_path, monkeypatch, make_images):
    """A folder with the files that examples name."""
    make_images(tmp_path / "PHOTOS", {"cats": 60, "dogs": 60}, size=(20, 24))
    rng = np.random.default_rng(0)
    for number in range(48):  # 16 bits; three slices of a patient
        file = tmp_path / "SCANS" / ("ab"[number % 2]) / f"patient{number // 6}" / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 4096, (20, 24)).astype(np.uint16)).save(file)
    (tmp_path / "CT").mkdir()
    for number in range(6):  # volumes of CT numbers
        volume = rng.integers(-1000, 1000, (8, 20, 24)).astype(np.int16)
        np.save(tmp_path / "CT" / f"{number}.npy", volume)
    for name in "ab":
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(6):
            pixels = rng.integers(0, 256, (20, 24, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{number}.png")
    Image.fromarray(pixels).save(tmp_path / "a.jpg")
    for name in ("cifar10", "flowers102"):
        write_copy(name, tmp_path / "DATASETS", monkeypatch)
    write_voc(tmp_path / "VOCDEVKIT")
    monkeypatch.chdir(tmp_path)


def smaller(words):
    """Flags that make a command quick; those of other networks and methods stay as they are."""
    if "detect" in words:
        return FEW
    if words[0] not in ("pretrain", "demo"):
        return []
    flags = dict(TINY)
    if "--train.epochs" in words:
        flags["train.epochs"] = 3  # a run that is trained longer
    if "--encoder.weights" in words:
        flags["data.image_size"] = 32
        del flags["encoder.width"]
    if "--method.name" in words:
        del flags["method.bank_size"]
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


def run_python(block, values, monkeypatch):
    """Run a block of Python; recipes for images are tiny in it."""
    whole = recipes.recipe

    def tiny_recipe(name):
        return whole(name).with_overrides(TINY) if name in ("small", "demo") else whole(name)

    with monkeypatch.context() as patched:
        for module, name in ((api, "find_recipe"), (recipes, "recipe")):
            patched.setattr(module, name, tiny_recipe)
        exec(compile(block.text, block.place, "exec"), values)


def run_explorer(words):
    """Start the live page, load it, and stop it."""
    command = [sys.executable, "-m", "meanshift", *words, "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        address = re.search(r"http://\S+", server.stdout.readline())
        with urllib.request.urlopen(address[0], timeout=30) as page:
            assert b"<html" in page.read()
        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=30) == 0


def run_command(words, capsys):
    """Run a command as it is typed, with small settings and without a download."""
    program, *words = [word.replace(":IMAGENET1K_V1", ":random") for word in words]
    if program == "torchrun":
        words = [*words, *smaller(words[words.index("meanshift") + 1 :])]
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", *words]
        done = subprocess.run(launch, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    elif program == "meanshift" and words[0] == "explore":
        run_explorer(words)
    elif program == "meanshift" and words != ["demo"]:  # takes minutes; tests/cli runs a short one
        assert main([*words, *smaller(words)]) == 0, (words, capsys.readouterr().err)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::meanshift.runtime.errors.Note")
@pytest.mark.usefixtures("sources")
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if has_examples(page)],
    ids=[page.relative_to(ROOT).as_posix() for page in PAGES if has_examples(page)],
)
def test_the_examples_run(page, monkeypatch, capsys):
    values = {}
    found = blocks(page)
    write_modules(found, Path())
    if page.parent.name == "guides" and page.stem == "labels-by-clicks":  # a run to label
        run_command(shlex.split("meanshift pretrain small --data PHOTOS --out runs/photos"), capsys)
    for block in found:
        missing = block.needs and importlib.util.find_spec(block.needs) is None
        if block.not_run or missing:
            continue
        if block.language == "python":
            run_python(block, values, monkeypatch)
        elif page in TASKS:
            for words in block.commands():
                run_command(words, capsys)


# links and names


@every_page
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


@every_page
def test_every_benchmark_exists(page):
    for words in re.findall(r"python -m benchmarks ([a-z ]*[a-z])", page.read_text()):
        check_benchmark(words.split())


def test_every_setting_exists():
    known = {name for method in METHODS.values() for name, *_ in settings(method)}
    groups = {name.partition(".")[0] for name in known}
    for page in PAGES:
        flags = re.findall(r"--([a-z]+\.[a-z_]+)", page.read_text())
        unknown = {flag for flag in flags if flag.partition(".")[0] in groups} - known
        assert unknown <= {"method.uniformity"}, page  # that of the example in architecture.md
