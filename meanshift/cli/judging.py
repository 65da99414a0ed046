"""`meanshift evaluate`, `meanshift embed` and `meanshift export`."""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meanshift.cli.reading import add_reading, home_of, reading
from meanshift.cli.speaking import SharedError, rank, say, world_size
from meanshift.cli.transferring import add_transferring, detect, transfer
from meanshift.evaluation import NAMES

if TYPE_CHECKING:
    from meanshift.cli import Command

_SOURCE = "folder, .npz or .npy file, tar shards, hf:NAME, named dataset, or sample"
_WEIGHTS = (
    "run directory, checkpoint, anybody's file of weights, torchvision:NAME, untrained:RUN, pixels"
)


def add(command: Command) -> None:
    _add_evaluate(command("evaluate", _evaluate, "judge frozen features: " + ", ".join(NAMES)))

    embed = command("embed", _embed, "embeddings of any images, as .npz or .parquet")
    embed.add_argument("weights", metavar="RUN_OR_WEIGHTS", help=_WEIGHTS)
    embed.add_argument("source", metavar="SOURCE", help=_SOURCE)
    embed.add_argument("--out", type=Path, required=True, metavar="FILE", help=".npz or .parquet")
    embed.add_argument(
        "--output", choices=["backbone", "projector"], default="backbone", help="[backbone]"
    )
    add_reading(embed)
    embed.set_defaults(processes=True)

    export = command("export", _export, "a run's backbone as a file for other programs")
    export.add_argument("weights", metavar="RUN", help="run directory or one of its checkpoints")
    export.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help=".safetensors, .pt or .pth"
    )


def _add_evaluate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "words",
        nargs="+",
        metavar="NAME... RUN_OR_WEIGHTS",
        help=f"one or more of {', '.join(NAMES)}; then what to judge: {_WEIGHTS}",
    )
    parser.add_argument("--data", metavar="SOURCE", help=f"{_SOURCE}; default: the run's own")
    parser.add_argument(
        "--compare", nargs="+", default=[], metavar="WEIGHTS", help="judge these too, side by side"
    )
    parser.add_argument("--split", default="", help="the split to judge on [val or test]")
    parser.add_argument(
        "--seed", type=int, help="of layers, cuts and clusters [the run's; transfer, detect: 0]"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="for results and features")
    add_reading(parser)
    knn = parser.add_argument_group("knn")
    knn.add_argument("--ks", type=int, nargs="+", metavar="K", help="neighbors [1 20]")
    knn.add_argument(
        "--temperature", type=float, default=0.0, help="weigh votes by exp(similarity / T) [off]"
    )
    linear = parser.add_argument_group("linear and semi")
    linear.add_argument(
        "--cached", action="store_true", help="train on features extracted once, not on views"
    )
    linear.add_argument("--lr", type=float, help="learning rate [0.01; detect: 0.02 / 16 an image]")
    linear.add_argument("--epochs", type=int, default=40, help="rate x0.1 after 3/8 and 3/4 [40]")
    linear.add_argument(
        "--sweep",
        type=float,
        nargs="*",
        metavar="LR",
        help="linear: choose the rate on a tenth of the training images",
    )
    semi = parser.add_argument_group("semi")
    semi.add_argument(
        "--fractions", type=float, nargs="+", default=[], help="of the labels [0.01 0.1]"
    )
    semi.add_argument("--counts", type=int, nargs="+", default=[], help="of labeled images")
    semi.add_argument(
        "--lists", type=Path, nargs="+", default=[], metavar="FILE", help="names, one a line"
    )
    semi.add_argument(
        "--seeds", type=int, default=1, help="cuts to draw (detect: runs), for a deviation [1]"
    )
    semi.add_argument("--fine-tune", action="store_true", help="train the whole network")
    add_transferring(parser)
    cluster = parser.add_argument_group("cluster")
    cluster.add_argument("--clusters", type=int, default=0, help="[as many as classes]")
    parser.set_defaults(processes=True)
    parser.set_defaults(usual=vars(parser.parse_args(["none"])))


def _evaluate(given: argparse.Namespace) -> int:
    names = [word for word in given.words if word in NAMES]
    specs = [word for word in given.words if word not in NAMES] + given.compare
    if not names or not specs:
        raise ValueError(
            f"evaluate: got {' '.join(given.words)}; need one or more of {', '.join(NAMES)}, then "
            f"what to judge: meanshift evaluate knn RUN --data SOURCE"
        )
    _refuse_idle(given, names)
    rooted = [name for name in names if name in ("transfer", "detect")]
    if len(set(rooted)) > 1:
        raise ValueError("transfer and detect have a --root of their own each: type two commands")
    frozen = [name for name in names if name not in rooted]
    if world_size() > 1 and not set(names) <= {"knn", "detect"}:
        raise SharedError(
            f"{world_size()} processes were started; of the protocols knn and detect work in "
            f"several: leave torchrun out (after evaluate knn the others find its features)"
        )
    with _joined(given):
        if frozen:
            _judge(given, list(dict.fromkeys(frozen)), specs)
        if "transfer" in names:
            transfer(given, specs)
        if "detect" in names:
            detect(given, specs)
    return 0


