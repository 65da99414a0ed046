"""The front door: the only room that parses arguments; heavy imports happen inside the commands."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meanshift import __version__
from meanshift.config import Config, settings
from meanshift.recipes import RECIPES, describe, recipe

if TYPE_CHECKING:
    from meanshift.data import Source
    from meanshift.train import Monitor


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; a user's mistake becomes one clear message and exit code 2."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.run is None:
        parser.print_help()
        return 0
    warnings.showwarning = _show_warning
    try:
        code: int = given.run(given)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        print(f"meanshift: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("meanshift: interrupted", file=sys.stderr)
        return 130


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"warning: {message}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="meanshift",
        description="Learn from pictures without labels, by Mean Shift.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"meanshift {__version__}")
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    def command(name: str, run: Any, help: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=help, description=help, allow_abbrev=False)
        added.set_defaults(run=run)
        return added

    demo = command("demo", _demo, "the whole path on shipped pictures: train, judge, show a table")
    demo.add_argument(
        "--out", type=Path, default=Path("runs/demo"), metavar="RUN", help="run directory"
    )
    _add_settings(demo)

    pretrain = command(
        "pretrain", _pretrain, "train; the same command continues a run that was stopped"
    )
    pretrain.add_argument("recipe", metavar="RECIPE", help=f"one of {', '.join(RECIPES)}")
    pretrain.add_argument(
        "--data", metavar="SOURCE", help="folder, .npz or .npy file, named dataset, or sample"
    )
    pretrain.add_argument("--out", type=Path, required=True, metavar="RUN", help="run directory")
    _add_settings(pretrain)

    evaluate = command("evaluate", _evaluate, "judge a run's frozen features")
    evaluate.add_argument("name", choices=["knn"], help="the protocol")
    evaluate.add_argument(
        "weights", type=Path, metavar="RUN", help="run directory or checkpoint file"
    )
    evaluate.add_argument(
        "--data", metavar="SOURCE", help="labelled pictures; default: the run's own"
    )
    evaluate.add_argument("--ks", type=int, nargs="+", metavar="K", help="neighbours [1 20]")

    command("recipes", _recipes, "every recipe with its command, cost and result")

    bench = command("bench", _bench, "the speed figures, as ratios measured in one run")
    bench.add_argument(
        "name", choices=["step"], help="step: a whole step against its two bare encoders"
    )
    bench.add_argument(
        "--rounds", type=int, default=3, help="interleaved rounds; the median counts"
    )
    _add_settings(bench)
    return parser


def _add_settings(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("settings", "any of them, over those of the recipe")
    for name, kind, default, text in settings():
        group.add_argument(
            f"--{name}",
            dest=f"setting {name}",
            nargs="?" if kind is bool else None,
            const="true" if kind is bool else None,
            metavar="VALUE",
            help=f"{text} [{default}]".replace("%", "%%"),
        )


def _configure(given: argparse.Namespace, base: Config) -> Config:
    chosen = {
        key.removeprefix("setting "): value
        for key, value in vars(given).items()
        if key.startswith("setting ") and value is not None
    }
    if getattr(given, "data", None) is not None:
        chosen["data.source"] = given.data
    return base.with_overrides(chosen)


def _pretrain(given: argparse.Namespace) -> int:
    config = _configure(given, recipe(given.recipe))
    return _train(config, given.out)


def _train(config: Config, out: Path) -> int:
    from meanshift.train import Stopped, pretrain

    try:
        run = pretrain(config, out, monitor=_monitor(config))
    except Stopped as stopped:
        print(f"meanshift: {stopped}", file=sys.stderr)
        return 128 + stopped.signal_number
    print(f"finished: {run}")
    return 0


def _monitor(config: Config) -> Monitor | None:
    """k-NN on the held-out pictures, handed to the loop that knows nothing of judging."""
    from meanshift.data import train_and_held_out
    from meanshift.evaluate.knn import KNNMonitor

    train, held = train_and_held_out(
        config.data.source, config.data.held_out, seed=config.train.seed
    )
    if held is None or not _labelled(train) or not _labelled(held):
        why = "nothing held out" if held is None and _labelled(train) else "no labels"
        print(
            f"{train.name}: {len(train)} pictures, {why}: no k-NN while training", file=sys.stderr
        )
        return None
    print(
        f"{train.name}: {len(train)} pictures to train on, {len(held)} held out for k-NN, "
        f"{len(train.classes)} classes",
        file=sys.stderr,
    )
    return KNNMonitor(train, held, image_size=config.data.image_size)


def _labelled(source: Source) -> bool:
    return source.labels is not None and bool((source.labels >= 0).any())


def _demo(given: argparse.Namespace) -> int:
    from meanshift.evaluate.knn import comparable, compare_with_baselines
    from meanshift.journal import Journal
    from meanshift.train import build_method
    from meanshift.weights import load_encoder

    config = _configure(given, recipe("demo"))
    comparable(config)  # before minutes of training
    code = _train(config, given.out)
    if code:
        return code
    table = compare_with_baselines(
        config,
        untrained=build_method(config).online.get_submodule("backbone"),
        trained=load_encoder(given.out),
    )
    Journal.open(given.out).save_result("demo", table)
    print(f"\nheld-out pictures, accuracy in %{'':10}1-NN   20-NN")
    for name, figures in table["rows"].items():
        print(f"  {name:38}" + "   ".join(f"{value:5.1f}" for value in figures.values()))
    print(f"\nthe run lies in {given.out} (metrics.jsonl, checkpoints/, snapshots/, results/)")
    return 0


def _evaluate(given: argparse.Namespace) -> int:
    from meanshift.evaluate.knn import evaluate_knn

    result, where = evaluate_knn(given.weights, source=given.data, ks=given.ks)
    for name, value in result["figures"].items():
        print(f"{name:>8}  {value:5.2f}")
    print(f"card: {where}")
    return 0


def _recipes(_: argparse.Namespace) -> int:
    for name in RECIPES:
        print(f"{name}\n  " + describe(name).replace("\n", "\n  "), end="\n\n")
    return 0


def _bench(given: argparse.Namespace) -> int:
    from meanshift.bench import STEP, bench_step

    print(bench_step(_configure(given, STEP), rounds=given.rounds))
    return 0
