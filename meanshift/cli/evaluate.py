"""`meanshift evaluate`: the protocols on features, fine-tuning, transfer and detection."""

from __future__ import annotations

import argparse
import importlib
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meanshift.cli.arguments import (
    SOURCE,
    WEIGHTS,
    add_reading_arguments,
    output_dir,
    reading_options,
)
from meanshift.cli.output import print_result, print_status, rank, world_size
from meanshift.evaluation import PROTOCOLS
from meanshift.runtime.errors import SharedError

if TYPE_CHECKING:
    from meanshift.evaluation.accuracy import Accuracy
    from meanshift.models.weights import Weights

HELP = "evaluate features: " + ", ".join(PROTOCOLS)

_WITH_ROOT = ("transfer", "detect")
"""protocols on data sets of their own; the others are on the features of one source"""
_FEATURES = tuple(name for name in PROTOCOLS if name not in _WITH_ROOT)
_PROTOCOLS_BY_OPTION = {  # the protocols that read an option; the other options are for all
    "data": _FEATURES,
    "split": _FEATURES,
    "labels": _FEATURES,
    "group": _FEATURES,
    "image_size": (*_FEATURES, "transfer"),
    "resize": (*_FEATURES, "transfer"),
    "ks": ("knn",),
    "temperature": ("knn",),
    "sweep": ("linear",),
    "cached": ("linear", "semi"),
    "epochs": ("linear", "semi", "finetune"),
    "lr": ("linear", "semi", "finetune", "detect"),
    "backbone_lr": ("finetune",),
    "fractions": ("semi", "finetune"),
    "counts": ("semi", "finetune"),
    "lists": ("semi", "finetune"),
    "seeds": ("semi", "finetune", "detect"),
    "clusters": ("cluster",),
    "root": ("transfer", "detect"),
    "only": ("transfer",),
    "add": ("transfer",),
    "iterations": ("detect",),
    "size": ("detect",),
    "batch_size": ("finetune", "detect"),
    "rois": ("detect",),
    "classes": ("detect",),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "words",
        nargs="+",
        metavar="NAME... RUN_OR_WEIGHTS",
        help=f"one or more of {', '.join(PROTOCOLS)}; then what to evaluate: {WEIGHTS}",
    )
    parser.add_argument("--data", metavar="SOURCE", help=f"{SOURCE}; default: the run's own")
    parser.add_argument(
        "--compare",
        nargs="+",
        default=[],
        metavar="WEIGHTS",
        help="evaluate these too, beside it; untrained: (no name) is the run's random weights, and "
        "its start if that is another one",
    )
    parser.add_argument("--split", default="", help="the split to evaluate on [val or test]")
    parser.add_argument(
        "--group", metavar="RULE", help="images to keep in one split, as data.group [the run's]"
    )
    parser.add_argument(
        "--seed", type=int, help="of layers, subsets, clusters [the run's; transfer, detect: 0]"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="for results and features")
    add_reading_arguments(parser)
    _add_feature_arguments(parser)
    _add_transfer_arguments(parser)
    _add_detection_arguments(parser)
    parser.set_defaults(several_processes=True)


