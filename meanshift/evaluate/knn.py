"""k-NN on frozen features: exact, in chunks, majority vote, ties to the nearest of the tied."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from meanshift import keyed
from meanshift.bank import nearest
from meanshift.config import Config
from meanshift.data import Source, train_and_held_out
from meanshift.evaluate import card
from meanshift.features import extract
from meanshift.journal import Journal
from meanshift.machine import pick_device
from meanshift.weights import fingerprint, load_encoder, run_of


@torch.no_grad()
def knn_accuracy(
    train: Float[Tensor, "n features"],
    train_labels: Int[Tensor, " n"],
    test: Float[Tensor, "m features"],
    test_labels: Int[Tensor, " m"],
    *,
    ks: Sequence[int] = (1, 20),
    chunk: int = 1024,
) -> dict[str, float]:
    """Top-1 accuracy in percent for each k, by cosine similarity: `{"1-NN": ..., "20-NN": ...}`."""
    known, asked = train_labels >= 0, test_labels >= 0
    if not (known.all() and asked.all()):  # unlabelled pictures neither vote nor are judged
        train, train_labels = train[known], train_labels[known]
        test, test_labels = test[asked], test_labels[asked]
    most = max(ks, default=0)
    if not ks or min(ks) < 1 or most > len(train) or not len(test):
        raise ValueError(
            f"k-NN with k = {', '.join(map(str, ks)) or 'none'} on {len(train)} labelled pictures "
            f"and {len(test)} to judge; need k from 1 to {len(train)}, and some to judge"
        )
    classes = int(torch.cat([train_labels, test_labels]).max()) + 1
    train, right = F.normalize(train, dim=1), dict.fromkeys(ks, 0)
    for part, truth in zip(test.split(chunk), test_labels.split(chunk), strict=True):
        found, _ = nearest(F.normalize(part, dim=1), train, most)
        for k in ks:
            right[k] += int((vote(train_labels[found[:, :k]], classes) == truth).sum())
    return {f"{k}-NN": 100 * right[k] / len(test) for k in ks}


def vote(labels: Int[Tensor, "batch k"], classes: int) -> Int[Tensor, " batch"]:
    """The most frequent label of each row; of equally frequent ones the one that stands first."""
    batch, k = labels.shape
    counts = torch.zeros(batch, classes, dtype=torch.int64)
    counts.scatter_add_(1, labels, torch.ones_like(labels))
    earliness = torch.zeros_like(counts)
    rank = torch.arange(k, 0, -1).expand(batch, k)
    earliness.scatter_reduce_(1, labels, rank, "amax", include_self=True)
    return (counts * (k + 1) + earliness).argmax(1)


class KNNMonitor:
    """k-NN of a backbone while it trains; a fixed part stands for a large set."""

    def __init__(
        self, train: Source, held_out: Source, *, image_size: int, most: int = 10_000
    ) -> None:
        self.train = train.take(keyed.choose(0, len(train), most, keyed.PROBE))
        self.held_out = held_out.take(keyed.choose(0, len(held_out), most, keyed.PROBE))
        self.image_size = image_size

    def __call__(self, backbone: nn.Module) -> dict[str, float]:
        ks = _usual_ks(self.train)
        return _judge(backbone, self.train, self.held_out, self.image_size, ks=ks)


def evaluate_knn(
    weights: Path, *, source: str | None = None, ks: Sequence[int] | None = None
) -> tuple[dict[str, Any], Path]:
    """Judge a run on a labelled source (default: its own): the result and where it was written."""
    run, config = run_of(weights)
    backbone = load_encoder(weights).to(pick_device(config.train.device))
    spec = source or config.data.source
    own = Path(spec).absolute() == Path(config.data.source).absolute()
    kept = config.data.held_out if own else "auto"
    train, held = train_and_held_out(spec, kept, seed=config.train.seed)
    if held is None or train.labels is None or held.labels is None:
        raise ValueError(
            f"{spec}: k-NN needs labels and a part that was held out; give --data with class "
            f"folders inside train/ and val/, or with at least 100 labelled pictures"
        )
    figures = _judge(backbone, train, held, config.data.image_size, ks=ks or _usual_ks(train))
    sizes = {"train": len(train), "test": len(held)}
    result = {"figures": figures, "card": card("knn", spec, sizes, fingerprint(backbone), config)}
    return result, Journal.open(run).save_result("knn", result)


def comparable(config: Config) -> tuple[Source, Source]:
    """The training and held-out pictures of a config, if pixels can be compared with features."""
    kept = config.data.held_out
    train, held = train_and_held_out(config.data.source, kept, seed=config.train.seed)
    if held is None or train.labels is None or held.labels is None or not train.uniform:
        raise ValueError(f"{config.data.source}: need labelled arrays with a held-out part")
    return train, held


def compare_with_baselines(
    config: Config, *, untrained: nn.Module, trained: nn.Module
) -> dict[str, Any]:
    """Raw pixels, untrained and trained encoder, by the same k-NN on the same held-out pictures."""
    train, held = comparable(config)
    assert train.labels is not None and held.labels is not None
    pixels = [part.gather(torch.arange(len(part))).flatten(1).float() for part in (train, held)]
    mean = pixels[0].mean(0)
    rows = {"raw pixels (centred, cosine)": knn_accuracy(
        pixels[0] - mean, train.labels, pixels[1] - mean, held.labels
    )}  # fmt: skip
    for name, backbone in (
        ("untrained encoder", untrained),
        ("after Mean Shift training", trained),
    ):
        rows[name] = _judge(backbone, train, held, config.data.image_size, ks=(1, 20))
    sizes = {"train": len(train), "test": len(held)}
    return {
        "rows": rows,
        "card": card("knn", config.data.source, sizes, fingerprint(trained), config),
    }


def _usual_ks(train: Source) -> list[int]:
    """The paper's 1 and 20, as far as there are so many pictures."""
    assert train.labels is not None
    return [k for k in (1, 20) if k <= int((train.labels >= 0).sum())]


def _judge(
    backbone: nn.Module, train: Source, test: Source, image_size: int, *, ks: Sequence[int]
) -> dict[str, float]:
    assert train.labels is not None and test.labels is not None
    device = next(backbone.parameters(), torch.empty(0)).device
    features = [
        extract(backbone, part, image_size=image_size, device=device) for part in (train, test)
    ]
    return knn_accuracy(features[0], train.labels, features[1], test.labels, ks=ks)
