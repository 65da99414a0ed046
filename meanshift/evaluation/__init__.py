"""Protocols: an encoder and images in, metrics and a card out; one module per protocol."""

from __future__ import annotations

PROTOCOLS = {
    "knn": "meanshift.evaluation.knn",
    "linear": "meanshift.evaluation.linear_probe",
    "semi": "meanshift.evaluation.semi",
    "finetune": "meanshift.evaluation.finetune",
    "cluster": "meanshift.evaluation.cluster",
    "rank": "meanshift.evaluation.rank",
    "transfer": "meanshift.evaluation.transfer",
    "detect": "meanshift.evaluation.detection.evaluate",
}
"""name: module, whose `evaluate(context, ...)` returns a `Result`"""
