"""The surface of the command line: help, exit codes, start-up, and the lists that it prints."""

import os
import platform
import re
import subprocess
import sys

import pytest
import torch
import torchvision

from meanshift import __version__, cli
from meanshift.cli import COMMANDS
from meanshift.cli.output import print_error
from meanshift.config import METHODS, settings
from meanshift.config.recipes import RECIPES
from meanshift.runtime.errors import SharedError
from tests.support.commands import run_program
from tests.support.packages import hide_packages

WAITING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(call, command):
    code, out, err = call(command, "--help")
    assert (code, err) == (0, "")
    assert out.startswith(f"usage: meanshift {command}")


def test_every_command_is_a_module_of_its_name():
    for name, module in COMMANDS.items():
        assert module.__name__ == f"meanshift.cli.{name}"
        assert module.__doc__.startswith(f"`meanshift {name}`")


@pytest.mark.parametrize("arguments", [["--help"], []])
def test_the_program_lists_its_commands(call, arguments):
    code, out, _ = call(*arguments)
    assert code == 0
    assert all(re.search(rf"^ +{command}\s", out, re.MULTILINE) for command in COMMANDS)


def test_versions_and_device(call):
    code, out, _ = call("--version")
    assert code == 0
    assert out.splitlines() == [
        f"meanshift {__version__}",
        f"Python {platform.python_version()}",
        f"torch {torch.__version__}",
        f"torchvision {torchvision.__version__}",
        "device: cpu (no CUDA device)"
        if not torch.cuda.is_available()
        else f"device: cuda ({torch.cuda.get_device_name()})",
    ]


@pytest.mark.parametrize("arguments", [[], ["pretrain", "small"], ["reproduce"]])
def test_help_is_instant(arguments):
    """In processor time, which other tests on the same cores do not change."""
    seconds = []
    for _ in range(3):
        before = os.times()
        assert run_program(*arguments, "--help", stdout=subprocess.DEVNULL).returncode == 0
        after = os.times()
        seconds.append(sum(after[2:4]) - sum(before[2:4]))
    assert min(seconds) < 0.5


@pytest.mark.parametrize("command", COMMANDS)
def test_help_imports_no_heavy_library(command):
    code = (
        "import sys\n"
        "from meanshift.cli import main\n"
        "try:\n"
        f"    main([{command!r}, '--help'])\n"
        "except SystemExit:\n"
        "    pass\n"
        "heavy = {'torch', 'torchvision', 'numpy', 'PIL', 'matplotlib', 'sklearn', 'jaxtyping'}\n"
        "sys.exit(', '.join(heavy & set(sys.modules)) or 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("pretrain small --out x --method.k", "argument --method.k: expected one argument"),
        ("pretrain small", "the following arguments are required: --out"),
        ("pretrain small --out x --zzzzzz", "unknown option --zzzzzz"),
        ("pretrain --dat photos small --out x", "unknown option --dat; did you mean --data?"),
        ("explore run -port 80", "unknown option -port; did you mean --port?"),
        ("evaluate knn run --seed=1 --imagesize=9", "unknown option --imagesize; did you mean "),
        ("evaluate knn run --train.epochs 3", "unknown option --train.epochs; did you mean "),
        ("recipes small", "unrecognized arguments: small"),
        ("pretain", "unknown command pretain; did you mean pretrain?"),
        ("--versio", "unknown option --versio; did you mean --version?"),
    ],
)
def test_a_wrong_command_line_is_an_error_and_a_usage_of_one_line(call, arguments, message):
    code, out, err = call(*arguments.split())
    assert (code, out) == (2, "")
    error, usage = err.splitlines()
    assert error.startswith(f"meanshift: {message}")
    assert usage.startswith("usage: meanshift ") and usage.endswith("--help")


def test_dashes_and_underscores_are_alike_in_options():
    words = ["evaluate", "knn", "my_run", "--image_size", "48", "--batch-size=4", "--cached"]
    args = cli.parse_arguments(words)
    assert (args.image_size, args.batch_size, args.cached) == (48, 4, True)
    assert args.words == ["knn", "my_run"]


def test_the_process_exits_with_two_and_without_a_traceback(tmp_path):
    done = run_program("pretrain", "smal", "--out", str(tmp_path / "run"))
    assert done.returncode == 2
    assert done.stderr.startswith("meanshift: ") and "Traceback" not in done.stderr


def test_a_pipe_closed_by_its_reader_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        done = run_program("recipes", stdout=pipe)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("rank", "error", "printed"),
    [
        (0, SharedError("wrong"), "meanshift: wrong\n"),
        (1, SharedError("wrong"), ""),
        (0, ValueError("wrong"), "meanshift: wrong\n"),
        (1, ValueError("wrong"), "meanshift: process 1: wrong\n"),
    ],
)
def test_an_error_of_all_processes_is_printed_once(monkeypatch, capsys, rank, error, printed):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", str(rank))
    print_error(error)
    assert capsys.readouterr().err == printed


