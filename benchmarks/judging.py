"""k-NN, k-means and the linear layer against the libraries people use for them."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.table import Row, by_turns, installed, over, timed
from meanshift.config import Views
from meanshift.data import open_source
from meanshift.evaluation.cluster import kmeans
from meanshift.evaluation.knn import neighbors
from meanshift.evaluation.linear_probe import (
    ProbeSettings,
    Standardize,
    cached_stream,
    train_layers,
)
from meanshift.models.encoder import build_backbone
from meanshift.reproduce.step import STEP
from meanshift.transforms.augment import TwoViews

IMAGES, QUERIES, WIDTH, CLASSES, K = 50_000, 10_000, 512, 100, 20
CLUSTERED = 20_000
"""rows for k-means: of all of them scikit-learn's turn would take a minute"""


def rows(rounds: int, *, embedded: Path | None = None) -> Iterator[Row]:
    """All rows; of `embedded`, a file of anybody's features, its 20-NN alone."""
    if embedded is not None:
        if not installed("faiss"):
            raise ValueError("--features: its only contender is faiss; install faiss-cpu")
        yield from _nearest(*read_features(embedded), f"features of {embedded.name}", None, rounds)
        return
    for kind, goal in (("features like a network's", 1.2), ("without any structure", None)):
        train, test = features(decaying=goal is not None)
        yield from _nearest(train, test, kind, goal, rounds)
    yield _clusters(train[:CLUSTERED])
    yield _linear(train)


def _nearest(
    train: Tensor, test: Tensor, kind: str, goal: float | None, rounds: int
) -> Iterator[Row]:
    found: dict[str, Tensor] = {}

    def ours() -> None:
        found["ours"] = torch.cat([slots for slots, _ in neighbors(train, test, K)])

    faiss = _faiss(train, test, found)
    if faiss is None:
        return
    took = by_turns({"ours": timed(ours), "faiss": timed(faiss)}, rounds)
    same = float((found["ours"] == found["faiss"]).double().mean())
    yield Row(f"{K}-NN, {len(train):,} x {len(test):,} x {train.shape[1]}, {kind}: / faiss flat",
              over(took["faiss"], took["ours"]), goal,
              note=f"{same:.3%} of the neighbors in the same places")  # fmt: skip


def read_features(file: Path) -> tuple[Tensor, Tensor]:
    """Unit rows of an .npz that `meanshift embed` made: its training split, and what asks it.

    Where all rows are of one split, every sixth asks the others.
    """
    try:
        with file.open("rb") as opened, np.load(opened) as held:
            rows, split = torch.from_numpy(held["embedding"]).float(), held["split"]
    except (ValueError, KeyError, AttributeError, TypeError, zipfile.BadZipFile):
        raise ValueError(f"{file}: need an .npz made by `meanshift embed`") from None
    asked = torch.from_numpy(split != "train")
    if bool(asked.all()) or not asked.any():
        asked = torch.arange(len(rows)) % 6 == 5
    if int((~asked).sum()) < K or not asked.any():
        raise ValueError(f"{file}: {len(rows)} rows; need {K} to search and one that asks")
    rows = F.normalize(rows, dim=1)
    return rows[~asked], rows[asked]


def features(*, decaying: bool) -> tuple[Tensor, Tensor]:
    """Unit rows in overlapping classes; a network's variance falls quickly along its axes."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.arange(1, WIDTH + 1) ** -0.75 if decaying else torch.ones(WIDTH)
    axes = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=generator))[0]
    labels = torch.arange(IMAGES + QUERIES) % CLASSES
    spread = torch.randn(CLASSES, WIDTH, generator=generator)[labels]
    spread += torch.randn(IMAGES + QUERIES, WIDTH, generator=generator)
    rows = F.normalize((spread * scale) @ axes, dim=1)
    return rows[:IMAGES].contiguous(), rows[IMAGES:].contiguous()


def _clusters(train: Tensor) -> Row:
    from sklearn.cluster import KMeans

    theirs = KMeans(CLASSES, n_init=1, max_iter=20, tol=0, random_state=0)
    took = by_turns({"ours": timed(lambda: kmeans(train, CLASSES)),
                     "scikit-learn": timed(lambda: theirs.fit(train.numpy()))},
                    2, warm=False)  # fmt: skip
    return Row("k-means, 20,000 x 512, 100 clusters, 20 turns: / scikit-learn",
              over(took["scikit-learn"], took["ours"]))  # fmt: skip


def _linear(train: Tensor) -> Row:
    """40 epochs on features that were extracted once, beside one epoch of augmented views."""
    recipe, cpu = ProbeSettings(), torch.device("cpu")
    labels = torch.arange(IMAGES) % CLASSES
    backbone, _ = build_backbone(STEP.encoder, image_size=32)
    backbone.eval().to(memory_format=torch.channels_last)
    views, ids = TwoViews(Views(online="weak", same_view=True), 0, 32), torch.arange(256)
    images = open_source("sample")["train"].gather(ids)

    def cached() -> None:
        train_layers(
            cached_stream(train, labels, recipe=recipe, seed=0, device=cpu),
            Standardize(train), train[:256], labels[:256], classes=CLASSES, recipe=recipe,
            lrs=[recipe.lr], seed=0, device=cpu, steps=-(-IMAGES // recipe.batch_size),
        )  # fmt: skip

    @torch.no_grad()
    def one_batch() -> None:
        view, _ = views.finish(images, 0, ids)
        backbone(view.contiguous(memory_format=torch.channels_last))

    took = by_turns({"cached": timed(cached), "batch": timed(one_batch)}, 1, warm=False)
    epoch = [seconds * IMAGES / 256 for seconds in took["batch"]]
    return Row("linear layer, 50,000 x 512: one epoch of views / 40 cached epochs",
               over(epoch, took["cached"]), 1.0,
               note="ResNet-18 with the small stem, 32 px; of the epoch one batch is timed"
               )  # fmt: skip


def _faiss(train: Tensor, test: Tensor, found: dict[str, Tensor]) -> Callable[[], None] | None:
    if not installed("faiss"):
        return None
    import faiss

    faiss.omp_set_num_threads(torch.get_num_threads())
    index = faiss.IndexFlatIP(train.shape[1])
    index.add(train.numpy())

    def search() -> None:
        found["faiss"] = torch.from_numpy(index.search(test.numpy(), K)[1])

    return search
