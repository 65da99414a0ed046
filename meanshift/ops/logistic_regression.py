"""Multinomial logistic regression by L-BFGS: a path of penalties, each started near its optimum."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

PENALTIES: tuple[float, ...] = tuple(torch.logspace(5, -6, 45, dtype=torch.float64).tolist())
"""the 45 penalties of the paper, strongest first"""

HISTORY = 5
"""steps from which L-BFGS approximates the curvature"""

SMALL_STEPS = 3
"""steps in a row that must be expected to change little before a fit ends"""

Parameters = Float[Tensor, "classes axes"]
"""weights on the principal axes; the last column is the bias"""


@dataclass(frozen=True)
class LinearClassifier:
    """A fitted linear classifier, with the loss at which the fit ended."""

    weight: Float[Tensor, "classes features"]
    bias: Float[Tensor, " classes"]
    penalty: float
    loss: float
    converged: bool

    @torch.no_grad()
    def __call__(self, features: Float[Tensor, "n features"]) -> Int[Tensor, " n"]:
        """Predict the class of each row."""
        predictions = [
            torch.addmm(self.bias, rows.to(self.weight), self.weight.T).argmax(1)
            for rows in features.split(16_384)
        ]
        return torch.cat(predictions).cpu()


class LogisticRegression:
    """Minimizes the sum of cross-entropies + penalty / 2 |weight|², with an unpenalized bias.

    The optimum is that of scikit-learn with C = 1 / penalty. The problem is solved in coordinates
    in which it is easy: features are centered and rotated to their principal axes, where the
    curvature is nearly diagonal. With fewer images than features, only the axes that the images
    span are used.

    >>> regression = LogisticRegression(features, labels, classes=10)
    >>> best = max(regression.path(), key=lambda classifier: accuracy(classifier(validation)))
    """

    def __init__(
        self,
        features: Float[Tensor, "n features"],
        labels: Int[Tensor, " n"],
        *,
        classes: int,
        tolerance: float = 1e-6,
    ) -> None:
        self.classes = classes
        self.tolerance = tolerance
        self.labels = labels.to(features.device)[None]
        self.mean = features.mean(0)
        centered = features - self.mean
        variances, axes = _principal_axes(centered)
        self.variances = variances.clamp(min=0).to(features)
        self.axes = axes.to(features)
        self.rotated = centered @ self.axes
        # Steps, and the change of the gradient along them without the penalty's part: these are
        # valid at every penalty.
        self.history = deque[tuple[Tensor, Tensor]](maxlen=HISTORY)

    def path(self, penalties: Sequence[float] = PENALTIES) -> Iterator[LinearClassifier]:
        """Yield the optimum at each penalty, started from an extrapolation of the last two."""
        previous = current = self._zeros()
        for penalty in penalties:
            solution = self._solve(penalty, 2 * current - previous, self.tolerance)
            previous = current
            current = solution.parameters
            yield self._classifier(penalty, solution)

    def fit(self, penalty: float, *, start: LinearClassifier | None = None) -> LinearClassifier:
        """Return the optimum at one penalty, with a tenth of the path's tolerance.

        The fit starts from a classifier that is near the optimum, or from stronger penalties.
        """
        if start is None:
            *_, start = self.path([*(p for p in PENALTIES[::4] if p > 1.5 * penalty), penalty])
        bias = start.bias + start.weight @ self.mean
        parameters = torch.cat([start.weight @ self.axes, bias[:, None]], 1)
        return self._classifier(penalty, self._solve(penalty, parameters, self.tolerance / 10.0))

    @torch.no_grad()
    def _solve(
        self, penalty: float, start: Parameters, tolerance: float, *, max_iterations: int = 500
    ) -> _Solution:
        """Run L-BFGS until steps would reduce the loss by less than a fraction `tolerance`.

        Libraries stop by the size of the gradient, which at the weakest penalties leaves a hundred
        times the lowest loss, and their first step has no scale. Here each coordinate is scaled by
        its curvature, so that a step of length one is about right from the beginning. The expected
        reduction is that of an approximate curvature, so `SMALL_STEPS` in a row must be small.
        """
        parameters = start.to(self.rotated)
        point = self._evaluate(parameters, penalty)
        scales = self._inverse_curvature(point.errors, penalty)
        known = (_pair(*pair, penalty) for pair in self.history)
        pairs = deque((pair for pair in known if pair.curvature > 0), maxlen=HISTORY)
        small_steps = 0
        for _ in range(max_iterations):
            direction = -_inverse_hessian_product(point.gradient, scales, pairs)
            slope = (direction * point.gradient).sum()
            is_small = bool(-slope / 2 <= tolerance * point.loss)
            small_steps = small_steps + 1 if is_small else 0
            if small_steps == SMALL_STEPS:
                return _Solution(parameters, float(point.loss), True)
            found = self._line_search(parameters, direction, point.loss, slope, penalty)
            if found is None:
                break  # rounding hides any further improvement
            step, next_point = found
            gradient_change = next_point.gradient - point.gradient
            parameters = parameters + step
            point = next_point
            if (step * gradient_change).sum() > 0:  # else the change is a rounding error
                self.history.append((step, gradient_change - _penalty_part(step, penalty)))
                pairs.append(_pair(*self.history[-1], penalty))
        if self.rotated.dtype == torch.float32:  # later penalties need float64 as well
            self.rotated = self.rotated.double()
            self.history.clear()
            return self._solve(penalty, parameters, tolerance)
        return _Solution(parameters, float(point.loss), False)

    def _line_search(
        self, start: Parameters, direction: Parameters, loss: Tensor, slope: Tensor, penalty: float
    ) -> tuple[Parameters, _Point] | None:
        """Return a step that reduces the loss enough (Armijo's rule), and the point it leads to."""
        length = 1.0
        while length > 1e-4:
            point = self._evaluate(start + length * direction, penalty)
            if point.loss <= loss + 1e-4 * length * slope:
                return length * direction, point
            # The minimum of the parabola through both losses and the slope.
            bend = point.loss - loss - length * slope
            length *= min(0.5, max(0.1, float(-length * slope / (2 * bend))))
        return None

    def _inverse_curvature(
        self, errors: Float[Tensor, "classes n"], penalty: float
    ) -> Float[Tensor, "classes axes"]:
        """An estimate of the inverse diagonal of the Hessian."""
        curvature = (errors.abs() * (1 - errors.abs())).mean(1, keepdim=True).clamp(min=1e-12)
        weights = (penalty + curvature * self.variances).reciprocal()
        return torch.cat([weights, 1 / (errors.shape[1] * curvature)], 1)

    def _evaluate(self, parameters: Parameters, penalty: float) -> _Point:
        """Compute the loss, its gradient, and the prediction errors."""
        weight = parameters[:, :-1]
        loss, errors = self._cross_entropy(parameters)
        loss += penalty / 2 * weight.double().square().sum()
        weight_gradient = (errors @ self.rotated).add_(weight, alpha=penalty)
        gradient = torch.cat([weight_gradient, errors.sum(1, keepdim=True)], 1)
        return _Point(loss, gradient, errors)

    def _cross_entropy(
        self, parameters: Parameters
    ) -> tuple[Float[Tensor, ""], Float[Tensor, "classes n"]]:
        """Return the sum of cross-entropies and the predicted minus the true probabilities.

        Both are exact where they are nearly 0, too: logits are relative to that of the true class.
        """
        logits = torch.addmm(parameters[:, -1:], parameters[:, :-1], self.rotated.T)
        logits -= logits.gather(0, self.labels)
        highest = logits.amax(0, keepdim=True)  # 0 where the true class is predicted
        others = (logits - highest).exp_().scatter_(0, self.labels, 0)
        true = (-highest).exp_()
        rest = others.sum(0, keepdim=True)
        total = true + rest
        loss = torch.where(highest > 0, highest + total.log(), rest.log1p()).double().sum()
        return loss, others.div_(total).scatter_(0, self.labels, -rest / total)

    def _classifier(self, penalty: float, solution: _Solution) -> LinearClassifier:
        parameters = solution.parameters.to(self.axes)
        weight = parameters[:, :-1] @ self.axes.T
        bias = parameters[:, -1] - weight @ self.mean
        return LinearClassifier(weight, bias, penalty, solution.loss, solution.converged)

    def _zeros(self) -> Parameters:
        zeros: Tensor = self.rotated.new_zeros(self.classes, self.rotated.shape[1] + 1)
        return zeros


class _Solution(NamedTuple):
    parameters: Tensor
    loss: float
    converged: bool


class _Point(NamedTuple):
    """The objective at some parameters."""

    loss: Tensor
    gradient: Tensor
    errors: Tensor
    """predicted minus true probabilities, classes x images"""


class _Pair(NamedTuple):
    """A step of L-BFGS, the change of the gradient along it, and their product."""

    step: Tensor
    gradient_change: Tensor
    curvature: Tensor


def _principal_axes(centered: Tensor) -> tuple[Tensor, Tensor]:
    """Return the eigenvalues and eigenvectors of the scatter matrix of centered features."""
    if len(centered) >= centered.shape[1]:
        eigenvalues, axes = torch.linalg.eigh(centered.T @ centered)
        return eigenvalues, axes
    rows = centered.double()  # fewer images than features: use the smaller Gram matrix
    eigenvalues, vectors = torch.linalg.eigh(rows @ rows.T)
    nonzero = eigenvalues > 1e-10 * eigenvalues[-1]
    eigenvalues = eigenvalues[nonzero]
    return eigenvalues, rows.T @ (vectors[:, nonzero] / eigenvalues.sqrt())


def _penalty_part(step: Parameters, penalty: float) -> Parameters:
    """The change of the penalty's gradient along a step; the bias has no penalty."""
    change = penalty * step
    change[:, -1] = 0
    return change


def _pair(step: Parameters, unpenalized_change: Parameters, penalty: float) -> _Pair:
    change = unpenalized_change + _penalty_part(step, penalty)
    return _Pair(step, change, (step * change).sum())


def _inverse_hessian_product(
    gradient: Parameters, scales: Parameters, pairs: Sequence[_Pair]
) -> Parameters:
    """Multiply a gradient by the inverse Hessian that the pairs imply: L-BFGS's two loops."""
    coefficients = []
    for step, change, curvature in reversed(pairs):
        coefficients.append((step * gradient).sum() / curvature)
        gradient = gradient - coefficients[-1] * change
    product = gradient * scales
    if pairs:
        last = pairs[-1]
        product *= last.curvature / (last.gradient_change.square() * scales).sum()
    for (step, change, curvature), coefficient in zip(pairs, reversed(coefficients), strict=True):
        product += (coefficient - (change * product).sum() / curvature) * step
    return product
