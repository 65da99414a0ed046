"""How often a choice without labels is right, over the studies whose runs are stored.

usage: python -m tools.label_free_choices SCALE:SOURCE ...

prints a table in Markdown: for each measure and each dataset, in how many seeds of all studies the
variant that it chooses is the most accurate one, and how much 20-NN the choice loses.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from meanshift.reproduce import archive
from meanshift.reproduce.experiment import Experiment
from meanshift.reproduce.label_free import MEASURES, Choice, total
from meanshift.reproduce.reproduction import Reproduction

STUDIES = ("main", "k", "nearest", "bank")  # others have nearly the same rows
SEEDS = 3


def stored_choices(scale: str, source: str) -> list[Choice]:
    """The choices in all studies of a scale and its images, of the runs that are stored."""
    experiment = Experiment.open(scale, data=source, overrides={})
    stored = Path("docs/reproduced") / archive.folder_name(scale, source)
    with tempfile.TemporaryDirectory() as folder:
        reproduction = Reproduction(STUDIES, experiment, Path(folder), SEEDS, stored)
        return [choice for result in reproduction.results() for choice in result.choices()]


def main(words: list[str]) -> None:
    if not words or not all(":" in word for word in words):
        sys.exit(__doc__)
    pairs = [word.split(":", 1) for word in words]
    totals = [total(stored_choices(scale, source)) for scale, source in pairs]
    titles = [f"`{scale}`, {Path(source).stem}" for scale, source in pairs]
    print(f"| right in; 20-NN lost (by chance) | {' | '.join(titles)} |")
    print("| --- |" + " --: |" * len(titles))
    for measure in MEASURES:
        cells = []
        for found in totals:
            right, seeds, regret, chance = found.get(measure, (0, 0, 0.0, 0.0))
            cells.append(f"{right} of {seeds}; {regret:.1f} ({chance:.1f})" if seeds else "–")
        print(f"| {measure} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main(sys.argv[1:])