@pytest.mark.parametrize("command", ["report", "export", "reproduce", "demo"])
def test_most_commands_refuse_several_processes(call, monkeypatch, tmp_path, command):
    arguments = {
        "report": ["report", "run"],
        "export": ["export", "run", "--out", "x.pt"],
        "reproduce": ["reproduce", "k"],
        "demo": ["demo", "--out", tmp_path / "demo"],
    }[command]
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, _, err = call(*arguments)
    assert code == 2 and "leave torchrun out" in err
    assert not (tmp_path / "demo").exists()


def test_a_missing_package_is_reported_before_the_work(call, monkeypatch, tmp_path):
    hide_packages(monkeypatch, "jinja2")
    code, _, err = call("reproduce", "cost", "--scale", "smoke", "--out", tmp_path / "out")
    assert code == 2 and "pip install 'meanshift[report]'" in err
    assert not (tmp_path / "out").exists()


# Lists


def test_recipes_have_a_cost_and_a_result(call):
    code, out, _ = call("recipes")
    assert code == 0
    parts = re.split(r"^(?=\S)", out, flags=re.MULTILINE)[1:]
    assert [part.split()[0] for part in parts] == list(RECIPES)
    for part in parts:
        for name in ("command: meanshift ", "hardware: ", "time: ", "result: "):
            assert re.search(rf"^ +{name}\S", part, re.MULTILINE), (name, part)


def test_no_recipe_has_a_blank_to_be_filled_in(call):
    _, out, _ = call("recipes")
    assert re.findall(r"\b[A-Z]+_[A-Z]+\b|TODO|\?\?", out) == []


def test_methods_are_listed_with_cost_needs_loss_and_paper(call):
    code, out, _ = call("methods")
    assert code == 0
    parts = re.split(r"^(?=\S)", out, flags=re.MULTILINE)[1:]
    by_name = {part.split()[0]: " ".join(part.split()) for part in parts}
    for name, method in METHODS.items():
        assert re.match(rf"{name} [\d.]+ ", by_name[name]), by_name[name]
        assert method.loss and method.loss in by_name[name]
        assert all(need in by_name[name] for need in method.needs)
        assert re.search(r"\d{4}, https://\S+", by_name[name])
        assert len(out.splitlines()[0]) < 100


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_described_with_its_paper_cost_and_settings(call, name):
    code, out, _ = call("methods", name)
    words = " ".join(out.split())
    assert code == 0 and re.search(r"paper: .*https://\S+", words)
    assert re.search(r"cost: \d+ forward", words)
    for path, _, default, text in settings(METHODS[name]):
        if path.startswith("method.") and path not in ("method.name", "method.module"):
            assert " ".join(f"--{path} {default} {text}".split()) in words


def test_an_unknown_method_is_not_described(call):
    code, _, err = call("methods", "swaf")
    assert code == 2 and "did you mean swav" in err


# Threads that wait


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, {"GOMP_SPINCOUNT": "30000"}),
        ({"GOMP_SPINCOUNT": "7"}, {"GOMP_SPINCOUNT": "7"}),
        ({"OMP_WAIT_POLICY": "active"}, {"OMP_WAIT_POLICY": "active"}),
        ({"OMP_WAIT_POLICY": "", "GOMP_SPINCOUNT": "7"}, None),
    ],
)
def test_waiting_threads_sleep_sooner_unless_the_environment_says_otherwise(
    environment, expected, monkeypatch
):
    others = {name: value for name, value in os.environ.items() if name not in WAITING}
    monkeypatch.setattr(os, "environ", others | environment)
    cli._set_environment()
    found = {name: os.environ[name] for name in WAITING if name in os.environ}
    assert found == (environment if expected is None else expected)


def test_the_environment_is_set_before_torch_is_imported(tmp_path):
    """OpenMP reads it once, also where the method of a user's file imports torch."""
    method = tmp_path / "mine.py"
    method.write_text(
        "import os, torch\n"
        "from meanshift.methods import Method\n"
        f"open({str(tmp_path / 'seen')!r}, 'w').write(os.environ['GOMP_SPINCOUNT'])\n"
        "class Mine(Method):\n"
        "    pass\n"
    )
    others = {name: value for name, value in os.environ.items() if name not in WAITING}
    done = run_program("pretrain", "small", "--method.module", f"{method}:Mine", env=others)
    assert done.returncode == 2 and "Settings" in done.stderr
    assert (tmp_path / "seen").read_text() == "30000"
