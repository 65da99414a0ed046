"""Multinomial logistic regression by L-BFGS: a whole path of penalties, each begun near its end."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

PENALTIES: tuple[float, ...] = tuple(torch.logspace(5, -6, 45, dtype=torch.float64).tolist())
"""The paper's 45, strongest first."""

MEMORY = 5  # steps from which the curvature is known


@dataclass(frozen=True)
class Layer:
    """A linear classifier, and the loss at which its fit ended."""

    weight: Float[Tensor, "classes features"]
    bias: Float[Tensor, " classes"]
    penalty: float
    loss: float
    converged: bool

    @torch.no_grad()
    def __call__(self, features: Float[Tensor, "n features"]) -> Int[Tensor, " n"]:
        """The class of each row."""
        parts = [
            torch.addmm(self.bias, rows.to(self.weight), self.weight.T).argmax(1)
            for rows in features.split(16_384)
        ]
        return torch.cat(parts).cpu()


class Problem:
    """Sum of cross-entropies + penalty / 2 |weight|², a free bias: as scikit-learn with C = 1 / it.

    It is solved where it is easy: features centered and turned to their principal axes, where the
    curvature is nearly diagonal, and scaled by that. The optimum is the same; where there are fewer
    images than features, only the axes that they span are left.

    >>> problem = Problem(features, labels, classes=10)
    >>> best = max(problem.path(), key=lambda layer: accuracy(layer(held_out)))
    """

    def __init__(
        self,
        features: Float[Tensor, "n features"],
        labels: Int[Tensor, " n"],
        *,
        classes: int,
        tolerance: float = 1e-6,
    ) -> None:
        self.classes, self.tolerance = classes, tolerance
        self.own = labels.to(features.device)[None]
        self.mean = features.mean(0)
        centered = features - self.mean
        few = len(features) < features.shape[1]
        if few:  # from the axes of the images to those of the features
            exact = centered.double()
            spread, axes = torch.linalg.eigh(exact @ exact.T)
            kept = spread > 1e-10 * spread[-1]
            spread, axes = spread[kept], axes[:, kept]
            axes = exact.T @ (axes / spread.sqrt())
        else:
            spread, axes = torch.linalg.eigh(centered.T @ centered)
        self.spread, self.axes = spread.clamp(min=0).to(features), axes.to(features)
        self.turned = centered @ self.axes
        # Steps, and how they changed the gradient but for the penalty: good for any other penalty.
        self.past = deque[tuple[Tensor, Tensor]](maxlen=MEMORY)

    def path(self, penalties: Sequence[float] = PENALTIES) -> Iterator[Layer]:
        """The optimum at each penalty, begun on the line through the last two."""
        before = now = self._zeros()
        for penalty in penalties:
            found = self._solve(penalty, 2 * now - before)
            before, now = now, found[0]
            yield self._layer(penalty, *found)

    def fit(self, penalty: float, *, near: Layer | None = None) -> Layer:
        """The optimum at one penalty: from a layer that should be near, or from stronger ones.

        Ten times nearer to it than those of a path, which are many.
        """
        if near is None:
            *_, near = self.path([*(p for p in PENALTIES[::4] if p > 1.5 * penalty), penalty])
        bias = near.bias + near.weight @ self.mean
        start = torch.cat([near.weight @ self.axes, bias[:, None]], 1)
        return self._layer(penalty, *self._solve(penalty, start, finer=10.0))

    @torch.no_grad()
    def _solve(
        self,
        penalty: float,
        start: Float[Tensor, "classes axes"],
        *,
        finer: float = 1.0,
        most: int = 500,
    ) -> tuple[Float[Tensor, "classes axes"], float, bool]:
        """L-BFGS until a step would gain a tiny share of the loss; the last column is the bias.

        Written out because the libraries' end by the size of the gradient, which at the weakest
        penalties leaves a hundred times the lowest loss, and begin with a step of no length. Each
        coordinate is scaled by its curvature, so that from the first a step of one is about right.
        """
        now = start.to(self.turned)
        loss, gradient, error = self._at(now, penalty)
        curvature = (error.abs() * (1 - error.abs())).mean(1, keepdim=True).clamp(min=1e-12)
        scales = (penalty + curvature * self.spread).reciprocal()
        scales = torch.cat([scales, 1 / (error.shape[1] * curvature)], 1)
        known = (_pair(*pair, penalty) for pair in self.past)
        past = deque((pair for pair in known if pair[2] > 0), maxlen=MEMORY)
        for _ in range(most):
            step = -_newton(gradient, scales, past)
            slope = (step * gradient).sum()
            if -slope / 2 <= self.tolerance / finer * loss:
                return now, float(loss), True
            length = 1.0
            while length > 1e-4:
                there = self._at(now + length * step, penalty)
                if there[0] <= loss + 1e-4 * length * slope:
                    break
                # the lowest point of the parabola through both losses and the slope
                bend = there[0] - loss - length * slope
                length *= min(0.5, max(0.1, float(-length * slope / (2 * bend))))
            else:
                break  # rounding hides what is left to gain
            moved, change = length * step, there[1] - gradient
            now, (loss, gradient, _) = now + moved, there
            if (moved * change).sum() > 0:  # else rounding has the better of it
                self.past.append((moved, change - _pull(moved, penalty)))
                past.append(_pair(*self.past[-1], penalty))
        if self.turned.dtype == torch.float32:  # for good: where it is needed once, it is again
            self.turned = self.turned.double()
            self.past.clear()
            return self._solve(penalty, now, finer=finer)
        return now, float(loss), False

    def _errors(
        self, inside: Float[Tensor, "classes axes"]
    ) -> tuple[Float[Tensor, ""], Float[Tensor, "classes n"]]:
        """Sum of cross-entropies, and chance minus truth: exact also where both are nearly 0."""
        scores = torch.addmm(inside[:, -1:], inside[:, :-1], self.turned.T)
        scores -= scores.gather(0, self.own)
        most = scores.amax(0, keepdim=True)  # 0 where the true class is ahead
        others = (scores - most).exp_().scatter_(0, self.own, 0)
        own, rest = (-most).exp_(), others.sum(0, keepdim=True)
        whole = own + rest
        loss = torch.where(most > 0, most + whole.log(), rest.log1p()).double().sum()
        return loss, others.div_(whole).scatter_(0, self.own, -rest / whole)

    def _at(
        self, inside: Float[Tensor, "classes axes"], penalty: float
    ) -> tuple[Float[Tensor, ""], Float[Tensor, "classes axes"], Float[Tensor, "classes n"]]:
        """Loss, its gradient, and chance minus truth."""
        weight = inside[:, :-1]
        loss, error = self._errors(inside)
        loss += penalty / 2 * weight.double().square().sum()
        inner = (error @ self.turned).add_(weight, alpha=penalty)
        return loss, torch.cat([inner, error.sum(1, keepdim=True)], 1), error

    def _layer(
        self, penalty: float, inside: Float[Tensor, "classes axes"], loss: float, converged: bool
    ) -> Layer:
        inside = inside.to(self.axes)
        weight = inside[:, :-1] @ self.axes.T
        return Layer(weight, inside[:, -1] - weight @ self.mean, penalty, loss, converged)

    def _zeros(self) -> Float[Tensor, "classes axes"]:
        zeros: Tensor = self.turned.new_zeros(self.classes, self.turned.shape[1] + 1)
        return zeros


