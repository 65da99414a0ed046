"""k-NN, k-means and the linear layer against the libraries that people use for them."""

from __future__ import annotations

import unittest.mock
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from threadpoolctl import threadpool_limits
from torch import Tensor
from torch.nn import functional as F

from benchmarks.step import STEP
from benchmarks.table import Row, alternate, cpu_seconds, installed, ratios, timed
from meanshift.config import Views
from meanshift.data import open_source
from meanshift.evaluation.knn import neighbors
from meanshift.evaluation.linear_probe import (
    ProbeSettings,
    Standardize,
    cached_stream,
    train_layers,
)
from meanshift.models.encoder import build_backbone
from meanshift.ops import search_kernel
from meanshift.ops.kmeans import kmeans
from meanshift.ops.tsne import tsne
from meanshift.transforms.augment import MultiViewTransform

IMAGES, QUERIES, WIDTH, CLASSES, K = 50_000, 10_000, 512, 100, 20
KNN_SIZES = (
    (2_000, 500, 128),
    (10_000, 2_000, 128),
    (10_000, 2_000, 384),
    (10_000, 10_000, 128),
    (50_000, 2_000, 512),
    (50_000, 10_000, 512),
)
"""training rows, queries and features of the searches"""
CLUSTERED = 20_000
"""rows for k-means: with all of them scikit-learn would take a minute per round"""

MAPPED = (1_000, 5_000)
"""points of the t-SNE maps"""


def rows(rounds: int, *, features_file: Path | None = None) -> Iterator[Row]:
    """All rows; with a file of features only the row of its 20-NN."""
    if features_file is not None:
        if not installed("faiss"):
            raise ValueError("--features: is compared with faiss only; install faiss-cpu")
        train, test = read_features(features_file)
        yield from _knn_rows(train, test, f"features of {features_file.name}", None, rounds)
        return
    train, test = random_features(decaying=True)
    for size in KNN_SIZES:
        few = [
            F.normalize(part[:count, : size[2]], dim=1).contiguous()
            for part, count in zip((train, test), size[:2], strict=True)
        ]
        yield from _knn_rows(few[0], few[1], "features like a network's", 0.95, rounds)
    train, test = random_features(decaying=False)
    yield from _knn_rows(train, test, "without any structure", None, rounds)
    for count in MAPPED:
        yield _tsne_row(train[:count], rounds)
    yield _kmeans_row(train[:CLUSTERED])
    yield _linear_row(train)


def _knn_rows(
    train: Tensor, test: Tensor, kind: str, goal: float | None, rounds: int
) -> Iterator[Row]:
    """The search by the kernel, and by torch's operators, against faiss.

    CPU time of one thread, which other work on the machine hardly changes. Every contender
    normalizes the rows, as `evaluate knn` does.
    """
    found: dict[str, Tensor] = {}

    def search() -> None:  # as `evaluate knn` searches
        chunks = neighbors(train, test, K, exact_similarities=False)
        found["ours"] = torch.cat([indices for indices, _ in chunks])

    def search_by_operators() -> None:
        with unittest.mock.patch.object(search_kernel, "library", return_value=None):
            search()

    faiss_search = _faiss_search(train, test, found)
    if faiss_search is None:
        return
    work = len(train) * len(test) * train.shape[1]
    contenders = {
        "faiss": timed(faiss_search, cpu_seconds),
        "operators": timed(search_by_operators, cpu_seconds),
        "kernel": timed(search, cpu_seconds),
    }
    with _one_thread():
        seconds = alternate(contenders, rounds if work > 10**11 else 3 * rounds)
    equal = float((found["ours"] == found["faiss"]).double().mean())
    title = f"{K}-NN, {len(train):,} x {len(test):,} x {train.shape[1]}, {kind}"
    yield Row(
        f"{title}: / faiss, without the kernel", ratios(seconds["faiss"], seconds["operators"])
    )
    yield Row(
        f"{title}: / faiss flat",
        ratios(seconds["faiss"], seconds["kernel"]),
        goal,
        note=f"{equal:.3%} of the neighbors in the same places",
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1):  # of faiss and scikit-learn
            yield
    finally:
        torch.set_num_threads(threads)


def read_features(file: Path) -> tuple[Tensor, Tensor]:
    """Unit rows of an .npz of `meanshift embed`: its training split, and the other rows as queries.

    If all rows are of one split, every sixth is a query.
    """
    try:
        with file.open("rb") as opened, np.load(opened) as arrays:
            features = torch.from_numpy(arrays["embedding"]).float()
            split = arrays["split"]
    except (ValueError, KeyError, AttributeError, TypeError, zipfile.BadZipFile):
        raise ValueError(f"{file}: need an .npz made by `meanshift embed`") from None
    is_query = torch.from_numpy(split != "train")
    if bool(is_query.all()) or not is_query.any():
        is_query = torch.arange(len(features)) % 6 == 5
    if int((~is_query).sum()) < K or not is_query.any():
        raise ValueError(f"{file}: {len(features)} rows; need {K} to search and one query")
    features = F.normalize(features, dim=1)
    return features[~is_query], features[is_query]


