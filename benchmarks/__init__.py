"""Speed tables against other programs, from a clone: `make bench` or `python -m benchmarks`.

Each table is a module with `rows(rounds)`. Contenders are measured alternately in one run, and only
ratios are reported. `baseline` is the paper's method as its authors' program computes it.
"""

from __future__ import annotations

TABLES = {
    "training": "pre-training against the baseline, and a step against its bare encoders",
    "search": "search and loss by the size of the bank",
    "views": "two views of a batch against those of torchvision and lightly",
    "decoding": "a folder of JPEGs, and a packed one, to views of 224 pixels",
    "shards": "tar shards at an address against urllib, on a disk against wids and webdataset",
    "evaluation": "k-NN, k-means and the linear layer against faiss and scikit-learn",
    "startup": "time until --help is printed and until the demo trains",
    "memory": "memory of a training process against the sum of its parts",
    "methods": "time and memory of a step of every method, relative to those of Mean Shift",
    "hover": "from the move of a mouse to the point below it, in a map of 50,000 points",
    "growth": "time of a step by the size of the bank, the batch and the images, with a plot",
}
