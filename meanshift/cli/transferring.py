"""`meanshift evaluate transfer` and `meanshift evaluate detect`."""

from __future__ import annotations

import argparse
import re
import sys
import warnings
from pathlib import Path

from meanshift.cli.reading import home_of, reading


def add_transferring(parser: argparse.ArgumentParser) -> None:
    transfer = parser.add_argument_group("transfer")
    transfer.add_argument(
        "--root", type=Path, metavar="FOLDER", help="where the datasets lie; detect: VOCdevkit"
    )
    transfer.add_argument(
        "--only", nargs="+", metavar="NAMES", help="some of the ten, as cifar10,flowers102 [all]"
    )
    transfer.add_argument(
        "--add", nargs="+", default=[], metavar="NAME=SOURCE", help="other images with labels"
    )
    detect = parser.add_argument_group("detect")
    detect.add_argument(
        "--iterations", type=int, default=24_000, help="the schedule scales with them [24000]"
    )
    detect.add_argument(
        "--size", type=int, default=0, help="short side; batch and regions scale with it [800]"
    )
    detect.add_argument("--batch-size", type=int, default=0, help="images an iteration [16]")
    detect.add_argument("--rois", type=int, default=0, help="regions an image to learn from [512]")
    detect.add_argument("--classes", metavar="NAMES", help="as cat,dog [all that are annotated]")


def transfer(given: argparse.Namespace, specs: list[str]) -> None:
    """The ten datasets of the paper, as far as they are there, and others by name."""
    from meanshift.data.transfer_datasets import DatasetNotFound, open_task, task_of
    from meanshift.evaluation import transfer as protocol
    from meanshift.evaluation.context import EncoderContext
    from meanshift.models.weights import load_weights
    from meanshift.training.console import table

    seed, root = given.seed or 0, given.root
    chosen, added = _tasks(given)
    tasks, missing = [], list[str]()
    for name in chosen:
        try:
            tasks.append(open_task(name, root, seed=seed))
        except DatasetNotFound as error:
            missing.append(str(error))
    tasks += [task_of(name, spec, seed=seed) for name, spec in added.items()]
    if missing:
        print("not judged:\n  " + "\n  ".join(missing), file=sys.stderr)
    if not tasks:
        raise ValueError(f"transfer: none of {', '.join(chosen)} is under {root}; see above")
    rows: dict[str, dict[str, float]] = {}
    for spec, weights in {spec: load_weights(spec) for spec in specs}.items():
        home = home_of(given, spec, specs)
        judged = EncoderContext(weights, seed=seed, home=home, **reading(given))
        print(f"{spec}: {weights.title}", file=sys.stderr)
        results = {}
        for task in tasks:
            results[task.name] = protocol.evaluate(judged, task)
            print(f"card: {judged.save(results[task.name])}", file=sys.stderr)
        whole = protocol.together(results)
        print(f"card: {judged.save(whole)}", file=sys.stderr)
        rows[spec] = whole.figures
    paper = {f"{title} *": row for title, row in protocol.beside(list(results)).items()}
    measures = ", ".join(f"{task.name} {task.measure}" for task in tasks)
    print(f"\ntransfer, {measures}\n{table(rows | paper, by='row')}")
    if paper:
        print("* the paper's table: ResNet-50 at 224 pixels, ImageNet, so many epochs")


def _tasks(given: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """Which of the ten, in the paper's order, and which sources by name."""
    from meanshift.data.transfer_datasets import NAMES as ten

    words = [word for part in given.only or [] for word in part.split(",") if word]
    unknown = [word for word in words if word not in ten]
    if unknown:
        raise ValueError(
            f"--only: got {', '.join(unknown)}; need some of {', '.join(ten)}; other images are "
            f"added with --add NAME=SOURCE"
        )
    added = dict[str, str]()
    for pair in given.add:
        name, _, source = pair.partition("=")
        if not source or not re.fullmatch(r"[\w.-]+", name) or name in (*ten, *added, "mean"):
            raise ValueError(
                f"--add: got {pair}; need NAME=SOURCE with a new name of letters and digits, as "
                f"pollen=photos/pollen"
            )
        added[name] = source
    if given.root is None and (words or not added):
        raise ValueError(
            "transfer: where are the datasets? say --root FOLDER (docs/transfer.md tells how each "
            "must lie there), or add your own images with --add NAME=SOURCE"
        )
    chosen = [name for name in ten if name in words or not words] if given.root else []
    if given.root is not None and not given.root.is_dir():
        raise ValueError(f"--root: {given.root} is no folder; need the one that holds the datasets")
    return chosen, added


def detect(given: argparse.Namespace, specs: list[str]) -> None:
    """VOC detection, in as many processes as `torchrun` starts."""
    from meanshift.data.voc import LAYOUT, read_voc
    from meanshift.evaluation.context import EncoderContext
    from meanshift.evaluation.detection import evaluate as protocol
    from meanshift.evaluation.detection.model import DetectionSettings
    from meanshift.models.weights import load_weights
    from meanshift.runtime.device import pick_device
    from meanshift.runtime.distributed import local_device, process_group, rank
    from meanshift.training.console import table

    if given.root is None:
        raise ValueError(f"detect: where are the images? say --root VOCDEVKIT; {LAYOUT}")
    recipe = DetectionSettings.of(
        given.iterations, size=given.size, batch_size=given.batch_size, rois=given.rois,
        lr=given.lr,
    )  # fmt: skip
    words = (" ".join(name.split()) for name in (given.classes or "").split(","))
    classes = [name for name in words if name]
    device = local_device(pick_device(given.device))
    rows: dict[str, dict[str, float]] = {}
    with process_group(device):
        first = rank() == 0
        with warnings.catch_warnings():
            if not first:  # one voice is enough
                warnings.simplefilter("ignore")
            train, test = read_voc(given.root, classes=classes)
            _say(
                f"{train.place}, {train.name}: {len(train)} images; {test.name}: {len(test)}; "
                f"{', '.join(train.classes)}; batches of {recipe.batch_size} at "
                f"{recipe.sizes[0]} to {recipe.size} pixels, {recipe.rois} regions, rate "
                f"{recipe.lr:g}",
                first,
            )
            for spec, weights in {spec: load_weights(spec) for spec in specs}.items():
                how = reading(given) | {"device": str(device)}
                judged = EncoderContext(
                    weights, seed=given.seed or 0, home=home_of(given, spec, specs), **how
                )
                _say(f"{spec}: {weights.title}", first)
                result = protocol.evaluate(judged, train, test, recipe=recipe, seeds=given.seeds)
                rows[spec] = result.figures
                if first:
                    card = judged.save(result)
                    _say(f"card: {card}\nimage: {card.with_suffix('.png')}: {result.text}", first)
    if first:
        paper = {f"{title} *": row for title, row in protocol.beside().items()}
        print(f"\n{result.name} on {test.name} of {test.place}\n{table(rows | paper, by='row')}")
        print("* the paper's table: ResNet-50, VOC 07+12 trainval, VOC 07 test, mean of 5 runs")


def _say(text: str, aloud: bool = True) -> None:
    if aloud:
        print(text, file=sys.stderr)
