"""Moments of a run kept for figures: features of a probe, weights of the backbone, in float16."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from meanshift.config import Config
from meanshift.data import Source, UnreadableSample
from meanshift.methods import MeanShift
from meanshift.models.features import eval_mode, extract_features
from meanshift.ops import collapse
from meanshift.ops.topk import nearest_neighbors
from meanshift.runtime import checkpoint, distributed, rng
from meanshift.runtime.run_directory import RunDirectory
from meanshift.transforms.replay import replay_views


def snapshot_epochs(epochs: int, count: int) -> set[int]:
    """Moments to keep: 0, the last, and the rest between with the early ones denser."""
    if count < 2:
        return {epochs} if count else set()
    return {round(epochs * (i / (count - 1)) ** 2) for i in range(count)}


def take_snapshot(
    journal: RunDirectory,
    method: MeanShift,
    source: Source,
    config: Config,
    epoch: int,
    precision: torch.dtype,
) -> dict[str, float]:
    """Write a moment and return what it tells: rank of the features, neighbors that stayed."""
    encoder = method.online
    backbone, projector = encoder.get_submodule("backbone"), encoder.get_submodule("projector")
    device = next(encoder.parameters()).device
    indices = rng.choice(config.train.seed, len(source), config.train.probe_size, rng.PROBE)
    bad: dict[int, UnreadableSample] = {}  # they are warned of where they are met in training
    features = extract_features(
        backbone,
        source.take(indices),
        image_size=config.data.image_size,
        device=device,
        precision=precision,
        bad=bad,
    )
    if bad and len(bad) < len(indices):
        readable = [row for row in range(len(indices)) if row not in bad]
        features, indices = features[readable], indices[readable]
    with torch.no_grad(), eval_mode(projector):
        embeddings = projector(features.to(device)).cpu()
    features = features.half()
    whole = backbone.state_dict()
    weights = {name: w.half() if w.is_floating_point() else w for name, w in whole.items()}
    path = journal.snapshots / f"epoch-{epoch:04d}.pt"
    moment = {"format": checkpoint.FORMAT, "epoch": epoch, "indices": indices}
    earlier = [old for old in sorted(journal.snapshots.glob("epoch-*.pt")) if old < path]
    if journal.writes:
        checkpoint.write(
            path,
            {
                **moment,
                "features": features,
                "embeddings": embeddings.half(),
                "weights": weights,
            },
        )
    told = {"feature_rank": collapse.effective_rank(features)}
    told |= _purity_of_views(method, source, indices, config, epoch, device)
    if earlier:
        before = checkpoint.read(earlier[-1])
        if torch.equal(before["indices"], indices):
            was = _neighbors(before["features"])
            told["neighbors_kept"] = collapse.neighbor_stability(was, _neighbors(features))
    return told


@torch.no_grad()
def _purity_of_views(
    method: MeanShift,
    source: Source,
    indices: Tensor,
    config: Config,
    epoch: int,
    device: torch.device,
) -> dict[str, float]:
    """The target's purity in the bank as it is, by weak and by strong views of the probe.

    Several processes share the probe, and search a bank in parts together: in as many turns each.
    """
    bank = method.bank
    if bank is None or bank.filled < method.k or method.k < 2 or not source.labeled:
        return {}
    assert source.labels is not None
    both = replace(config.views, target="weak", online="strong", same_view=False)
    config = replace(config, views=both)
    sums = torch.zeros(3, dtype=torch.float64)  # of weak views, of strong ones, with a label
    own = indices[source.labels[indices] >= 0]
    turns = -(-len(own) // (256 * distributed.world_size()))
    own = own[slice(*distributed.shard_range(len(own)))]
    with eval_mode(method):  # so the bank is searched and not written
        for ids in own.tensor_split(max(1, turns)):
            drawn = replay_views(source, ids, epoch=epoch, config=config)
            labels = source.labels[drawn.ids]
            for at, view in enumerate((drawn.target, drawn.online)):
                u = method.project(view.to(device))
                purity = method.compare(u, u, ids=drawn.ids.to(device), labels=labels).purity
                assert purity is not None
                sums[at] += purity.nan_to_num().cpu() * (labels >= 0).sum()
            sums[2] += (labels >= 0).sum()
    weak, strong, known = distributed.all_sum(sums).tolist()
    return {"purity_weak": weak / known, "purity_strong": strong / known} if known else {}


def _neighbors(features: Tensor) -> Tensor:
    unit = nn.functional.normalize(features.float(), dim=1)
    others = min(10, len(unit) - 1)
    return nearest_neighbors(unit, unit, others, leave_out=torch.arange(len(unit)))[0]
