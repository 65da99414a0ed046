"""1-NN and 20-NN of features by leave-one-out over all labeled images, training and test together.

    python tools/leave_one_out.py photos.npz --image-size 64 RUN untrained:RUN pixels

For sets of a few hundred images, whose test images alone are too few. An encoder that was trained
on the training images can be better on them, so their part is printed too. Ties between classes go
to the nearer neighbors.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor
from torch.nn import functional as F

from meanshift.data import evaluation_splits
from meanshift.models.features import extract_features
from meanshift.models.weights import load_weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", help="a source with labels for training and test images")
    parser.add_argument("weights", nargs="+", help="as `meanshift evaluate` takes them")
    parser.add_argument("--image-size", type=int, default=64)
    args = parser.parse_args()
    splits = evaluation_splits(args.data)
    sources = (splits.train, splits.test)
    labels = torch.cat([torch.as_tensor(source.labels) for source in sources])
    trained = len(splits.train)
    for spec in args.weights:
        weights = load_weights(spec)
        features = torch.cat(
            [
                extract_features(
                    weights.backbone.eval(),
                    weights.adapted(source),
                    image_size=args.image_size,
                    device=torch.device("cpu"),
                )
                for source in sources
            ]
        )
        correct = torch.stack([classified(features, labels, k) for k in (1, 20)])
        parts = {"all": correct, "training": correct[:, :trained], "test": correct[:, trained:]}
        for name, part in parts.items():
            one, twenty = (100 * part.double().mean(1)).tolist()
            print(f"{spec}: 1-NN {one:.1f}, 20-NN {twenty:.1f} of {part.shape[1]} {name} images")


def classified(features: Tensor, labels: Tensor, k: int) -> Tensor:
    """Whether the k nearest others of each image by cosine similarity vote for its class."""
    rows = F.normalize(features, dim=1)
    similarities = (rows @ rows.T).fill_diagonal_(-torch.inf)
    votes = F.one_hot(labels[similarities.topk(k, 1).indices]).float()
    nearer = 1 + 1e-4 * torch.arange(k, 0, -1) / k
    predicted = (votes * nearer[:, None]).sum(1).argmax(1)
    return predicted == labels


if __name__ == "__main__":
    main()
