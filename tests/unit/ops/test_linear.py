"""Several linear layers on one input as one product."""

from __future__ import annotations

import pytest
import torch

from cputrain.ops.linear import joined_linear, joined_linear_plain
from tests.unit.ops.blocks import assert_equals_twin


def _split(function, count):
    def run(x, *rest):
        biases = list(rest[count:]) or [None] * count
        return function(x, list(rest[:count]), biases)

    return run


@pytest.mark.parametrize("rows", [0, 1, 7, 65])
@pytest.mark.parametrize("sizes", [[8, 8, 8], [63, 1, 7], [16]])
@pytest.mark.parametrize("biased", [True, False])
def test_equals_plain_twin(rows, sizes, biased):
    weights = [torch.randn(size, 65) for size in sizes]
    biases = [torch.randn(size) for size in sizes] if biased else []
    inputs = [torch.randn(rows, 65), *weights, *biases]
    assert_equals_twin(_split(joined_linear, len(sizes)), _split(joined_linear_plain, len(sizes)), inputs)


def test_frozen_weights_get_no_gradient():
    x = torch.randn(5, 8, requires_grad=True)
    weights = [torch.randn(3, 8, requires_grad=i == 1) for i in range(3)]
    joined_linear(x, weights, [None] * 3).square().sum().backward()
    expected = torch.autograd.grad((x @ weights[1].t()).square().sum(), weights[1])[0]
    assert weights[0].grad is None and weights[2].grad is None
    torch.testing.assert_close(weights[1].grad, expected)
