"""Steps of a method in one or several processes, and a check of the direction of a gradient."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from meanshift.methods import Method, StepOutput
from meanshift.runtime import distributed
from tests.support.forked import in_processes


class _Step(nn.Module):
    def __init__(self, method: Method) -> None:
        super().__init__()
        self.method = method

    def forward(self, views: Tensor) -> StepOutput:
        output: StepOutput = self.method(*views)
        return output


def random_views(step: int, *shape: int, views: int = 2) -> Tensor:
    """The views of a batch in float64."""
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(views, *shape, generator=generator, dtype=torch.float64)


def take_steps(
    build: Callable[[], Method], count: int, shape: tuple[int, int]
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses and gradients of some steps as the training loop takes them, and the state after them.

    Each process has its part of the batch; parts may differ in size. DDP averages the gradients.
    """
    method = build().double()
    module = distributed.data_parallel(
        _Step(method), lambda module: module(torch.zeros(2, 2, shape[1]).double()).loss
    )
    learning = [p for p in method.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(learning, 0.1, momentum=0.9)
    first, end = distributed.shard_range(shape[0])
    found = []
    for step in range(count):
        output = module(random_views(step, *shape)[:, first:end])
        loss = output.loss * (end - first) * distributed.world_size() / shape[0]
        optimizer.zero_grad()
        loss.backward()
        whole_loss = loss.detach().clone()
        distributed.all_mean_(whole_loss)
        found += [whole_loss, *(p.grad.clone() for p in learning if p.grad is not None)]
        optimizer.step()
        method.after_update()
    tensors = {k: v.detach() for k, v in method.state_dict().items() if isinstance(v, Tensor)}
    return found, tensors


def take_view_steps(
    method: Method, view: Callable[[int], Tensor], ids: Callable[[int], Tensor], count: int
) -> tuple[Tensor, list[Tensor]]:
    """Losses of some steps of a method of one view, and the gradients of the last step.

    Each process has its part of the batch; gradients are averaged.
    """
    parameters = list(method.online.parameters())
    optimizer = torch.optim.SGD(parameters, 0.1)
    losses = []
    for step in range(count):
        first, end = distributed.shard_range(len(ids(step)))
        output = method(view(step)[first:end], ids=ids(step)[first:end])
        optimizer.zero_grad()
        output.loss.backward()
        for parameter in parameters:
            assert parameter.grad is not None
            distributed.all_mean_(parameter.grad)
        losses.append(output.loss.detach())
        gradients = [p.grad.clone() for p in parameters if p.grad is not None]
        optimizer.step()
        method.after_update()
    return torch.stack(losses), gradients


def assert_parts_equal_the_whole(part: Callable[[], tuple[Tensor, ...]]) -> None:
    """Two processes return the mean losses of one (first) and all of its other tensors."""
    (whole,) = in_processes(1, part)
    parts = in_processes(2, part)
    mean_loss = sum(result[0] for result in parts) / 2
    torch.testing.assert_close(mean_loss, whole[0], atol=1e-12, rtol=0)
    for result in parts:
        torch.testing.assert_close(result[1:], whole[1:], atol=1e-12, rtol=0)


def assert_step_lowers(term: Callable[[], Tensor], parameters: list[nn.Parameter]) -> None:
    """A small step against the gradient lowers the term by what the gradient promises."""
    before = term()
    gradients = torch.autograd.grad(before, parameters)
    square = sum(float(g.square().sum()) for g in gradients)
    assert square > 0
    size = 1e-6 / square**0.5
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter -= size * gradient
        decrease = float(before - term())
    torch.testing.assert_close(decrease, size * square, rtol=1e-3, atol=0)
