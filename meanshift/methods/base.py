"""The contract of a method: what training, checkpoints, snapshots and reports know of it.

A method is a module with an `online` encoder. It declares its views, is built from its settings,
and turns a batch of views into a loss. Everything else has a default. See docs/architecture.md for
a whole method in a few lines.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor, nn

from meanshift.config import Views, ViewSpec
from meanshift.methods.finite import (
    DivergedError,
    FiniteCheck,
    NotFiniteError,
    first_with_nan,
)
from meanshift.methods.memory_bank import MemoryBank
from meanshift.methods.sample_memory import SampleMemory
from meanshift.models.encoder import Encoder

Metrics = dict[str, tuple[Tensor, Tensor | int]]
"""name: (mean over samples, number of samples that it is the mean of)"""


@dataclass(frozen=True)
class StepOutput:
    """What one step returns; only `loss` carries a gradient.

    Nothing here may wait for the device.
    """

    loss: Float[Tensor, ""]
    embeddings: Float[Tensor, "batch dim"]
    """target embeddings of unit length, before any whitening: the loop measures their rank and
    spread and recognizes a collapse by them"""
    metrics: Metrics = field(default_factory=dict)
    """`agreement`, the mean cosine of predictions and raw targets or of the two views, helps to
    detect a collapse"""


@dataclass(frozen=True)
class Batch:
    """The input of one step, on the device."""

    views: tuple[Tensor, ...]
    """one tensor per view, in the order of `Method.views`; a view with a count gives several"""
    ids: Int[Tensor, " batch"]
    labels: Int[Tensor, " batch"] | None = None
    """for metrics only; -1 is unknown"""
    shuffle_seed: int | None = None
    """permute the images over all processes, and over the groups of batch norm if there are any,
    before a forward pass without gradient"""


@dataclass(frozen=True)
class Progress:
    """How far training is."""

    step: int
    """steps taken so far"""
    steps_per_epoch: int
    epochs: int

    @property
    def epoch(self) -> int:
        """Whole epochs so far."""
        return self.step // self.steps_per_epoch

    @property
    def fraction(self) -> float:
        """0 at the first step, 1 after the last one."""
        return self.step / (self.steps_per_epoch * self.epochs)


@dataclass(frozen=True)
class BuildContext:
    """What a method is built with."""

    encoder: Callable[..., Encoder]
    """`encoder(dim=0, hidden=0)`: a backbone with a projector to `dim` values, from the run's
    settings; `encoder(projector=build)` with the projector `build(features)`"""
    dataset_size: int = 0
    classes: int = 0
    batch_size: int = 0
    """images per update, over all processes and accumulated batches"""
    seed: int = 0


class Method(nn.Module, ABC):
    """A self-supervised method. Subclasses define `views`, `build` and `forward`."""

    online: nn.Module
    """the trained encoder; its `backbone` is evaluated and exported"""

    def __init__(self) -> None:
        super().__init__()
        self._finite = FiniteCheck()

    def __call__(self, *views: Any, **more: Any) -> Any:
        """`forward`, which raises an error for values that are not finite and names where.

        A view is checked before anything is changed. On a GPU the error comes some steps later.
        """
        try:
            self._finite.raise_arrived()
            for index, view in enumerate(views):
                if isinstance(view, Tensor) and view.is_floating_point():
                    self._finite.add(self._view_name(index), view)
            output = super().__call__(*views, **more)
            self._finite.add("the embeddings", output.embeddings)
            self._finite.add("the loss", output.loss)
        except NotFiniteError as error:
            raise self._explain_not_finite(error) from None
        return output

    def _view_name(self, index: int) -> str:
        names = self._positional
        return f"the input `{names[index]}`" if index < len(names) else f"the input {index}"

    @cached_property
    def _positional(self) -> list[str]:
        parameters = inspect.signature(self.forward).parameters.values()
        return [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]

    def _explain_not_finite(self, error: NotFiniteError) -> NotFiniteError:
        """The error with its likely cause: an input, a memory, or the network itself."""
        if "the input" in str(error):
            return NotFiniteError(f"{error}; need finite values: check what makes this input")
        culprit = first_with_nan(self)
        owner = self.get_submodule(culprit.rpartition(".")[0]) if culprit else None
        if "the loss" in str(error) and isinstance(owner, (MemoryBank, SampleMemory)):
            return NotFiniteError(f"{error}, from NaN in {culprit}; load an earlier checkpoint")
        cause = f"NaN in {culprit}" if culprit else "the inputs and weights are finite"
        return DivergedError(f"{error} ({cause}): training has diverged; lower the learning rate")

    @classmethod
    @abstractmethod
    def views(cls, settings: Any, operators: Views) -> tuple[ViewSpec, ...]:
        """The views of each image, from the method's settings and those of the augmentations."""

    @classmethod
    @abstractmethod
    def build(cls, settings: Any, context: BuildContext) -> Method:
        """The method with its initial weights; the global random generator is seeded."""

    def step(self, batch: Batch) -> StepOutput:
        """One step of training up to the loss: what the loop calls."""
        output: StepOutput = self(*batch.views, ids=batch.ids, labels=batch.labels)
        return output

    def encoders(self) -> Sequence[nn.Module]:
        """The modules that `train.compile` compiles."""
        return [self.online]

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Groups of `params` for the optimizer.

        A group may also have `lr_scale` (default 1), `scheduled` (default True; False keeps the
        learning rate constant) and `weight_decay` (default that of the settings). Every optimizer
        of the settings takes them; `optim.decay_norms` and LARS put norms and biases into groups
        of their own.
        """
        return [{"params": [p for p in self.parameters() if p.requires_grad]}]

    def set_progress(self, now: Progress) -> dict[str, float | int]:
        """Apply schedules before a step; what is returned is logged."""
        return {}

    def begin_session(self, batches: Callable[[], Iterator[Batch]]) -> None:
        """Called before the first step, also of a run that continues: compute what is not saved.

        `batches` is that of `begin_epoch`.
        """

    def begin_epoch(self, now: Progress, batches: Callable[[], Iterator[Batch]]) -> None:
        """Called before the first step of an epoch, for methods that cluster or assign.

        `batches()` is a pass over the training data in evaluation views; each process has its part.
        A run that continues within an epoch does not call it again: results belong in buffers.
        """

    def before_forward(self, now: Progress) -> None:
        """Called before `step`."""

    def before_update(self, now: Progress) -> None:
        """Called between the backward pass and the optimizer."""

    def after_update(self, now: Progress | None = None) -> None:
        """Called after the optimizer: moving averages."""

    def process_local(self) -> dict[str, MemoryBank]:
        """Memory banks by name: their buffers are not broadcast from the first process, and those
        that are sharded are saved in parts."""
        return {name: m for name, m in self.named_modules() if isinstance(m, MemoryBank)}

    def not_saved(self) -> tuple[str, ...]:
        """Prefixes of names in the state dict that are not saved, such as a frozen teacher's."""
        return ()

    def card(self) -> dict[str, Any]:
        """What environment.json records of the method, such as the fingerprint of a teacher."""
        return {}

    def snapshot_metrics(
        self, operators: Views, batches: Callable[[Sequence[ViewSpec]], Iterator[Batch]]
    ) -> dict[str, float]:
        """Metrics of a snapshot; `batches(views)` gives the labeled snapshot images in views."""
        return {}

    def memory_use(self, batch_size: int) -> dict[str, int]:
        """Bytes by name of what is large beside the weights, such as a row for each sample.

        `batch_size` is the number of images that a process has in a step.
        """
        memories = [m for m in self.modules() if isinstance(m, SampleMemory)]
        if not memories:
            return {}
        name = f"a row for each of {len(memories[0].rows):,} samples, also in each checkpoint"
        return {name: sum(buffer.nbytes for m in memories for buffer in m.buffers())}

    def memory_report(self, batch_size: int) -> str:
        """`memory_use` in words, which are printed before the first step; "" if there is none."""
        parts = [
            f"{name}: {size / 1e6:,.0f} MB" for name, size in self.memory_use(batch_size).items()
        ]
        return f"memory in each process: {'; '.join(parts)}" if parts else ""

    def collapse_hint(self) -> str:
        """The likely cause of a collapse, in words, for the warning."""
        return (
            "the views are too alike (stronger views, smaller views.crop_area), or the learning "
            "rate is too high (halve optim.lr)"
        )


def average(one: StepOutput, two: StepOutput) -> StepOutput:
    """The mean loss and metrics of both directions of a symmetric loss."""
    metrics = {
        name: ((mean + two.metrics[name][0]) / 2, weight)
        for name, (mean, weight) in one.metrics.items()
    }
    return StepOutput((one.loss + two.loss) / 2, one.embeddings, metrics)
