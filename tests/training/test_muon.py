"""Muon against the textbook iteration, torch's own Muon and torch's AdamW."""

import pytest
import torch
from torch import nn

from meanshift.training.muon import Muon, orthogonalize


def newton_schulz(matrix):
    """The iteration as it is published, in float64."""
    x = matrix.double() if len(matrix) <= matrix.shape[1] else matrix.double().T
    x = x / x.norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x if len(matrix) <= matrix.shape[1] else x.T


@pytest.mark.parametrize("shape", [(20, 50), (50, 20), (30, 30), (1, 9)])
def test_orthogonalization_is_the_published_iteration(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    result = orthogonalize(matrix)
    torch.testing.assert_close(result.double(), newton_schulz(matrix), rtol=1e-3, atol=1e-4)
    if shape[0] != shape[1]:  # a square random matrix has singular values close to 0
        assert torch.linalg.svdvals(result).sub(1).abs().max() < 0.4


def test_a_matrix_of_low_rank_and_zeros_stay_finite():
    generator = torch.Generator().manual_seed(1)
    low = torch.randn(64, 3, generator=generator) @ torch.randn(3, 100, generator=generator)
    torch.testing.assert_close(
        orthogonalize(1e-6 * low).double(), newton_schulz(low), rtol=0, atol=1e-3
    )
    assert torch.equal(orthogonalize(torch.zeros(3, 4)), torch.zeros(3, 4))


def test_matrices_follow_torchs_muon_and_the_rest_torchs_adamw():
    torch.manual_seed(0)
    matrix = nn.Parameter(torch.randn(6, 16))
    vector = nn.Parameter(torch.randn(6))
    same_matrix, same_vector = (nn.Parameter(p.detach().clone()) for p in (matrix, vector))
    groups = [{"params": [matrix], "matrices": True}, {"params": [vector]}]
    optimizer = Muon(groups, 0.01, momentum=0.8, weight_decay=0.1)
    muon = torch.optim.Muon(
        [same_matrix], 0.01, weight_decay=0.1, momentum=0.8, adjust_lr_fn="match_rms_adamw"
    )
    adamw = torch.optim.AdamW([same_vector], 0.01, betas=(0.8, 0.999), weight_decay=0.1, fused=True)
    for step in range(4):
        for parameter, same in ((matrix, same_matrix), (vector, same_vector)):
            parameter.grad = torch.randn_like(parameter)
            same.grad = parameter.grad.clone()
        for group in (*optimizer.param_groups, *muon.param_groups, *adamw.param_groups):
            group["lr"] = 0.01 / (step + 1)
        for each in (optimizer, muon, adamw):
            each.step()
    assert torch.equal(vector, same_vector)
    torch.testing.assert_close(matrix, same_matrix, rtol=0, atol=1e-3)  # torch's is bfloat16
    assert (matrix - same_matrix).abs().max() < 0.05 * (0.01 * 0.2 * 4)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_convolution_is_a_matrix_with_a_row_per_filter(layout):
    torch.manual_seed(0)
    weight, gradient = torch.randn(2, 8, 3, 3, 3)
    matrix = nn.Parameter(weight.flatten(1).clone())
    convolution = nn.Parameter(weight.clone(memory_format=layout))
    matrix.grad = gradient.flatten(1)
    convolution.grad = gradient.contiguous(memory_format=layout)
    groups = [{"params": [matrix, convolution], "matrices": True}]
    Muon(groups, 0.1).step()
    assert torch.equal(convolution.flatten(1), matrix)
    assert not torch.equal(convolution, weight)
