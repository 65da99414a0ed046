"""What a person sees: a line per epoch without a terminal, a bar with one."""

import re
import sys

import pytest

from meanshift.config import Config
from meanshift.training.console import Console
from meanshift.training.optim import Schedule


@pytest.fixture
def schedule():
    return Schedule(Config().with_overrides({"train.epochs": 3}), steps_per_epoch=5)


def test_an_epoch_is_a_line_with_metrics_speed_and_remaining_time(schedule, capsys):
    console = Console(schedule, 8)
    console.start(0)
    with console:
        for steps, loss, purity in ((4, 1.5, 0.25), (1, 1.0, 0.5)):
            for _ in range(steps):
                console.advance()
            console.show({"loss": loss, "purity": purity, "effective_rank": 3.0})
        console.end_epoch(1, {"20-NN": 31.0})
        console.advance()
        console.show({"loss": 1.25})
        console.end_epoch(2, {})
    first, second = capsys.readouterr().err.splitlines()
    speed = r"\d+ images/s  \d+:\d\d left"
    means = r"mean loss 1\.400  mean purity 0\.300"  # of five steps, not of the last one
    assert re.fullmatch(rf"epoch 1/3  {means}  20-NN 31\.0  {speed}", first)
    assert re.fullmatch(rf"epoch 2/3  mean loss 1\.250  {speed}", second)


def test_an_evaluation_before_training_has_a_line_of_its_own(schedule, capsys):
    console = Console(schedule, 8)
    console.start(0)
    with console:
        console.end_epoch(0, {"1-NN": 30.0, "20-NN": 31.0})
        console.end_epoch(0, {})
    assert capsys.readouterr().err == "epoch 0/3  1-NN 30.0  20-NN 31.0\n"


def test_a_terminal_has_a_bar_and_no_lines(schedule, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    console = Console(schedule, 8)
    console.start(0)
    with console:
        console.advance()
        console.print("warning: a message")
        console.end_epoch(1, {})
        console.end_epoch(1, {"20-NN": 31.0})
    lines = re.split("[\r\n]+", capsys.readouterr().err)
    assert "warning: a message" in lines
    assert [line for line in lines if line.startswith("epoch 1/3  ")] == ["epoch 1/3  20-NN 31.0"]


def test_the_bar_fits_80_columns(monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("tqdm.utils._screen_shape_wrapper", lambda: lambda _: (80, 24))
    config = Config().with_overrides({"train.epochs": 200})
    console = Console(Schedule(config, steps_per_epoch=195), 256)
    console.start(12_000)
    with console:
        console.show({"loss": 10.125, "purity": 0.5})
        console.advance()
        monkeypatch.setattr(console.bar, "_time", lambda: console.bar.start_t + 0.25)
        bar = str(console.bar)
    assert len(bar) <= 80
    shown = r"epoch 62/200 step 12001/39000 loss 10\.125 \|.{8,}\| 1\.02kimg/s, \d:\d\d:\d\d left"
    assert re.fullmatch(shown, bar), bar


def test_a_run_that_continues_says_where(schedule, capsys):
    Console(schedule, 8).start(7)
    assert "continues after step 7 of 15" in capsys.readouterr().err
    for step in (0, 15):
        Console(schedule, 8).start(step)
    assert not capsys.readouterr().err


def test_of_several_processes_one_prints(schedule, capsys):
    console = Console(schedule, 8, shown=False)
    console.start(7)
    console.print("a message")
    console.advance()
    console.end_epoch(1, {"20-NN": 31.0})
    assert not capsys.readouterr().err


def test_the_speed_is_that_since_it_was_last_asked_for(schedule, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("meanshift.training.console.time.perf_counter", lambda: now[0])
    console = Console(schedule, 8)
    console.start(2)
    for steps, seconds, expected in ((1, 2.0, 4.0), (3, 1.0, 24.0)):
        for _ in range(steps):
            console.advance()
        now[0] += seconds
        assert console.speed()["images_per_second"] == expected
    assert console.speed.__self__.step == 6 and now[0] == 103.0


def test_cpu_time_is_that_of_the_steps_and_not_of_an_evaluation(schedule, monkeypatch):
    cpu_time = [5.0]
    monkeypatch.setattr("meanshift.training.console.time.process_time", lambda: cpu_time[0])
    console = Console(schedule, 8)
    console.start(0)
    console.advance()
    cpu_time[0] += 2.0
    assert console.speed()["cpu_seconds"] == 2.0
    cpu_time[0] += 30.0  # an evaluation
    console.end_epoch(1, {"20-NN": 50.0})
    console.advance()
    cpu_time[0] += 1.5
    assert console.speed()["cpu_seconds"] == 1.5
