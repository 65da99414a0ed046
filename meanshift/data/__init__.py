"""Sources of images behind one contract: folder, store, arrays, shards, datasets, sample."""

from meanshift.data.open import open_source
from meanshift.data.source import Source, Subset
from meanshift.data.splits import (
    EvaluationSplits,
    describe_splits,
    evaluation_splits,
    is_trained_on,
    labeled_only,
    match_classes,
    stratified_sample,
    stratified_split,
    train_and_validation,
)
from meanshift.data.unreadable import UnreadableSample

__all__ = [
    "EvaluationSplits",
    "Source",
    "Subset",
    "UnreadableSample",
    "describe_splits",
    "evaluation_splits",
    "is_trained_on",
    "labeled_only",
    "match_classes",
    "open_source",
    "stratified_sample",
    "stratified_split",
    "train_and_validation",
]
