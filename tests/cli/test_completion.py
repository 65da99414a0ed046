"""Completion by Tab: the candidates, and the script in a real bash."""

import shlex
import shutil
import subprocess
import sys

import pytest

from meanshift.cli import COMMANDS, build_parsers, completion
from meanshift.config import METHODS
from meanshift.config.recipes import RECIPES
from meanshift.evaluation import PROTOCOLS


@pytest.fixture
def complete(call):
    """The candidates for a line whose last word is being typed."""

    def run(line, shell="bash"):
        code, out, err = call("completion", shell, "--", *line.split(" "))
        assert (code, err) == (0, "")
        return out.splitlines()

    return run


SMALL = [name for name in RECIPES if name.startswith("sm")]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", list(COMMANDS)),
        ("pre", ["pretrain", "predict"]),
        ("--", ["--help", "--version"]),
        ("pretrain ", list(RECIPES)),
        ("pretrain sm", SMALL),
        ("doctor PHOTOS sm", SMALL),
        ("doctor ", []),  # a source: the shell completes a path
        ("pretrain small --data ", []),
        ("pretrain small ", []),
        ("pretrain --data PHOTOS sm", SMALL),
        ("pretrain small --ou", ["--out"]),
        ("recipes --", ["--help"]),
        ("pretrain small --method.name sw", ["swav"]),
        ("pretrain small --method.name = sw", ["swav"]),  # as bash divides --method.name=sw
        ("pretrain small --method.name swav --method.protot", ["--method.prototypes"]),
        ("pretrain small --method.name = swav --method.protot", ["--method.prototypes"]),
        ("pretrain small --method.protot", []),  # msf has none
        ("pretrain small --method.symmetric ", ["true", "false"]),
        ("pretrain nothing --train.epo", ["--train.epochs"]),
        ("pretrain small --train.epohcs 3 --train.epo", ["--train.epochs"]),
        ("evaluate ", list(PROTOCOLS)),
        ("evaluate knn lin", ["linear"]),
        ("evaluate knn k", []),  # was named already
        ("evaluate knn meanshift : cifar10-small --precision b", ["bfloat16"]),
        ("figures RUN --only tsne pur", ["purity"]),
        ("figures --only=pur", ["purity"]),
        ("reproduce main --scale smo", ["smoke"]),
        ("methods msf by", ["byol-asym", "byol"]),
        ("completion ", ["bash", "zsh", "fish"]),
        ("recipes ", []),
        ("unknown ", []),
        ("unknown --", []),
    ],
)
def test_candidates(complete, line, expected):
    assert sorted(complete(line)) == sorted(expected)


def test_other_shells_get_descriptions(complete):
    assert complete("rep", "fish")[0] == f"report\t{COMMANDS['report'].HELP}"
    assert complete("rep", "zsh")[0] == f"report:{COMMANDS['report'].HELP}"
    assert complete("figures --only=pur", "fish") == ["--only=purity\t"]


def test_names_belong_to_arguments_that_exist():
    for command, name in completion._NAMES:
        _, parser = build_parsers([command])
        assert name in {action.dest for action in parser._actions}, (command, name)


def test_an_unknown_shell_is_refused(call):
    code, out, err = call("completion", "tcsh")
    assert (code, out) == (2, "") and "'bash', 'zsh', 'fish'" in err


@pytest.mark.parametrize("shell", completion._SCRIPTS)
def test_scripts_are_valid(call, shell):
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"no {shell} here")
    _, script, _ = call("completion", shell)
    checked = subprocess.run([program, "-n"], input=script, capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_bash_completes(tmp_path):
    """The function that bash calls at Tab, with the words as bash divides them."""
    program = tmp_path / "meanshift"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m meanshift "$@"\n')
    program.chmod(0o755)
    (tmp_path / "photos").mkdir()
    script = f"""
        source <({program} completion bash)
        complete -p meanshift
        tab() {{
            COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMPREPLY=()
            _meanshift "$1"
            [[ ${{COMPREPLY[*]}} ]] || COMPREPLY=($(compgen -o default "${{@: -1}}"))
            echo "${{COMPREPLY[*]}}"
        }}
        tab {program} ev
        tab {program} pretrain small --method.name = si
        tab {program} pretrain small --data ph
    """
    done = subprocess.run(
        ["bash", "--norc", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "complete -o default -F _meanshift meanshift",
        "evaluate",
        " ".join(name for name in METHODS if name.startswith("si")),
        "photos",
    ]
