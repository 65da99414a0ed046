"""The parser, and arguments that several commands share: images, weights, how images are read."""

from __future__ import annotations

import argparse
import platform
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NoReturn

from meanshift import __version__
from meanshift.cli.output import print_status
from meanshift.config.parsing import close

SOURCE = "folder, .npz or .npy file, tar shards, hf:NAME, named dataset, or sample"
WEIGHTS = (
    "run directory, checkpoint, any program's file of weights, torchvision:NAME:WEIGHTS, "
    "timm:NAME, meanshift:NAME, hf:FOLDER_OR_NAME, untrained:RUN, random:RUN, pixels"
)


class Parser(argparse.ArgumentParser):
    """Takes `-` and `_` in options alike; an error comes before a usage of one line."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)
        self._negative_number_matcher = re.compile(r"-[\d.][\d.,e+-]*$")  # also -1000,1000

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        spelling = {_dashed(option): option for option in self._option_string_actions}
        words = []
        for word in args:
            option, equals, value = word.partition("=")
            words.append(spelling.get(_dashed(option), option) + equals + value)
        return super().parse_known_args(words, namespace)

    def error(self, message: str) -> NoReturn:
        usage = self._get_formatter()
        needed = [each for each in self._actions if each.required or not each.option_strings]
        usage.add_usage(None, needed, [])
        line = " ".join(usage.format_help().split())
        print_status(f"meanshift: {message}\n{line}; all options: {self.prog} --help")
        self.exit(2)

    def refuse_options(self, words: Sequence[str]) -> None:
        """Report the first of these unknown words that is an option, with the nearest names."""
        options = [option for option in self._option_string_actions if option.startswith("--")]
        for word in words:
            name = word.partition("=")[0]
            if name.startswith("-"):
                near = close(_dashed(name), options, [])
                self.error(f"unknown option {name}" + (f"; did you mean {near}?" if near else ""))


class ShowVersions(argparse.Action):
    """Print the versions of this program and of what it computes with, and the device."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        import torch
        import torchvision

        from meanshift.runtime.device import pick_device

        device = pick_device("auto")
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "no CUDA device"
        print(f"meanshift {__version__}")
        print(f"Python {platform.python_version()}")
        print(f"torch {torch.__version__}")
        print(f"torchvision {torchvision.__version__}")
        print(f"device: {device} ({name})")
        parser.exit()


def _dashed(option: str) -> str:
    return option.replace("_", "-")


def add_reading_arguments(parser: argparse.ArgumentParser) -> None:
    """How images are read and features are computed."""
    parser.add_argument(
        "--labels", type=Path, metavar="CSV", help="columns file,label, for a flat folder"
    )
    parser.add_argument(
        "--image-size", type=int, default=0, help="side in pixels [that of the weights]"
    )
    parser.add_argument(
        "--resize", type=int, default=0, help="short side before the crop [256/224 of the size]"
    )
    parser.add_argument("--workers", type=int, default=0, help="processes that decode files [0]")
    parser.add_argument("--device", default="auto", help="[auto]")
    parser.add_argument(
        "--precision", choices=["float32", "bfloat16", "auto"], default="float32", help="[float32]"
    )


def reading_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of `add_reading_arguments` that an encoder takes, on this process's device."""
    from meanshift.runtime.device import pick_device
    from meanshift.runtime.distributed import local_device

    names = ("image_size", "resize", "workers", "precision")
    options = {name: getattr(args, name) for name in names}
    return options | {"device": str(local_device(pick_device(args.device)))}


def output_dir(args: argparse.Namespace, spec: str, specs: Collection[str]) -> Path | None:
    """Where the results of weights are written: `--out`, or a folder in it for each of several."""
    out: Path | None = args.out
    if out is None or len(specs) == 1:
        return out
    return out / re.sub(r"[^\w.-]+", "-", spec.strip("/"))


def add_bands(parser: argparse.ArgumentParser) -> None:
    """Which channels of a sample are shown."""
    parser.add_argument(
        "--bands",
        type=_bands,
        default=(),
        metavar="R,G,B",
        help="channels shown as red, green and blue, or one as gray, from 0 [0,1,2]",
    )


def _bands(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise argparse.ArgumentTypeError(f"got {text!r}, need numbers from 0, as 3,2,1")
    return tuple(map(int, text.split(",")))
