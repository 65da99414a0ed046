"""28 short runs that test the warnings of a collapse: half with usual settings, half meant to fail.

    python -m tools.collapse_runs --digits digits.npz --flowers flowers.npz --fashion fashion.npz

Digits and flowers are vectors (scikit-learn's digits, and embeddings that `meanshift embed` has
written), fashion is some thousand images of 28 pixels. The table is in docs/experiments.md.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Iterator
from pathlib import Path

from meanshift.cli import main

VECTORS = "vector --train.epochs 15"
IMAGES = "demo --data.image_size 28 --encoder.width 0.5 --train.epochs 6"
PLAIN = "--method.variance 0 --method.covariance 0"
SMALL_HEADS = "--method.dim 256 --method.hidden 512"
BANK = "--method.bank_size 1024"
FIXED = (
    "--data.validation none --data.workers 0 --train.snapshots 0 --train.monitor_every 0 "
    "--train.log_every 5"
)

USUAL = {
    "digits": ["", *(f"--method.name {name}" for name in ("byol", "moco", "simclr"))],
    "flowers": [
        "",
        "--method.name simsiam",
        f"--method.name vicreg {SMALL_HEADS}",
        "--method.name isd",
    ],
    "fashion": [
        BANK,
        f"{BANK} {PLAIN}",
        "--method.name swav",
        "--method.name byol",
        "--method.name moco --train.batch_size 32",
        "--method.name simsiam",
    ],
}
COLLAPSING = {
    "digits": [
        f"{PLAIN} --method.momentum 0 --optim.lr 0.02",
        f"--method.name vicreg {SMALL_HEADS} {PLAIN}",
        "--method.name byol --method.momentum 0 --optim.lr 2",
    ],
    "flowers": [
        f"{PLAIN} --method.same_view true --method.momentum 0.5",
        "--method.name simsiam --optim.lr 2",
        "--method.name simclr --method.temperature 50",
    ],
    "fashion": [
        f"{BANK} {PLAIN} --method.momentum 0 --optim.lr 1e-2",
        f"--method.name vicreg {SMALL_HEADS} {PLAIN} --train.batch_size 32",
        "--method.name simsiam --optim.lr 1.5 --train.batch_size 32",
        f"{BANK} {PLAIN} --method.same_view true --method.momentum 0.8 --encoder.init random",
        "--method.name swav --method.epsilon 50",
        "--method.name moco --method.temperature 50",
        f"{BANK} {PLAIN} --optim.name sgd --optim.lr 2 --method.momentum 0.5",
        "--method.name byol --method.momentum 0 --optim.lr 2 --train.batch_size 32",
    ],
}


def runs(args: argparse.Namespace) -> Iterator[tuple[Path, str]]:
    """The folder and the command of each run."""
    for group, settings in (("usual", USUAL), ("collapsing", COLLAPSING)):
        for data, variants in settings.items():
            recipe = IMAGES if data == "fashion" else VECTORS
            for number, variant in enumerate(variants):
                out = args.out / f"{group}-{data}-{number}"
                source = shlex.quote(str(getattr(args, data)))
                yield out, f"pretrain {recipe} {FIXED} {variant} --data {source} --out {out}"


def row(out: Path) -> str:
    """The last metrics of a run, its 20-NN, that of random weights, and its warnings."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    last = next(line for line in reversed(lines) if "loss" in line)
    trained, random = (
        json.loads((out / "results" / f"{name}.json").read_text())["metrics"]["20-NN"]
        for name in ("knn", "knn-random")
    )
    warnings = out / "warnings.jsonl"
    records = map(json.loads, warnings.read_text().splitlines() if warnings.exists() else [])
    found = [each["message"].partition(":")[0] for each in records if each["kind"] == "collapse"]
    return (
        f"| {out.name} | {last.get('agreement', float('nan')):.2f} | {last['effective_rank']:.1f} "
        f"| {trained:.1f} ({random:.1f}) | {', '.join(found)} |"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("digits", "flowers", "fashion"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("runs/collapse"))
    args = parser.parse_args()
    rows = []
    for out, command in runs(args):
        main(shlex.split(command))
        main(["evaluate", "knn", str(out), "--compare", f"random:{out}"])
        rows.append(row(out))
    print("\n".join(rows))
