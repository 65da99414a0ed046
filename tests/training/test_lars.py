"""LARS against a naive reference."""

import numpy as np
import torch
from torch import nn

from meanshift.training.lars import LARS


def naive_lars(weight, gradients, *, lr, momentum, decay, trust=0.001):
    """The update of Barlow Twins' program, for one layer in float64."""
    weight = weight.copy()
    average = np.zeros_like(weight)
    for gradient in gradients:
        update = gradient + decay * weight
        norms = np.linalg.norm(weight), np.linalg.norm(update)
        if min(norms) > 0:
            update = update * trust * norms[0] / norms[1]
        average = momentum * average + update
        weight = weight - lr * average
    return weight


def test_layers_are_adapted_and_vectors_are_plain_sgd():
    torch.manual_seed(0)
    weight = nn.Parameter(3 * torch.randn(5, 4, 3, 3, dtype=torch.float64))
    zero = nn.Parameter(torch.zeros(2, 3, dtype=torch.float64))
    bias = nn.Parameter(torch.randn(5, dtype=torch.float64))
    plain = nn.Parameter(bias.detach().clone())
    idle = nn.Parameter(torch.ones(2, 2))
    start = [p.detach().numpy().copy() for p in (weight, zero)]
    groups = [
        {"params": [weight, zero, idle]},
        {"params": [bias], "adapt": False, "weight_decay": 0.0},
    ]
    optimizer = LARS(groups, 0.3, momentum=0.8, weight_decay=0.02)
    sgd = torch.optim.SGD([plain], 0.3, momentum=0.8)
    gradients = []
    for _ in range(4):
        gradients.append([torch.randn_like(p) for p in (weight, zero, bias)])
        weight.grad, zero.grad, bias.grad = gradients[-1]
        plain.grad = bias.grad
        optimizer.step()
        sgd.step()
    options = {"lr": 0.3, "momentum": 0.8, "decay": 0.02}
    for index, parameter in enumerate((weight, zero)):
        expected = naive_lars(start[index], [g[index].numpy() for g in gradients], **options)
        np.testing.assert_allclose(parameter.detach().numpy(), expected, rtol=1e-12)
    torch.testing.assert_close(bias, plain, rtol=1e-12, atol=0)
    assert torch.equal(idle, torch.ones(2, 2)) and idle not in optimizer.state
