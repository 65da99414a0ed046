"""The doctor: looks at data and machine before hours are spent, and advises a run."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from meanshift.config.recipes import recipe
from meanshift.data import Source, describe_splits, open_source, train_and_validation
from meanshift.doctor.advice import Advice, advise, fits_kind
from meanshift.doctor.inspection import Finding, Inspection, inspect
from meanshift.doctor.trial import Trial, try_steps

FEW = 100
"""training samples below which little is learned"""
LONG = 12 * 3600.0
"""seconds of a run that are called long"""


@dataclass
class Diagnosis:
    """Everything that the doctor found out; parts that were not reached are None."""

    source: str
    counts: str = ""
    """samples, classes and groups of the splits, in words"""
    inspection: Inspection | None = None
    advice: Advice | None = None
    trial: Trial | None = None
    problems: list[str] = field(default_factory=list)
    """what would spoil a run"""
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """what the source itself reports, such as files that were left out"""

    @property
    def exit_code(self) -> int:
        return 1 if self.problems else 0

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        values = dataclasses.asdict(self)
        for part, omitted in (("inspection", "readable"), ("trial", "sheet")):
            if values[part] is not None:
                del values[part][omitted]
        return values


def diagnose(
    source: str,
    *,
    recipe_name: str = "",
    settings: Mapping[str, Any] | None = None,
    samples: int = 0,
) -> Diagnosis:
    """Look at a SOURCE and at this machine.

    `settings` are those that a run would be started with, by dotted name; `samples` is the number
    of samples to look at (0: as many as some seconds allow).

    >>> print(diagnose("photos/").advice.command)
    """
    diagnosis = Diagnosis(source)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        _examine(diagnosis, recipe_name, dict(settings or {}), samples)
    notes = (str(w.message) for w in caught if issubclass(w.category, UserWarning))
    diagnosis.notes = list(dict.fromkeys(notes))
    return diagnosis


def _examine(diagnosis: Diagnosis, recipe_name: str, typed: dict[str, Any], samples: int) -> None:
    """Fill a diagnosis, as far as the data allow."""
    source = diagnosis.source
    asked = recipe(recipe_name or "small").with_overrides(typed)
    try:
        splits = open_source(source, group=asked.data.group)
        diagnosis.counts = describe_splits(splits)
        inspection = diagnosis.inspection = inspect(splits, asked.data, samples=samples)
        train, _ = train_and_validation(splits, asked.data.validation, seed=asked.train.seed)
    except ValueError as error:
        if not Path(source).expanduser().exists():
            raise
        diagnosis.problems.append(str(error))
        return
    _sort_findings(diagnosis, inspection, asked.data.max_bad_fraction)
    if not inspection.readable:
        return
    if recipe_name and not fits_kind(asked, inspection.spec):
        diagnosis.problems.append(
            f"the recipe {recipe_name} does not take {inspection.spec.kind}s, which {source} "
            f"holds; type the one below"
        )
    advice = diagnosis.advice = advise(
        source,
        inspection,
        train=len(train),
        uniform=train.uniform,
        recipe_name=recipe_name,
        typed=typed,
    )
    batch = asked.train.batch_size if recipe_name or "train.batch_size" in typed else 2
    if len(train) < max(batch, 2):
        diagnosis.problems.append(
            f"{len(train)} training samples do not fill a batch of {batch}; add samples, or type "
            f"--train.batch_size {max(2, advice.config.train.batch_size)}"
        )
    elif len(train) < FEW:
        diagnosis.warnings.append(
            f"{len(train)} training samples are enough to try the program, not to learn from; add "
            f"more, or start from given weights (--encoder.weights)"
        )
    _try(diagnosis, advice, train, inspection)


def _try(diagnosis: Diagnosis, advice: Advice, train: Source, inspection: Inspection) -> None:
    if len(train) < advice.config.train.batch_size:
        return
    readable = _positions(train, inspection.readable)
    try:
        trial = diagnosis.trial = try_steps(advice.config, train, readable)
    except torch.OutOfMemoryError:
        diagnosis.problems.append(
            f"a batch of {advice.config.train.batch_size} does not fit into the memory of the "
            f"GPU; type a smaller --train.batch_size"
        )
        return
    except ValueError as error:  # what pretrain would report
        diagnosis.problems.append(str(error))
        return
    if trial.disk > trial.free_disk:
        diagnosis.problems.append(
            f"checkpoints take {trial.disk / 1e9:.1f} GB, and {trial.free_disk / 1e9:.1f} GB are "
            f"free here; give an --out on another disk"
        )
    if 0 < trial.machine_memory < trial.memory:
        diagnosis.warnings.append("the run takes more memory than this machine has")
    if trial.run_seconds > LONG:
        epochs = max(1, int(advice.config.train.epochs * 8 * 3600 / trial.run_seconds))
        diagnosis.warnings.append(
            f"the run is long; --train.epochs {epochs} takes about "
            f"{trial.run_seconds / 3600 * epochs / advice.config.train.epochs:.0f} hours"
        )


def _positions(train: Source, readable: list[int]) -> list[int]:
    """Where samples of the whole split are in the training samples, validation samples aside."""
    indices = getattr(train, "indices", None)
    if indices is None:
        return readable
    chosen = torch.isin(indices, torch.tensor(readable))
    positions: list[int] = chosen.nonzero()[:, 0].tolist()
    return positions


def _sort_findings(diagnosis: Diagnosis, inspection: Inspection, max_bad: float) -> None:
    """Sort the findings into problems and warnings."""
    for name, split in inspection.splits.items():
        if split.looked_at and split.unreadable == split.looked_at:
            diagnosis.problems.append(
                f"{name}: none of the {split.looked_at} samples that were looked at can be read, "
                f"as {inspection.unreadable.examples[0]}"
            )
        elif split.unreadable > max_bad * split.looked_at:
            diagnosis.problems.append(
                f"{name}: {split.unreadable} of {split.looked_at} samples cannot be read, more "
                f"than the {max_bad:.0%} that are allowed; repair or remove them, or raise "
                f"--data.max_bad_fraction"
            )
    if inspection.leaks.count:
        diagnosis.problems.append(
            f"{_samples(inspection.leaks.count)} in two splits, so results would be too good; "
            f"remove from one, as {inspection.leaks.examples[0]}"
        )
    rest: dict[str, Finding] = {
        "nearly the same in two splits": inspection.near_leaks,
        "constant, with nothing to learn from": inspection.constant,
    }
    for what, finding in rest.items():
        if finding.count:
            diagnosis.warnings.append(f"{_samples(finding.count)} {what}: {finding.examples[0]}")


def _samples(count: int) -> str:
    return "1 sample is" if count == 1 else f"{count} samples are"