def _joined(given: argparse.Namespace) -> AbstractContextManager[None]:
    """Several processes find each other once, whatever they do then."""
    if world_size() == 1:
        return nullcontext()
    from meanshift.runtime.device import pick_device
    from meanshift.runtime.distributed import local_device, process_group

    return process_group(local_device(pick_device(given.device)))


_FROZEN = "knn linear semi cluster"
_FOR = {  # what each option is for; the others are for all
    "data split labels": _FROZEN,
    "image_size resize": f"{_FROZEN} transfer",
    "ks temperature": "knn",
    "sweep": "linear",
    "cached epochs": "linear semi",
    "lr": "linear semi detect",
    "fractions counts lists fine_tune": "semi",
    "seeds": "semi detect",
    "clusters": "cluster",
    "root": "transfer detect",
    "only add": "transfer",
    "iterations size batch_size rois classes": "detect",
}


def _refuse_idle(given: argparse.Namespace, names: list[str]) -> None:
    """An option that none of the protocols reads would be believed to have done something."""
    for options, protocols in _FOR.items():
        for option in options.split():
            if getattr(given, option) != given.usual[option] and not set(names) & set(
                protocols.split()
            ):
                raise ValueError(
                    f"--{option.replace('_', '-')}: is for {', '.join(protocols.split())}; got "
                    f"{', '.join(names)}"
                )


def _judge(given: argparse.Namespace, names: list[str], specs: list[str]) -> None:
    """The protocols on the images of one source."""
    import importlib

    from meanshift.evaluation.context import EvaluationContext
    from meanshift.evaluation.linear import SWEEP
    from meanshift.evaluation.linear_probe import ProbeSettings
    from meanshift.models.weights import load_weights
    from meanshift.runtime.device import pick_device
    from meanshift.runtime.distributed import fail_together, local_device
    from meanshift.training.console import table

    layer = ProbeSettings.of(given.epochs, 0.01 if given.lr is None else given.lr)
    sweep = () if given.sweep is None else tuple(given.sweep) or SWEEP
    options: dict[str, dict[str, Any]] = {
        "knn": {"ks": given.ks, "temperature": given.temperature},
        "linear": {"recipe": layer, "cached": given.cached, "sweep": sweep},
        "semi": {
            "recipe": layer,
            "cached": given.cached,
            "fractions": given.fractions,
            "counts": given.counts,
            "lists": given.lists,
            "seeds": given.seeds,
            "fine_tune": given.fine_tune,
        },
        "cluster": {"clusters": given.clusters},
    }
    figures: dict[str, dict[str, dict[str, float]]] = {name: {} for name in names}
    first: EvaluationContext | None = None
    how = reading(given) | {"device": str(local_device(pick_device(given.device)))}
    with fail_together():
        judged = {spec: load_weights(spec) for spec in specs}
    for spec, weights in judged.items():
        with fail_together():
            subject = EvaluationContext(
                weights, given.data, like=first, split=given.split, seed=given.seed,
                labels=given.labels, home=home_of(given, spec, specs), **how
            )  # fmt: skip
        first = first or subject
        say(f"{spec}: {weights.title}; {subject.data}: {subject.split}")
        for name in names:
            protocol = importlib.import_module(f"meanshift.evaluation.{name}")
            result = protocol.evaluate(subject, **options[name])
            figures[name][spec] = result.figures
            if rank() == 0:
                say(f"card: {subject.save(result)}")
            if spec == specs[-1]:
                say(f"\n{result.name} on {subject.data}\n{table(figures[name])}", result=True)


def _embed(given: argparse.Namespace) -> int:
    from meanshift.evaluation.embed import embed
    from meanshift.models.weights import load_weights
    from meanshift.runtime.device import pick_device
    from meanshift.runtime.distributed import fail_together, local_device

    how = reading(given) | {"device": str(local_device(pick_device(given.device)))}
    with _joined(given):
        with fail_together():
            weights = load_weights(given.weights)
        say(f"{given.weights}: {weights.title}")
        made = embed(
            weights, given.source, given.out, projector=given.output == "projector",
            labels=given.labels, **how
        )  # fmt: skip
    say(f"{given.out}: {made[0]} images, {made[1]} dimensions", result=True)
    return 0


def _export(given: argparse.Namespace) -> int:
    from meanshift.models.weights import export, load_weights

    print(f"exported: {export(load_weights(given.weights), given.out)}")
    return 0