def _pull(moved: Float[Tensor, "classes axes"], penalty: float) -> Float[Tensor, "classes axes"]:
    """How the penalty changes the gradient along a step; it leaves the bias alone."""
    pull = penalty * moved
    pull[:, -1] = 0
    return pull


def _pair(
    moved: Float[Tensor, "classes axes"], bend: Float[Tensor, "classes axes"], penalty: float
) -> tuple[Tensor, Tensor, Tensor]:
    """A step, the change of the gradient along it at a penalty, and their product."""
    change = bend + _pull(moved, penalty)
    return moved, change, (moved * change).sum()


def _newton(
    gradient: Float[Tensor, "classes axes"],
    scales: Float[Tensor, "classes axes"],
    past: Sequence[tuple[Tensor, Tensor, Tensor]],
) -> Float[Tensor, "classes axes"]:
    """The gradient by the inverse curvature that the past steps tell: the two loops of L-BFGS."""
    shares = []
    for moved, change, bent in reversed(past):
        shares.append((moved * gradient).sum() / bent)
        gradient = gradient - shares[-1] * change
    step = gradient * scales
    if past:
        _, change, bent = past[-1]
        step *= bent / (change.square() * scales).sum()
    for (moved, change, bent), share in zip(past, reversed(shares), strict=True):
        step += (share - (change * step).sum() / bent) * moved
    return step