def _add_feature_arguments(parser: argparse.ArgumentParser) -> None:
    knn = parser.add_argument_group("knn")
    knn.add_argument("--ks", type=int, nargs="+", metavar="K", help="neighbors [1 20]")
    knn.add_argument(
        "--temperature", type=float, help="weight votes by exp(similarity / T) [equal votes]"
    )
    linear = parser.add_argument_group("linear, semi and finetune")
    linear.add_argument(
        "--cached", action="store_true", help="train on features extracted once, not on views"
    )
    linear.add_argument(
        "--lr", type=float, help="of the linear layer [0.01; finetune: 0.003; detect: 0.02 per 16]"
    )
    linear.add_argument(
        "--epochs", type=int, help="[40; finetune: 30, but at least 200 and at most 2000 steps]"
    )
    linear.add_argument(
        "--sweep",
        type=float,
        nargs="*",
        metavar="LR",
        help="linear: choose the learning rate on a tenth of the training images",
    )
    linear.add_argument(
        "--backbone-lr",
        type=float,
        nargs="+",
        metavar="LR",
        help="finetune: of several the best on a fifth of the labeled images [0.001 0.01 0.1]",
    )
    semi = parser.add_argument_group("semi and finetune")
    semi.add_argument(
        "--fractions", type=float, nargs="+", help="of the labels [0.01 0.1; finetune: 0.01 0.1 1]"
    )
    semi.add_argument("--counts", type=int, nargs="+", help="of labeled images")
    semi.add_argument(
        "--lists", type=Path, nargs="+", metavar="FILE", help="image names, one per line"
    )
    semi.add_argument("--seeds", type=int, help="subsets to draw (detect: runs), for a std [1]")
    cluster = parser.add_argument_group("cluster")
    cluster.add_argument("--clusters", type=int, help="[as many as classes]")


def _add_transfer_arguments(parser: argparse.ArgumentParser) -> None:
    transfer = parser.add_argument_group("transfer")
    transfer.add_argument(
        "--root", type=Path, metavar="FOLDER", help="of the datasets; detect: VOCdevkit"
    )
    transfer.add_argument(
        "--only", nargs="+", metavar="NAMES", help="some of the ten, as cifar10,flowers102 [all]"
    )
    transfer.add_argument(
        "--add", nargs="+", metavar="NAME=SOURCE", help="other images with labels"
    )


def _add_detection_arguments(parser: argparse.ArgumentParser) -> None:
    detect = parser.add_argument_group("detect")
    detect.add_argument("--iterations", type=int, help="the schedule scales with them [24000]")
    detect.add_argument(
        "--size", type=int, help="short side; batch and regions scale with it [800]"
    )
    detect.add_argument("--batch-size", type=int, help="images per iteration [16; finetune: 64]")
    detect.add_argument("--rois", type=int, help="regions per image to learn from [512]")
    detect.add_argument("--classes", metavar="NAMES", help="as cat,dog [all that are annotated]")


def run(args: argparse.Namespace) -> int:
    import torch

    from meanshift.runtime.distributed import process_group

    names = list(dict.fromkeys(word for word in args.words if word in PROTOCOLS))
    evaluated = [word for word in args.words if word not in PROTOCOLS]
    specs = _row_names(evaluated, args.compare)
    if not names or not specs:
        raise ValueError(
            f"evaluate: got {' '.join(args.words)}; need one or more of {', '.join(PROTOCOLS)}, "
            f"then what to evaluate: meanshift evaluate knn RUN --data SOURCE"
        )
    _check_options(args, names)
    if {"transfer", "detect"} <= set(names):
        raise ValueError("transfer and detect need a --root of their own each: type two commands")
    if world_size() > 1 and not set(names) <= {"knn", "detect"}:
        raise SharedError(
            f"{world_size()} processes were started; of the protocols knn and detect work in "
            f"several: leave torchrun out (after evaluate knn the others find its features)"
        )
    with process_group(torch.device(reading_options(args)["device"])):
        on_features = [name for name in names if name not in _WITH_ROOT]
        if on_features:
            _evaluate_features(args, on_features, specs)
        if "transfer" in names:
            _evaluate_transfer(args, specs)
        if "detect" in names:
            _evaluate_detection(args, specs)
    return 0


def _row_names(evaluated: list[str], compared: list[str]) -> dict[str, str]:
    """All weights, with what the tables call them.

    `untrained:` without a name stands for the starts of the runs that are evaluated.
    """
    names = {spec: spec for spec in evaluated}
    for spec in compared:
        if spec != "untrained:":
            names.setdefault(spec, spec)
            continue
        from meanshift.models.weights import starts

        for run in evaluated:
            for title, start in starts(_run_of(run)).items():
                names[start] = title if len(evaluated) == 1 else f"{run}: {title}"
    return names


