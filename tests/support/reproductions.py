"""Tiny reproductions at scale smoke: their commands, and what they write."""

from __future__ import annotations

import contextlib
import csv
import io
from pathlib import Path

from meanshift.cli import main
from meanshift.reproduce.experiment import Experiment
from meanshift.reproduce.reproduction import Reproduction

SETTINGS = {
    "data.image_size": 16,
    "encoder.stem": "small-stride2",
    "train.batch_size": 16,
    "train.epochs": 3,
    "optim.warmup_epochs": 0,
    "train.save_every": 0.5,
    "train.log_every": 1,
    "train.device": "cpu",
}


def reproduce_command(names: str, data: Path, out: Path, *more: str) -> list[str]:
    """The arguments of `meanshift reproduce` for one seed."""
    flags = [word for name, value in SETTINGS.items() for word in (f"--{name}", str(value))]
    words = ["reproduce", *names.split(), "--scale", "smoke", "--data", str(data), "--seeds", "1"]
    return [*words, "--devices", "cpu", "--out", str(out), *flags, *more]


def make_reproduction(
    names: str, data: Path | str, out: Path, seeds: int = 1, **changed: object
) -> Reproduction:
    """What `reproduce_command` builds."""
    experiment = Experiment.open("smoke", data=str(data), overrides={**SETTINGS, **changed})
    return Reproduction(names.split(), experiment, out, seeds)


def run_command(arguments: list[str]) -> str:
    """The standard output of a command that succeeds."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        assert main([str(word) for word in arguments]) == 0
    return output.getvalue()


def read_table(path: Path) -> dict[tuple[str, str], str]:
    """Means by variant and column, as the .csv file has them."""
    with path.open(newline="") as file:
        return {(row["variant"], row["metric"]): row["mean"] for row in csv.DictReader(file)}


def read_files(folder: Path) -> dict[Path, tuple[int, bytes]]:
    """Time of change and contents of every file."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {
        path.relative_to(folder): (path.stat().st_mtime_ns, path.read_bytes()) for path in paths
    }
