"""What the neighbors of finished runs are like: how pure, and which of them are purer than others.

    python -m tools.neighbor_diagnosis runs/evidence-cpu/runs/msf-w-s-seed* --data cifar10.npz

Labeled training images are embedded as the target does it, without augmentation. Some of them are
queries, and the others are the bank. The table shows the purity of the k-1 neighbors, of those that
a rule would choose, and from which wrong classes neighbors are; means over the given runs. `--out`
draws purity by the similarity of the neighbors.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meanshift.data import Source, open_source
from meanshift.models.features import extract_features
from meanshift.models.view_whitening import without_whitening
from meanshift.models.weights import Weights, load_weights
from meanshift.runtime import rng
from meanshift.viz import style
from meanshift.viz.analysis import nearest_others
from meanshift.viz.run_reader import Run

BANK, QUERIES = 8_192, 2_048
FRACTIONS = (0.05, 0.1, 0.25, 0.5, 0.75, 1.0)


class Projected(nn.Module):
    """The embedding that the loss sees: backbone and projector."""

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        assert weights.projector is not None
        self.backbone = without_whitening(weights.backbone)
        self.projector = weights.projector

    def forward(self, images: Tensor) -> Tensor:
        embedding: Tensor = self.projector(self.backbone(images))
        return embedding


def neighbors_of(network: nn.Module, source: Source, image_size: int, k: int) -> tuple[Tensor, ...]:
    """Similarities, labels and mutuality of the k-1 nearest rows of each query, and its label."""
    rows = extract_features(network, source, image_size=image_size, device=torch.device("cpu"))
    rows = F.normalize(rows, dim=1)
    bank, queries = rows[:BANK], rows[BANK:]
    assert source.labels is not None
    similarities, indices = (queries @ bank.T).topk(k - 1, 1)
    among_bank = bank @ bank.T
    among_bank.fill_diagonal_(-2)
    farthest = among_bank.topk(k - 1, 1).values[:, -1]
    mutual = similarities >= farthest[indices]
    return similarities, source.labels[:BANK][indices], mutual, source.labels[BANK:]


def purity_of_nearest(similarities: Tensor, same: Tensor, fraction: float) -> float:
    """The purity of the given fraction of all pairs that are most similar."""
    order = similarities.flatten().argsort(descending=True)
    return float(same.flatten()[order[: max(1, round(fraction * len(order)))]].float().mean())


def shared_neighbors(run: Run, k: int) -> float:
    """The fraction of the neighbors among snapshot images that the last two snapshots share."""
    earlier, later = (
        nearest_others(run.snapshot(epoch).features, k - 1)[0] for epoch in run.snapshot_epochs[-2:]
    )
    return float((earlier[:, :, None] == later[:, None, :]).any(2).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", metavar="RUN")
    parser.add_argument("--data", required=True, metavar="SOURCE")
    parser.add_argument("--k", type=int, default=5)
    parser.add_argument("--out", type=Path, metavar="FILE.png")
    options = parser.parse_args()
    torch.set_num_threads(1)

    train = open_source(options.data)["train"]
    chosen = rng.choice(0, len(train), BANK + QUERIES, rng.SAMPLE)
    shuffled = chosen[torch.randperm(len(chosen), generator=torch.Generator().manual_seed(0))]
    source = train.subset(shuffled)
    if source.labels is None or len(source) < BANK + QUERIES:
        parser.error(f"{options.data}: need {BANK + QUERIES} labeled training images")

    found: dict[str, list[float]] = defaultdict(list)
    wrong: Counter[tuple[int, int]] = Counter()
    for spec in options.runs:
        weights = load_weights(spec)
        similarities, near, mutual, labels = neighbors_of(
            Projected(weights), source, weights.image_size, options.k
        )
        same = near == labels[:, None]
        for fraction in FRACTIONS:
            purity = purity_of_nearest(similarities, same, fraction)
            found[f"purity of the most similar {fraction:.0%} of the neighbors"].append(purity)
        found["purity of mutual neighbors"].append(float(same[mutual].float().mean()))
        found["fraction of neighbors that are mutual"].append(float(mutual.float().mean()))
        whitened = neighbors_of(weights.backbone, source, weights.image_size, options.k)
        found["purity of neighbors by whitened features"].append(
            float((whitened[1] == whitened[3][:, None]).float().mean())
        )
        run = Run(Path(spec))
        found["neighbors that the last two snapshots share"].append(
            shared_neighbors(run, options.k)
        )
        for name in ("purity", "same_image", "agreement", "effective_rank"):
            for when, pick in (("first", min), ("last", max)):
                if means := run.epoch_means(name):
                    found[f"{name}, {when} epoch that has it"].append(means[pick(means)])
        pairs = zip(
            labels[:, None].expand_as(near)[~same].tolist(), near[~same].tolist(), strict=True
        )
        wrong.update(pairs)

    print("| | mean | from | to |\n| --- | --: | --: | --: |")
    for name, values in found.items():
        print(f"| {name} | {statistics.mean(values):.3f} | {min(values):.3f} | {max(values):.3f} |")
    total = sum(wrong.values())
    for (label, other), count in wrong.most_common(8):
        title = f"{source.classes[label]} has {source.classes[other]}"
        print(f"{title}: {count / total:.1%} of the wrong neighbors")
    if options.out:
        draw(options.out, [statistics.mean(found[name]) for name in list(found)[: len(FRACTIONS)]])


def draw(path: Path, purities: Sequence[float]) -> None:
    figure = style.figure(style.COLUMN * 1.3, 2.6)
    axes = figure.subplots()
    axes.plot([100 * fraction for fraction in FRACTIONS], purities, marker="o")
    axes.axhspan(0.5, 0.7, color=style.RULE, alpha=0.6, zorder=0)
    axes.text(99, 0.69, "neighbors begin to help (oracle)", ha="right", va="top", fontsize=7)
    axes.set_xlabel("% of the neighbors that count, most similar first")
    axes.set_ylabel("purity")
    axes.set_ylim(0.4, 0.9)
    figure.savefig(path)


if __name__ == "__main__":
    main()
