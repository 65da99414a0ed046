"""k-NN on frozen features: exact, in chunks, plain or weighted vote, ties to the nearest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from meanshift.data import Source
from meanshift.evaluation.context import EvaluationContext, Result
from meanshift.models.features import extract_features
from meanshift.ops.topk import nearest_neighbors, sort_neighbors
from meanshift.runtime import distributed, rng

CHUNK, ROWS, BYTES = 2500, 65_536, 32 * 2**20
"""queries and training rows looked at together, and memory for their similarities"""


def evaluate(
    subject: EvaluationContext, *, ks: Sequence[int] | None = None, temperature: float = 0.0
) -> Result:
    """Accuracy for each k; a temperature above 0 weighs the votes by exp(similarity / it)."""
    test, train = subject.test, subject.train  # in this order: it says what is missing at once
    ks = ks or usual_ks(train.labels)
    figures = knn_accuracy(
        train.features,
        train.labels,
        test.features,
        test.labels,
        ks=ks,
        temperature=temperature,
        top5=subject.classes > 5,
        device=subject.device,
    )
    vote = f"weighted, temperature {temperature:g}" if temperature else "plain majority"
    settings = {"ks": list(ks), "vote": vote, "similarity": "cosine", "ties": "to the nearest"}
    return Result("knn-weighted" if temperature else "knn", figures, settings)


@torch.no_grad()
def knn_accuracy(
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
) -> dict[str, float]:
    """Accuracy in percent for each k, by cosine similarity: `{"1-NN": ..., "20-NN": ...}`.

    Several processes judge a part of the test rows each.
    """
    known, asked = train_labels >= 0, test_labels >= 0
    if not (known.all() and asked.all()):  # unlabeled images neither vote nor are judged
        train, train_labels = train[known], train_labels[known]
        test, test_labels = test[asked], test_labels[asked]
    most = max(ks, default=0)
    if temperature < 0:
        raise ValueError(f"--temperature: got {temperature:g}, need above 0, or 0 for plain votes")
    if not ks or min(ks) < 1 or most > len(train) or not len(test):
        raise ValueError(
            f"k-NN with k = {', '.join(map(str, ks)) or 'none'} on {len(train)} labeled images "
            f"and {len(test)} to judge; need k from 1 to {len(train)}, and some to judge"
        )
    classes = int(torch.cat([train_labels, test_labels]).max()) + 1
    right = {(k, top): 0 for k in ks for top in ([1, 5] if top5 and k >= 5 else [1])}
    judged, own = len(test), slice(*distributed.shard_range(len(test)))
    test, test_labels = test[own], test_labels[own]
    found = neighbors(train, test, most, chunk=chunk, device=device)
    for (slots, similarity), truth in zip(found, test_labels.split(chunk), strict=True):
        for k in ks:
            closer = (similarity[:, :k] - similarity[:, :1]).double()  # below 0: no overflow
            weights = (closer / temperature).exp() if temperature else None
            ranked = vote(train_labels[slots[:, :k]], classes, weights) == truth[:, None]
            right[k, 1] += int(ranked[:, 0].sum())
            if (k, 5) in right:
                right[k, 5] += int(ranked.any(1).sum())
    names = [f"{k}-NN" + (" top-5" if top == 5 else "") for k, top in right]
    counts = distributed.all_sum(torch.tensor(list(right.values())))
    return {name: 100 * n / judged for name, n in zip(names, counts.tolist(), strict=True)}


def neighbors(
    train: Float[Tensor, "n features"],
    test: Float[Tensor, "m features"],
    count: int,
    *,
    chunk: int = CHUNK,
    device: torch.device | None = None,
) -> Iterator[tuple[Int[Tensor, "batch k"], Float[Tensor, "batch k"]]]:
    """The most similar training rows of each chunk of queries, nearest first, and how similar.

    Of equally similar rows the one that stands first is nearer. Only one part of the training rows
    is in memory at a time, which matters when they are a mapped file.
    """
    device = device or train.device
    queries = [F.normalize(part.to(device), dim=1) for part in test.split(chunk)]
    best: list[tuple[Tensor, Tensor]] = []
    for start in range(0, len(train), ROWS):
        rows = F.normalize(train[start : start + ROWS].to(device), dim=1)
        most = min(count + 8, len(rows))
        for which, part in enumerate(queries):
            found = nearest_neighbors(part, rows, most, chunk_bytes=BYTES)
            slots, similarity = found[0], _told_apart(part, rows, *found)
            slots += start
            if start:
                slots = torch.cat([best[which][0], slots], 1)
                similarity = torch.cat([best[which][1], similarity], 1)
                best[which] = sort_neighbors(slots, similarity, count)
            else:
                best.append(sort_neighbors(slots, similarity, count))
    return ((slots.cpu(), similarity.cpu()) for slots, similarity in best)


def _told_apart(part: Tensor, rows: Tensor, slots: Tensor, similarity: Tensor) -> Tensor:
    """The similarities, in float64 where float32 can hardly tell neighbors apart.

    Copies of an image must be equally near wherever they stand, but a product of matrices rounds
    by where a row stands.
    """
    close = (similarity[:, :-1] - similarity[:, 1:] < 1e-6).any(1).nonzero()[:, 0]
    for few in close.split(256):
        candidates = rows[slots[few]].double()
        exact = (candidates * part[few].double()[:, None]).sum(2)
        similarity[few] = exact.to(similarity)
    return similarity


def vote(
    labels: Int[Tensor, "batch k"], classes: int, weights: Float[Tensor, "batch k"] | None = None
) -> Int[Tensor, "batch ranked"]:
    """Up to five labels of each row, most votes first; of equal ones the one that stands first.

    Where a row has fewer different labels the rest is -1.
    """
    batch, k = labels.shape
    votes = torch.zeros(batch, classes, dtype=torch.float64)
    one = torch.ones_like(labels, dtype=torch.float64) if weights is None else weights.double()
    votes.scatter_add_(1, labels, one)
    earliness = torch.zeros(batch, classes, dtype=torch.int64)
    rank = torch.arange(k, 0, -1).expand(batch, k)
    earliness.scatter_reduce_(1, labels, rank, "amax", include_self=True)
    # Two stable sorts: by who stands first, then by votes.
    order = earliness.argsort(stable=True, dim=1, descending=True)[:, :k]
    ranked = votes.gather(1, order).argsort(stable=True, dim=1, descending=True)[:, :5]
    winners = order.gather(1, ranked)
    return torch.where(earliness.gather(1, winners) > 0, winners, -1)


class KNNMonitor:
    """k-NN of a backbone while it trains; a fixed part stands for a large set."""

    def __init__(
        self, train: Source, held_out: Source, *, image_size: int, most: int = 10_000
    ) -> None:
        self.train = train.take(rng.choice(0, len(train), most, rng.PROBE))
        self.held_out = held_out.take(rng.choice(0, len(held_out), most, rng.PROBE))
        self.image_size = image_size

    def __call__(self, backbone: nn.Module) -> dict[str, float]:
        device = next(backbone.parameters(), torch.empty(0)).device
        parts = [
            extract_features(backbone, part, image_size=self.image_size, device=device)
            for part in (self.train, self.held_out)
        ]
        assert self.train.labels is not None and self.held_out.labels is not None
        ks = usual_ks(self.train.labels)
        return knn_accuracy(parts[0], self.train.labels, parts[1], self.held_out.labels, ks=ks)


def usual_ks(labels: Int[Tensor, " n"]) -> list[int]:
    """The paper's 1 and 20, as far as there are so many images."""
    return [k for k in (1, 20) if k <= int((labels >= 0).sum())]
