"""One step of training: views, forward and backward pass, update of the weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from meanshift.data import loader
from meanshift.methods import Batch, Method, Progress, StepOutput
from meanshift.methods.finite import DivergedError
from meanshift.models.encoder import memory_format
from meanshift.runtime import distributed, rng
from meanshift.runtime.device import autocast

if TYPE_CHECKING:
    from meanshift.training.session import Session


class _StepModule(nn.Module):
    """The step of a method as a forward pass, which is what DistributedDataParallel wraps."""

    def __init__(self, method: Method) -> None:
        super().__init__()
        self.method = method

    def forward(self, batch: Batch) -> StepOutput:
        return self.method.step(batch)


class TrainStep:
    """Takes the steps of a session."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.layout = memory_format(session.method)
        if session.config.train.compile:
            for encoder in session.method.encoders():
                encoder.compile()
        self.heads_only: bool | None = None
        self._begin_phase(session.state.step)

    def __call__(self, images: loader.Batch, now: Progress) -> StepOutput:
        """Take one step: views, loss, gradients and, unless more are accumulated, the update."""
        session = self.session
        self._begin_phase(now.step)
        updates = session.schedule.updates_after(now.step)
        # What a network draws itself, such as dropout, depends on the step and on nothing before.
        torch.manual_seed(self._seed(now.step, rng.NETWORK) + distributed.rank())
        batch = self._augment(images)
        session.method.before_forward(now)
        with self._no_sync(updates):
            with autocast(session.device, session.precision), self._explain_divergence(now.step):
                output: StepOutput = self.module(batch)
            loss = output.loss * self._loss_scale(batch, now.step)
            session.state.scaler.scale(loss).backward()
        if updates:
            self._update(now)
        return output

    def _begin_phase(self, step: int) -> None:
        """Train the heads alone or everything, as `optim.heads_first` gives it for a step.

        DDP expects a gradient of every parameter that requires one when it is wrapped, so each
        phase has a wrapper of its own.
        """
        heads_only = step < self.session.schedule.heads_steps
        if heads_only == self.heads_only:
            return
        self.heads_only = heads_only
        for parameter in self.session.trained_second:
            parameter.requires_grad_(not heads_only)
        # First without a wrapper: the hooks of the old one end with it.
        self.module: nn.Module = _StepModule(self.session.method)
        self.module = distributed.data_parallel(self.module, self._warm_up)

    def _augment(self, images: loader.Batch) -> Batch:
        """The views of a batch, on the device."""
        session = self.session
        images = images.to(session.device)
        views = session.transform.finish(images.images, images.epoch, images.ids)
        shuffled = session.config.train.batch_norm == "shuffle"
        return Batch(
            views=tuple(
                # Jigsaw patches have one dimension more, which channels-last does not know.
                view.contiguous(memory_format=self.layout) if view.ndim == 4 else view
                for view in views
            ),
            ids=images.ids.to(session.device, non_blocking=True),
            labels=images.labels,
            shuffle_seed=self._seed(images.step, rng.SHUFFLE) if shuffled else None,
        )

    def _update(self, now: Progress) -> None:
        """Apply the gradients, then the method's moving averages."""
        state = self.session.state
        clip_norm = self.session.config.optim.clip_norm
        state.scaler.unscale_(state.optimizer)
        self.session.method.before_update(now)
        if clip_norm:
            parameters = [p for group in state.optimizer.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(parameters, clip_norm)
        state.scaler.step(state.optimizer)
        state.scaler.update()
        state.optimizer.zero_grad(set_to_none=True)
        self.session.method.after_update(now)

    def _loss_scale(self, batch: Batch, step: int) -> float:
        """The factor that makes an update the mean gradient of all images of its batches.

        DDP averages the gradients of the processes, whose parts of a batch may differ in size.
        """
        part = len(batch.ids) * distributed.world_size() / self.session.config.train.batch_size
        return part / self.session.schedule.update_size(step)

    @contextmanager
    def _explain_divergence(self, step: int) -> Iterator[None]:
        """Add the step, and what to type, to the error of a network that has diverged."""
        try:
            yield
        except DivergedError as error:
            raise ValueError(
                f"{error}. This is step {step + 1} and the run cannot continue; start another one "
                f"with an --optim.lr below {self.session.config.optim.lr:g}"
            ) from error

    def _no_sync(self, updates: bool) -> AbstractContextManager[Any]:
        """Without an update the gradients of the processes need not be averaged yet."""
        if updates or not isinstance(self.module, DistributedDataParallel):
            return nullcontext()
        return self.module.no_sync()

    def _seed(self, step: int, stream: int) -> int:
        return rng.derive_seed(self.session.config.train.seed, step, stream)

    def _warm_up(self, module: nn.Module) -> torch.Tensor:
        """The loss of two black images; the method is in eval mode, so nothing is enqueued."""
        session = self.session
        transform = session.transform
        views = tuple(
            torch.zeros(2, *transform.shape(view), device=session.device)
            for view in transform.single_views()
        )
        output: StepOutput = module(Batch(views, torch.arange(2, device=session.device)))
        return output.loss
