"""k-NN on frozen features: exact cosine similarities, in chunks; plain or weighted vote."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from meanshift.data import Source
from meanshift.evaluation.context import EvaluationContext
from meanshift.evaluation.result import Result, percent
from meanshift.models.features import extract_features
from meanshift.models.weights import RawPixels, fingerprint
from meanshift.ops.topk import deterministic_neighbors, stable_topk
from meanshift.runtime import distributed, rng

CHUNK = 2500
"""queries that are searched together"""
ROWS = 65_536
"""training rows that are in memory at a time"""
CHUNK_BYTES = 32 * 2**20
"""size of the similarities in memory at a time"""
MONITOR_IMAGES = 10_000
"""training images, and validation images, that the k-NN while training takes at most"""


def evaluate(
    context: EvaluationContext, *, ks: Sequence[int] | None = None, temperature: float = 0.0
) -> Result:
    """Accuracy for each k; a temperature above 0 weights votes by exp(similarity / temperature)."""
    test = context.test  # first: without labels this is an error
    train = context.train
    default = default_ks(train.labels)
    ks = list(dict.fromkeys(ks or default))  # a k that is typed twice is one k
    options: dict[str, Any] = {} if ks == default else {"ks": ks}
    if temperature:
        options["temperature"] = temperature
    correct = knn_correct(
        train.features,
        train.labels,
        test.features,
        test.labels,
        ks=ks,
        temperature=temperature,
        top5=context.classes > 5,
        device=context.device,
    )
    settings = {
        "ks": ks,
        "vote": f"weighted, temperature {temperature:g}" if temperature else "plain majority",
        "similarity": "cosine",
        "ties": "to the nearest",
    }
    protocol = "knn-weighted" if temperature else "knn"
    metrics = {name: percent(rows) for name, rows in correct.items()}
    arrays = {f"correct {name}": rows.numpy() for name, rows in correct.items()}
    return Result(protocol, metrics, settings, arrays, options=options)


def knn_accuracy(
    train: Float[Tensor, "n features"],
    train_labels: Int[Tensor, " n"],
    test: Float[Tensor, "m features"],
    test_labels: Int[Tensor, " m"],
    **options: Any,
) -> dict[str, float]:
    """Accuracy in percent for each k, `{"1-NN": ..., "20-NN": ...}`; options as `knn_correct`."""
    correct = knn_correct(train, train_labels, test, test_labels, **options)
    return {name: percent(rows) for name, rows in correct.items()}


@torch.no_grad()
def knn_correct(
    train: Float[Tensor, "n features"],
    train_labels: Int[Tensor, " n"],
    test: Float[Tensor, "m features"],
    test_labels: Int[Tensor, " m"],
    *,
    ks: Sequence[int] = (1, 20),
    temperature: float = 0.0,
    top5: bool = False,
    chunk: int = CHUNK,
    device: torch.device | None = None,
) -> dict[str, Bool[Tensor, " tested"]]:
    """Which of the labeled test images are classified correctly for each k, by cosine similarity.

    Images without a label (-1) neither vote nor count. Of several processes each tests a part of
    the rows, and all get the result.
    """
    labeled = train_labels >= 0
    tested = test_labels >= 0
    if not (labeled.all() and tested.all()):
        train, train_labels = train[labeled], train_labels[labeled]
        test, test_labels = test[tested], test_labels[tested]
    largest_k = max(ks, default=0)
    if temperature < 0:
        raise ValueError(f"--temperature: got {temperature:g}, need above 0, or 0 for plain votes")
    if not ks or min(ks) < 1 or largest_k > len(train) or not len(test):
        raise ValueError(
            f"k-NN with k = {', '.join(map(str, ks)) or 'none'} on {len(train)} labeled images "
            f"and {len(test)} to evaluate; need k from 1 to {len(train)}, and some to evaluate"
        )
    classes = int(torch.cat([train_labels, test_labels]).max()) + 1
    ks = list(dict.fromkeys(ks))  # each k is counted once
    names = [
        f"{k}-NN{top5_suffix}"
        for k in ks
        for top5_suffix in (["", " top-5"] if top5 and k >= 5 else [""])
    ]
    correct = {name: torch.zeros(len(test), dtype=torch.int64) for name in names}
    start, end = distributed.shard_range(len(test))
    found = neighbors(
        train,
        test[start:end],
        largest_k,
        chunk=chunk,
        device=device,
        exact_similarities=temperature > 0,  # plain votes need the order only
    )
    truths = test_labels[start:end].split(chunk)
    for (indices, similarities), truth in zip(found, truths, strict=True):
        rows = slice(start, start + len(truth))
        start += len(truth)
        for k in ks:
            weights = None
            if temperature:
                difference = similarities[:, :k] - similarities[:, :1]  # <= 0: no overflow
                weights = (difference.double() / temperature).exp()
            hits = vote(train_labels[indices[:, :k]], classes, weights) == truth[:, None]
            correct[f"{k}-NN"][rows] = hits[:, 0].long()
            if f"{k}-NN top-5" in correct:
                correct[f"{k}-NN top-5"][rows] = hits.any(1).long()
    return {name: distributed.all_sum(rows).bool() for name, rows in correct.items()}


def neighbors(
    train: Float[Tensor, "n features"],
    test: Float[Tensor, "m features"],
    k: int,
    *,
    chunk: int = CHUNK,
    device: torch.device | None = None,
    exact_similarities: bool = True,
) -> Iterator[tuple[Int[Tensor, "batch k"], Float[Tensor, "batch k"]]]:
    """The training rows with the largest cosine similarity to each query, nearest first.

    Yields indices and similarities of each chunk of queries. They do not depend on chunks or
    threads; of equally similar rows the lower index comes first. Without `exact_similarities` this
    holds for the indices only. Only `ROWS` training rows are in memory at a time, so they may be a
    mapped file that is larger than memory.
    """
    device = device or train.device
    queries = [F.normalize(part.to(device), dim=1) for part in test.split(chunk)]
    best: list[tuple[Tensor, Tensor]] = []
    for start in range(0, len(train), ROWS):
        rows = F.normalize(train[start : start + ROWS].to(device), dim=1)
        for number, part in enumerate(queries):
            indices, similarities = deterministic_neighbors(
                part,
                rows,
                min(k, len(rows)),
                chunk_bytes=CHUNK_BYTES,
                # similarities to different parts of the rows are compared with each other
                exact_similarities=exact_similarities or len(train) > ROWS,
            )
            indices += start
            if start:
                indices = torch.cat([best[number][0], indices], 1)
                similarities = torch.cat([best[number][1], similarities], 1)
                best[number] = stable_topk(indices, similarities, k)
            else:
                best.append((indices, similarities))
    return ((indices.cpu(), similarities.cpu()) for indices, similarities in best)


def vote(
    labels: Int[Tensor, "batch k"], classes: int, weights: Float[Tensor, "batch k"] | None = None
) -> Int[Tensor, "batch ranked"]:
    """Up to five labels per row, most votes first; of equal ones that of the nearest neighbor.

    Where a row has fewer different labels, the others are -1.
    """
    batch, k = labels.shape
    votes = torch.zeros(batch, classes, dtype=torch.float64)
    if weights is None:
        weights = torch.ones_like(labels, dtype=torch.float64)
    votes.scatter_add_(1, labels, weights.double())
    # The nearest neighbor of a class gives it k, the second k - 1, ...; 0 is a class without votes.
    nearness = torch.zeros(batch, classes, dtype=torch.int64)
    rank = torch.arange(k, 0, -1).expand(batch, k)
    nearness.scatter_reduce_(1, labels, rank, "amax", include_self=True)
    # Two stable sorts: by nearness, then by votes.
    order = nearness.argsort(stable=True, dim=1, descending=True)[:, :k]
    ranked = votes.gather(1, order).argsort(stable=True, dim=1, descending=True)[:, :5]
    winners = order.gather(1, ranked)
    return torch.where(nearness.gather(1, winners) > 0, winners, -1)


class KNNMonitor:
    """k-NN accuracy of a backbone while it trains, on a fixed part of a large source."""

    def __init__(
        self,
        train: Source,
        validation: Source,
        *,
        image_size: int,
        workers: int = 0,
        max_images: int = MONITOR_IMAGES,
        keep_features: bool = False,
    ) -> None:
        self.train = _sample(train, max_images)
        self.validation = _sample(validation, max_images)
        self.image_size = image_size
        self.workers = workers
        self.newest: dict[str, Tensor] = {}
        """which validation images the newest weights classified correctly"""
        self.first: dict[str, Tensor] = {}
        """the same for the first weights of this session"""
        self.keep_features = keep_features
        self.features: dict[str, tuple[Tensor, Tensor]] = {}
        """by the fingerprint of the weights, those of the first and of the newest ones: features of
        the training and of the validation images"""

    @property
    def tested(self) -> int:
        """The validation images that have a label."""
        assert self.validation.labels is not None
        return int((self.validation.labels >= 0).sum())

    def __call__(self, backbone: nn.Module) -> dict[str, float]:
        train, validation = self._extract(backbone)
        if self.keep_features:
            first = dict(list(self.features.items())[:1])
            self.features = first | {fingerprint(backbone): (train, validation)}
        self.newest = self._classify(train, validation)
        self.first = self.first or self.newest
        return {name: percent(rows) for name, rows in self.newest.items()}

    def correct(self, backbone: nn.Module) -> dict[str, Bool[Tensor, " tested"]]:
        """Which validation images the features of a backbone classify correctly, for each k."""
        return self._classify(*self._extract(backbone))

    def _extract(self, backbone: nn.Module) -> tuple[Tensor, Tensor]:
        device = next(backbone.parameters(), torch.empty(0)).device
        train, validation = (
            extract_features(
                backbone, source, image_size=self.image_size, device=device, workers=self.workers
            )
            for source in (self.train, self.validation)
        )
        return train, validation

    def _classify(
        self, train: Float[Tensor, "n features"], validation: Float[Tensor, "m features"]
    ) -> dict[str, Bool[Tensor, " tested"]]:
        train_labels, validation_labels = self.train.labels, self.validation.labels
        assert train_labels is not None and validation_labels is not None
        ks = default_ks(train_labels)
        return knn_correct(train, train_labels, validation, validation_labels, ks=ks)

    def raw_pixels(self) -> dict[str, Bool[Tensor, " tested"]]:
        """`correct` of the pixels themselves, minus the mean training image."""
        pixels = RawPixels()
        rows = extract_features(
            pixels, self.train, image_size=self.image_size, device=torch.device("cpu")
        )
        pixels.center(rows.mean(0))
        return self.correct(pixels)


def _sample(source: Source, max_images: int) -> Source:
    if len(source) <= max_images:
        return source
    return source.subset(rng.choice(0, len(source), max_images, rng.SAMPLE))


def default_ks(labels: Int[Tensor, " n"]) -> list[int]:
    """The paper's 1 and 20, or only 1 where there are fewer than 20 labeled images."""
    return [k for k in (1, 20) if k <= int((labels >= 0).sum())]
