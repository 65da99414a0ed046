"""The README is a program: its commands and its Python run, in its order."""

import re
import shlex
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from meanshift.cli import main
from tests.evaluation.test_detection import write_voc
from tests.support.layouts import write_copy

README = Path(__file__).parents[2] / "README.md"
TINY = (
    "--data.image_size 16 --data.workers 0 --encoder.width 0.125 --train.batch_size 8 "
    "--method.bank_size 64 --train.epochs 3 --train.device cpu"
).split()

FEW = "--iterations 2 --size 64 --batch-size 2 --rois 8".split()


def look_at(words):
    """The live page answers, and ends when it is told to."""
    command = [sys.executable, "-m", "meanshift", *words, "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as serving:
        address = re.search(r"http://\S+", serving.stdout.readline())
        with urllib.request.urlopen(address[0], timeout=30) as page:
            assert b"<html" in page.read()
        serving.send_signal(signal.SIGINT)
        assert serving.wait(timeout=30) == 0


def test_every_command_and_every_block_of_python_runs(tmp_path, monkeypatch, make_images, capsys):
    make_images(tmp_path / "PHOTOS", {"cats": 60, "dogs": 60}, size=(20, 24))
    for name in ("cifar10", "flowers102"):
        write_copy(name, tmp_path / "DATASETS", monkeypatch)
    write_voc(tmp_path / "VOCDEVKIT")
    monkeypatch.chdir(tmp_path)
    text = README.read_text()
    commands = re.findall(r"^    \.venv/bin/(meanshift|torchrun) (.*)$", text, re.MULTILINE)
    assert len(commands) >= 4
    for program, command in commands:
        words = shlex.split(command, comments=True)
        if program == "torchrun":
            launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", *words, *TINY]
            done = subprocess.run(launch, capture_output=True, text=True, check=False)
            assert done.returncode == 0 and "finished" in done.stdout, done.stderr
            continue
        if words[0] == "explore":
            look_at(words)
            continue
        less = TINY if words[0] == "pretrain" else FEW if "detect" in words else []
        assert main([*words, *less]) == 0, capsys.readouterr().err
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 2
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})


def test_the_two_commands_are_named_and_exist():
    makefile = (README.parent / "Makefile").read_text()
    for target in ("demo", "test"):
        assert f"make {target}" in README.read_text()
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


@pytest.mark.parametrize("link", re.findall(r"\]\(([^)#]+)\)", README.read_text()))
def test_links_lead_somewhere(link):
    assert (README.parent / link).exists()


def test_it_is_short():
    assert len(README.read_text().splitlines()) <= 150
