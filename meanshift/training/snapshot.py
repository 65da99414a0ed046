"""Snapshots for figures: features of fixed images and the weights of the backbone, in float16."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Int
from torch import Tensor, nn

from meanshift.config import ViewSpec
from meanshift.data import UnreadableSample
from meanshift.methods import Batch
from meanshift.models.features import eval_mode, extract_features
from meanshift.ops import collapse
from meanshift.ops.topk import nearest_neighbors
from meanshift.runtime import checkpoint, distributed, rng
from meanshift.transforms.replay import replay_views
from meanshift.transforms.views import view_transform

if TYPE_CHECKING:
    from meanshift.training.session import Session

NEIGHBORS = 10
"""nearest images by which the stability between snapshots is measured"""


def snapshot_epochs(epochs: int, count: int) -> set[int]:
    """When to take snapshots: at 0, at the end, and between with the early ones denser."""
    if count < 2:
        return {epochs} if count else set()
    return {round(epochs * (i / (count - 1)) ** 2) for i in range(count)}


def take_snapshot(session: Session, epoch: int) -> dict[str, float]:
    """Write a snapshot and return its metrics: rank of the features, neighbors that stayed."""
    indices, features = _features(session)
    features = features.half()
    weights = {
        name: value.half() if value.is_floating_point() else value
        for name, value in session.backbone.state_dict().items()
    }
    folder = session.run_directory.snapshots
    path = folder / f"epoch-{epoch:04d}.pt"
    earlier = [file for file in sorted(folder.glob("epoch-*.pt")) if file < path]
    if session.run_directory.writes:
        content = {
            "format": checkpoint.FORMAT,
            "epoch": epoch,
            "indices": indices,
            "features": features,
            "weights": weights,
        }
        checkpoint.write(path, content)
    metrics = {
        "feature_rank": collapse.effective_rank(features),
        "feature_rankme": collapse.rankme(features),
    }
    with torch.no_grad(), eval_mode(session.method):  # in which a method does not change its state
        metrics |= session.method.snapshot_metrics(
            session.config.views, _labeled_batches(session, indices, epoch)
        )
    if earlier:
        try:
            before = checkpoint.read(earlier[-1])
        except ValueError as error:  # its metric is missing, but the run goes on
            session.warn("snapshot", str(error))
            return metrics
        if torch.equal(before["indices"], indices):
            metrics["neighbors_kept"] = collapse.neighbor_stability(
                _neighbors(before["features"]), _neighbors(features)
            )
    return metrics


def _features(session: Session) -> tuple[Int[Tensor, " n"], Tensor]:
    """The snapshot images that can be read, and their features."""
    config, source = session.config, session.source
    indices = rng.choice(config.train.seed, len(source), config.train.snapshot_images, rng.SAMPLE)
    bad: dict[int, UnreadableSample] = {}  # training reports them when it meets them
    features = extract_features(
        session.backbone,
        source.subset(indices),
        image_size=config.data.image_size,
        device=session.device,
        precision=session.precision,
        workers=config.data.workers,
        bad=bad,
    )
    if bad and len(bad) < len(indices):
        readable = [row for row in range(len(indices)) if row not in bad]
        indices, features = indices[readable], features[readable]
    return indices, features


def _labeled_batches(
    session: Session, indices: Tensor, epoch: int
) -> Callable[[Sequence[ViewSpec]], Iterator[Batch]]:
    """The labeled images among these in any views: each process its part, in as many batches."""
    source, config = session.source, session.config

    def batches(views: Sequence[ViewSpec]) -> Iterator[Batch]:
        if source.labels is None or not source.labeled:
            return
        transform = view_transform(
            views,
            source,
            seed=config.train.seed,
            size=config.data.image_size,
            module=config.views.module,
        )
        labeled = indices[source.labels[indices] >= 0]
        count = -(-len(labeled) // (256 * distributed.world_size()))
        own = labeled[slice(*distributed.shard_range(len(labeled)))]
        for ids in own.tensor_split(max(1, count)):
            replayed = replay_views(source, ids, transform, epoch=epoch)
            views_on_device = tuple(view.to(session.device) for view in replayed.views)
            labels = source.labels[replayed.ids]
            yield Batch(views_on_device, replayed.ids.to(session.device), labels)

    return batches


def _neighbors(features: Tensor) -> Tensor:
    unit = nn.functional.normalize(features.float(), dim=1)
    count = min(NEIGHBORS, len(unit) - 1)
    return nearest_neighbors(unit, unit, count, exclude=torch.arange(len(unit)))[0]
