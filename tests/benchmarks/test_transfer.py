"""The benchmark of logistic regression on a small problem."""

import re

from benchmarks.transfer import measure_transfer


def test_the_benchmark_reports_the_ratio_of_times_and_the_losses():
    text = measure_transfer(rounds=1, images=60, width=12, classes=3)
    assert "60 x 12 features, 3 classes, 45 penalties from 100000 to 1e-06" in text
    assert re.search(r"scikit-learn's fits / our path +\d", text)
    lowest, excess = re.search(
        r"our loss / theirs at the same penalty +(\S+) to 1 \+ (\S+)", text
    ).groups()
    assert float(lowest) < 1
    assert float(excess) < 1e-4
