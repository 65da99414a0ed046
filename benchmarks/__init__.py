"""The speed figures against others: `meanshift bench` runs these files from a clone.

`authors` is the baseline, the paper's method written plainly the way its authors' program works.
Each other file measures one table: contenders take turns in one run, and only ratios are told.
"""

from __future__ import annotations

NAMES = {
    "training": "pre-training against the baseline, and a step against its bare encoders",
    "searching": "search and loss by the size of the bank",
    "views": "two views of a batch against torchvision's and lightly's",
    "files": "a folder of JPEGs, and a packed one, to views of 224 pixels",
    "judging": "k-NN, k-means and the linear layer against faiss and scikit-learn",
    "starting": "how soon the front door answers and the demo trains",
    "memory": "a training process against the sum of its parts",
    "growth": "a step by the size of the bank, of the batch and of the images, with an image",
}