def _run_of(spec: str) -> Path:
    """The run that weights belong to: its directory, or that of one of its checkpoints."""
    path = Path(spec)
    for folder in (path, path.absolute().parent.parent):
        if (folder / "config.json").is_file():
            return folder
    raise ValueError(f"--compare untrained: needs a run, got {spec}; type --compare untrained:RUN")


def _check_options(args: argparse.Namespace, names: list[str]) -> None:
    """Refuse an option that none of the protocols reads: a user would believe that it worked."""
    for option, protocols in _PROTOCOLS_BY_OPTION.items():
        was_typed = getattr(args, option) not in (None, 0, "")
        if was_typed and not set(names) & set(protocols):
            raise ValueError(
                f"--{option.replace('_', '-')}: is for {', '.join(protocols)}; got "
                f"{', '.join(names)}"
            )


def _evaluate_features(args: argparse.Namespace, names: list[str], specs: dict[str, str]) -> None:
    """The protocols on the images of one source."""
    from meanshift.evaluation.accuracy import Accuracy
    from meanshift.evaluation.context import EvaluationContext
    from meanshift.evaluation.verdict import METRICS, baseline_name
    from meanshift.models.weights import load_weights
    from meanshift.runtime.distributed import fail_together
    from meanshift.runtime.table import table

    options = _protocol_options(args)
    columns: dict[str, dict[str, dict[str, float]]] = {name: {} for name in names}
    accuracies: dict[str, list[Accuracy]] = {}
    with fail_together():
        weights_by_spec = {spec: load_weights(spec) for spec in specs}
    first: EvaluationContext | None = None
    for spec, weights in weights_by_spec.items():
        with fail_together():
            context = EvaluationContext(
                weights,
                args.data,
                like=first,
                split=args.split,
                seed=args.seed,
                labels=args.labels,
                group=args.group,
                output_dir=_output_dir(args, spec, weights_by_spec),
                **reading_options(args),
            )
        if first is None:
            first = context
            print_status(f"{context.data}: {context.counts}")
        print_status(f"{spec}: {context.weights.title}; {context.data}: {context.split}")
        for name in names:
            protocol = importlib.import_module(PROTOCOLS[name])
            result = protocol.evaluate(context, **options.get(name, {}))
            columns[name][specs[spec]] = result.metrics
            title = baseline_name(context.card()["encoder"]) or specs[spec]
            for metric in METRICS:
                if metric in result.metrics:
                    accuracies.setdefault(metric, []).append(
                        Accuracy.of_result(
                            title, metric, result.metrics, context.card(), result.arrays
                        )
                    )
            if rank() == 0:
                print_status(f"card: {context.save(result)}")
            if len(columns[name]) == len(weights_by_spec):  # complete; a slow protocol may follow
                rows = table(columns[name], as_rows=name == "finetune")
                print_result(f"\n{result.name} on {context.data}\n{rows}")
    if accuracies:
        print_result(f"\n{_describe_comparison(next(iter(specs)), accuracies)}")


def _describe_comparison(spec: str, accuracies: dict[str, list[Accuracy]]) -> str:
    """Whether the first weights are better than the others, by the first metric that there is."""
    from meanshift.evaluation.knn import MONITOR_IMAGES
    from meanshift.evaluation.verdict import METRICS, Training, compare

    metric = next(name for name in METRICS if name in accuracies)
    own, *others = accuracies[metric]
    if (Path(spec) / "config.json").is_file():
        training = Training.read(spec, images=min(own.images, MONITOR_IMAGES))
        verdict = compare(metric, own, others, training)
    else:
        verdict = compare(metric, own, others)
    if not others:
        baselines = "untrained: pixels" if (Path(spec) / "config.json").is_file() else "pixels"
        verdict = replace(verdict, next_step=f"the same command with --compare {baselines}")
    return verdict.text


def _output_dir(args: argparse.Namespace, spec: str, compared: dict[str, Weights]) -> Path | None:
    """Where results are written: `--out`, or beside a run for weights that belong to none."""
    from meanshift.models.weights import OUTPUT_DIR, writable_dir

    first = next(iter(compared.values())).output_dir
    outside_runs = OUTPUT_DIR in compared[spec].output_dir.parents
    if args.out is None and outside_runs and OUTPUT_DIR not in first.parents:
        return writable_dir(first)
    return output_dir(args, spec, compared)


