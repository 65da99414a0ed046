"""Measures of an encoder without labels: ranks, and how well two views of an image agree."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from meanshift.config import Views
from meanshift.evaluation.context import EvaluationContext
from meanshift.evaluation.result import Result
from meanshift.models.features import eval_mode
from meanshift.models.view_whitening import without_whitening
from meanshift.ops.collapse import effective_rank, lidar, neighbor_stability, rankme
from meanshift.ops.topk import deterministic_neighbors
from meanshift.runtime import rng
from meanshift.runtime.progress import progress
from meanshift.transforms.replay import replay_views
from meanshift.transforms.views import view_transform

LIDAR_IMAGES, LIDAR_VIEWS = 1000, 50
"""images and views of LiDAR's paper"""
RANKME_IMAGES = 25_600
"""images of RankMe's paper"""
STABILITY_K = 10
"""neighbors that two views of an image are compared by"""
_BATCH_SIZE = 500  # views


def evaluate(context: EvaluationContext) -> Result:
    """Effective rank and RankMe of 25,600 training images, LiDAR of 50 views of 1,000 images.

    Each is computed on strong views, of the backbone's features and, as in both papers, of the
    projector's embeddings, where the weights have a projector. With fewer images all are taken.
    The first two views of LiDAR's images also give `view_agreement` of the features.
    """
    rows = {
        "rank": _views(context, RANKME_IMAGES, 1),
        "LiDAR": _views(context, LIDAR_IMAGES, LIDAR_VIEWS),
    }
    metrics: dict[str, float] = {}
    for name, of in (("embeddings", ", embeddings"), ("features", "")):
        if name in rows["rank"]:
            single, several = rows["rank"][name][:, 0], rows["LiDAR"][name]
            metrics[f"effective rank{of}"] = effective_rank(single)
            metrics[f"RankMe{of}"] = rankme(single)
            metrics[f"LiDAR{of}"] = lidar(several)
    metrics |= view_agreement(rows["LiDAR"]["features"][:, 0], rows["LiDAR"]["features"][:, 1])
    settings = {
        "RankMe images": len(rows["rank"]["features"]),
        "LiDAR images": len(rows["LiDAR"]["features"]),
        "LiDAR views": LIDAR_VIEWS,
        "neighbors compared": STABILITY_K,
        "of": "strong views of training images",
        "most": {name: values.shape[2] for name, values in rows["rank"].items()},
    }
    return Result("rank", metrics, settings)


def view_agreement(
    one: Float[Tensor, "images dim"], other: Float[Tensor, "images dim"]
) -> dict[str, float]:
    """Return how well two views of each image agree, by cosine similarity.

    `neighbor stability` is the fraction of the 10 nearest other images that both views have in
    common. `view retrieval` is the percentage of images whose second view is the nearest of all
    second views to the first one. Both are 0 for features that are not finite.
    """
    if not (one.isfinite().all() and other.isfinite().all()):
        return {"neighbor stability": 0.0, "view retrieval": 0.0}
    one, other = F.normalize(one, dim=1), F.normalize(other, dim=1)
    own = torch.arange(len(one))
    k = min(STABILITY_K, len(one) - 1)
    neighbors = [
        deterministic_neighbors(views, views, k, exclude=own)[0].cpu() for views in (one, other)
    ]
    nearest = deterministic_neighbors(one, other, 1)[0][:, 0].cpu()
    return {
        "neighbor stability": neighbor_stability(*neighbors),
        "view retrieval": 100 * float((nearest == own).float().mean()),
    }


@torch.no_grad()
def _views(
    context: EvaluationContext, images: int, views: int
) -> dict[str, Float[Tensor, "images views dim"]]:
    """Features and embeddings of strong views of some training images that can be read."""
    config = context.weights.config
    operators = config.views if config is not None else Views()
    # Streams of their own: these views are not those that the run was trained on.
    specs = tuple(operators.spec(str(index), "strong", index=500 + index) for index in range(views))
    source = context.train_source
    transform = view_transform(
        specs, source, seed=context.seed, size=context.image_size, module=operators.module
    )
    chosen = rng.choice(context.seed, len(source), images, rng.SAMPLE)
    projector = context.weights.projector
    if projector is not None:
        projector = projector.to(context.device).eval()
    seen: list[Tensor] = []
    hook = without_whitening(context.backbone).register_forward_hook(
        lambda _module, _inputs, output: seen.append(output)
    )
    parts: dict[str, list[Tensor]] = {"features": []}
    with eval_mode(context.backbone), progress("views", len(chosen), unit="img") as bar:
        for ids in chosen.split(max(1, _BATCH_SIZE // views)):
            replayed = replay_views(source, ids, transform, epoch=0)
            batch = torch.stack(replayed.views, 1).flatten(0, 1).to(context.device)
            features = context.backbone(batch).float()
            parts["features"].append(features.unflatten(0, (-1, views)))
            if projector is not None:
                embeddings = projector(seen.pop()).float()
                parts.setdefault("embeddings", []).append(embeddings.unflatten(0, (-1, views)))
            seen.clear()
            bar.update(len(ids))
    hook.remove()
    return {name: torch.cat(rows).cpu() for name, rows in parts.items()}
