"""Sources of images behind one contract: folder, store, arrays, shards, datasets, sample."""

from meanshift.data.open import open_source
from meanshift.data.source import Source, Subset, UnreadableSample
from meanshift.data.splits import (
    EvaluationSplits,
    evaluation_splits,
    is_trained_on,
    labeled_only,
    match_classes,
    stratified_sample,
    stratified_split,
    train_and_validation,
)

__all__ = [
    "EvaluationSplits",
    "Source",
    "Subset",
    "UnreadableSample",
    "evaluation_splits",
    "is_trained_on",
    "labeled_only",
    "match_classes",
    "open_source",
    "stratified_sample",
    "stratified_split",
    "train_and_validation",
]