def _protocol_options(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The options of each protocol on features, without those that were not typed."""
    from meanshift.evaluation.finetune import FinetuneSettings
    from meanshift.evaluation.linear_probe import SWEEP, ProbeSettings

    lr = 0.01 if args.lr is None else args.lr
    epochs = 40 if args.epochs is None else args.epochs
    layer = {"settings": ProbeSettings.scaled(epochs, lr), "cached": args.cached}
    sweep = None if args.sweep is None else tuple(args.sweep) or SWEEP
    subsets = {name: getattr(args, name) for name in ("fractions", "counts", "lists", "seeds")}
    tuning = {"lr": args.lr, "epochs": args.epochs, "batch_size": args.batch_size}
    if args.backbone_lr is not None:
        tuning["backbone_lrs"] = tuple(args.backbone_lr)
    typed = {option: value for option, value in tuning.items() if value is not None}
    tuned = FinetuneSettings(**typed) if "finetune" in args.words else None
    options = {
        "knn": {"ks": args.ks, "temperature": args.temperature},
        "linear": {**layer, "sweep": sweep},
        "semi": {**layer, **subsets},
        "finetune": {**subsets, "settings": tuned},
        "cluster": {"clusters": args.clusters},
    }
    return {
        name: {option: value for option, value in values.items() if value is not None}
        for name, values in options.items()
    }


def _evaluate_transfer(args: argparse.Namespace, specs: dict[str, str]) -> None:
    """Those of the paper's ten datasets that are there, and others by name."""
    from meanshift.evaluation import transfer
    from meanshift.evaluation.context import EncoderContext
    from meanshift.models.weights import load_weights
    from meanshift.runtime.table import table

    seed = args.seed or 0
    tasks = _open_tasks(args, seed)
    rows: dict[str, dict[str, float]] = {}
    weights_by_spec = {spec: load_weights(spec) for spec in specs}
    for spec, weights in weights_by_spec.items():
        context = EncoderContext(
            weights,
            seed=seed,
            output_dir=_output_dir(args, spec, weights_by_spec),
            **reading_options(args),
        )
        print_status(f"{spec}: {weights.title}")
        results = {}
        for task in tasks:
            results[task.name] = transfer.evaluate(context, task)
            print_status(f"card: {context.save(results[task.name])}")
        summary = transfer.summarize(results)
        print_status(f"card: {context.save(summary)}")
        rows[specs[spec]] = summary.metrics
    paper = {
        f"{title} *": row for title, row in transfer.paper_rows([t.name for t in tasks]).items()
    }
    measures = ", ".join(f"{task.name} {task.metric}" for task in tasks)
    print_result(f"\ntransfer, {measures}\n{table(rows | paper, as_rows=True)}")
    if paper:
        print_result("* the paper's table: ResNet-50 at 224 pixels, ImageNet, so many epochs")


def _open_tasks(args: argparse.Namespace, seed: int) -> list[Any]:
    """The datasets to evaluate on; those that are not there are listed."""
    from meanshift.data import describe_splits
    from meanshift.data.transfer_datasets import DatasetNotFound, open_task, task_from_source

    names, added = _task_names(args)
    tasks = []
    missing = []
    for name in names:
        try:
            tasks.append(open_task(name, args.root, seed=seed))
        except DatasetNotFound as error:
            missing.append(str(error))
    tasks += [task_from_source(name, source, seed=seed) for name, source in added.items()]
    if missing:
        print_status("not evaluated:\n  " + "\n  ".join(missing))
    if not tasks:
        raise ValueError(f"transfer: none of {', '.join(names)} is under {args.root}; see above")
    for task in tasks:
        parts = {"train": task.train, "val": task.val, "test": task.test}
        print_status(f"{task.name}: {describe_splits(parts)}")
    return tasks


def _task_names(args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """Which of the ten datasets, in the paper's order, and which sources by name."""
    from meanshift.data.transfer_datasets import NAMES

    only = [name for words in args.only or [] for name in words.split(",") if name]
    unknown = [name for name in only if name not in NAMES]
    if unknown:
        raise ValueError(
            f"--only: got {', '.join(unknown)}; need some of {', '.join(NAMES)}; other images are "
            f"added with --add NAME=SOURCE"
        )
    added: dict[str, str] = {}
    for pair in args.add or []:
        name, _, source = pair.partition("=")
        if not source or not re.fullmatch(r"[\w.-]+", name) or name in (*NAMES, *added, "mean"):
            raise ValueError(
                f"--add: got {pair}; need NAME=SOURCE with a new name of letters and digits, as "
                f"pollen=photos/pollen"
            )
        added[name] = source
    if args.root is None and (only or not added):
        raise ValueError(
            "transfer: where are the datasets? type --root FOLDER (docs/transfer.md shows the "
            "layout of each), or add your own images with --add NAME=SOURCE"
        )
    if args.root is not None and not args.root.is_dir():
        raise ValueError(f"--root: {args.root} is no folder; need the one with the datasets")
    names = [name for name in NAMES if name in only or not only] if args.root else []
    return names, added


def _evaluate_detection(args: argparse.Namespace, specs: dict[str, str]) -> None:
    """Detection in VOC's layout, in as many processes as `torchrun` starts."""
    from meanshift.data.voc import VOC_LAYOUT, read_voc
    from meanshift.evaluation.context import EncoderContext
    from meanshift.evaluation.detection import evaluate as detection
    from meanshift.evaluation.detection.settings import DetectionSettings
    from meanshift.models.weights import load_weights
    from meanshift.runtime.distributed import fail_together
    from meanshift.runtime.table import table

    if args.root is None:
        raise ValueError(f"detect: where are the images? type --root VOCDEVKIT; {VOC_LAYOUT}")
    names = ("iterations", "size", "batch_size", "rois", "lr")
    typed = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    settings = DetectionSettings.scaled(**typed)
    classes = (" ".join(name.split()) for name in (args.classes or "").split(","))
    with fail_together():
        train, test = read_voc(args.root, classes=[name for name in classes if name])
        weights_by_spec = {spec: load_weights(spec) for spec in specs}
    print_status(
        f"{train.folder_name}, {train.name}: {len(train)} images; {test.name}: {len(test)}; "
        f"{', '.join(train.classes)}; batches of {settings.batch_size} at "
        f"{settings.train_sizes[0]} to {settings.size} pixels, {settings.rois} regions, "
        f"learning rate {settings.lr:g}"
    )
    rows: dict[str, dict[str, float]] = {}
    for spec, weights in weights_by_spec.items():
        context = EncoderContext(
            weights,
            seed=args.seed or 0,
            output_dir=_output_dir(args, spec, weights_by_spec),
            **reading_options(args),
        )
        print_status(f"{spec}: {weights.title}")
        seeds = 1 if args.seeds is None else args.seeds
        result = detection.evaluate(context, train, test, settings=settings, seeds=seeds)
        rows[specs[spec]] = result.metrics
        if rank() == 0:
            card = context.save(result)
            print_status(f"card: {card}\n{_draw_detections(card)}")
    paper = {f"{title} *": row for title, row in detection.paper_rows().items()}
    print_result(
        f"\n{result.name} on {test.name} of {test.folder_name}\n"
        f"{table(rows | paper, as_rows=True)}\n"
        f"* the paper's table: ResNet-50, VOC 07+12 trainval, VOC 07 test, mean of 5 runs"
    )


def _draw_detections(card: Path) -> str:
    """Draw the detections beside their card; without matplotlib the metrics are still printed."""
    from meanshift.runtime.extras import require
    from meanshift.viz.detections import draw_result

    try:
        require("matplotlib", extra="report", what="images of detections")
    except ValueError as error:
        return f"no image: {error}"
    return f"image: {card.with_suffix('.png')}: {draw_result(card)}"