def random_features(*, decaying: bool) -> tuple[Tensor, Tensor]:
    """Unit rows in overlapping classes; a network's variance decays quickly along its axes."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.arange(1, WIDTH + 1) ** -0.75 if decaying else torch.ones(WIDTH)
    axes = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=generator))[0]
    labels = torch.arange(IMAGES + QUERIES) % CLASSES
    features = torch.randn(CLASSES, WIDTH, generator=generator)[labels]
    features += torch.randn(IMAGES + QUERIES, WIDTH, generator=generator)
    features = F.normalize((features * scale) @ axes, dim=1)
    return features[:IMAGES].contiguous(), features[IMAGES:].contiguous()


def _tsne_row(features: Tensor, rounds: int) -> Row:
    """A map from a start, as the report draws it; CPU time of one thread."""
    from sklearn.manifold import TSNE

    perplexity, exaggeration, iterations = 30.0, 12.0, 500
    start = 1e-4 * torch.randn(len(features), 2, generator=torch.Generator().manual_seed(0))
    theirs = TSNE(
        init=start.numpy(),
        perplexity=perplexity,
        early_exaggeration=exaggeration,
        max_iter=iterations,
        angle=0.6,
        random_state=0,
    )

    def ours() -> None:
        tsne(
            features,
            start,
            perplexity=perplexity,
            exaggeration=exaggeration,
            iterations=iterations,
        )

    contenders = {
        "ours": timed(ours, cpu_seconds),
        "scikit-learn": timed(lambda: theirs.fit_transform(features.numpy()), cpu_seconds),
    }
    with _one_thread():
        seconds = alternate(contenders, rounds, warm_up=False)
    return Row(
        f"t-SNE, {len(features):,} x 512, {iterations} iterations: / scikit-learn (angle 0.6)",
        ratios(seconds["scikit-learn"], seconds["ours"]),
    )


def _kmeans_row(train: Tensor) -> Row:
    from sklearn.cluster import KMeans

    theirs = KMeans(CLASSES, n_init=1, max_iter=20, tol=0, random_state=0)
    contenders = {
        "ours": timed(lambda: kmeans(train, CLASSES)),
        "scikit-learn": timed(lambda: theirs.fit(train.numpy())),
    }
    seconds = alternate(contenders, 2, warm_up=False)
    return Row(
        "k-means, 20,000 x 512, 100 clusters, 20 iterations: / scikit-learn",
        ratios(seconds["scikit-learn"], seconds["ours"]),
    )


def _linear_row(train: Tensor) -> Row:
    """40 epochs on features that were extracted once, beside one epoch of augmented views."""
    settings = ProbeSettings()
    cpu = torch.device("cpu")
    labels = torch.arange(IMAGES) % CLASSES
    backbone, _ = build_backbone(STEP.encoder, image_size=32)
    backbone.eval().to(memory_format=torch.channels_last)
    transform = MultiViewTransform((Views().spec("view", "weak", index=0),), 0, 32)
    ids = torch.arange(256)
    images = open_source("sample")["train"].read_batch(ids)

    def cached_epochs() -> None:
        train_layers(
            cached_stream(train, labels, settings=settings, seed=0, device=cpu),
            Standardize(train),
            train[:256],
            labels[:256],
            classes=CLASSES,
            settings=settings,
            lrs=[settings.lr],
            seed=0,
            device=cpu,
            steps=-(-IMAGES // settings.batch_size),
        )

    @torch.no_grad()
    def one_batch() -> None:
        (view,) = transform.finish(images, 0, ids)
        backbone(view.contiguous(memory_format=torch.channels_last))

    contenders = {"cached": timed(cached_epochs), "batch": timed(one_batch)}
    seconds = alternate(contenders, 1, warm_up=False)
    epoch = [each * IMAGES / 256 for each in seconds["batch"]]
    return Row(
        "linear layer, 50,000 x 512: one epoch of views / 40 cached epochs",
        ratios(epoch, seconds["cached"]),
        1.0,
        note="ResNet-18 with the small stem, 32 px; of the epoch one batch is timed",
    )


def _faiss_search(
    train: Tensor, test: Tensor, found: dict[str, Tensor]
) -> Callable[[], None] | None:
    if not installed("faiss"):
        return None
    import faiss

    def search() -> None:
        rows, queries = (F.normalize(part, dim=1).numpy() for part in (train, test))
        _, indices = faiss.knn(queries, rows, K, metric=faiss.METRIC_INNER_PRODUCT)
        found["faiss"] = torch.from_numpy(indices)

    return search
