"""RMSNorm: forward and every gradient."""

from __future__ import annotations

import pytest
import torch

from cputrain.formats import FORMATS
from cputrain.ops import rms_norm as module
from tests.unit.ops.blocks import assert_equals_twin

SHAPES = [(1, 1), (7, 63), (3, 65), (2, 5, 384), (130, 33), (33,), (3, 770), (0, 8), (2, 3, 4, 17)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("weight", [True, False])
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_equals_plain_twin(isa, shape, weight, offset, eps):
    inputs = [torch.randn(shape) * 3 + 1, torch.randn(shape[-1]) if weight else None]
    assert_equals_twin(
        lambda x, w: module.rms_norm(x, w, eps, offset), lambda x, w: module.plain(x, w, eps, offset), inputs
    )


def test_rows_that_are_not_contiguous():
    inputs = [torch.randn(5, 4, 33).transpose(0, 1), torch.randn(33)]
    assert_equals_twin(lambda x, w: module.rms_norm(x, w, 1e-5), lambda x, w: module.plain(x, w, 1e-5), inputs)


def test_same_bits_with_any_number_of_threads(isa, threads):
    x, w = torch.randn(1111, 200), torch.randn(200)

    def everything():
        leaves = [t.clone().requires_grad_() for t in (x, w)]
        y = module.rms_norm(*leaves, 1e-5)
        (y * y).sum().backward()
        return [y.detach(), *(leaf.grad for leaf in leaves)]

    ours = everything()
    torch.set_num_threads(1)
    assert all(torch.equal(a, b) for a, b in zip(ours, everything(), strict=True))


@pytest.mark.parametrize("shape", [(1, 33), (2, 5, 384), (0, 8), (70, 130)])
@pytest.mark.parametrize("weight", [True, False])
def test_int16_keeps_half_and_gives_the_same_gradients(isa, shape, weight):
    x, w = torch.randn(shape) * 3 + 1, torch.randn(shape[-1]) if weight else None
    kept: list[torch.Tensor] = []

    def grads(format):
        leaves = [None if t is None else t.clone().requires_grad_() for t in (x, w)]
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            y = module.rms_norm(*leaves, 1e-6, 1.0, FORMATS[format]())
        y.backward(y.detach().cos())
        return [leaf.grad for leaf in leaves if leaf is not None]

    ours = grads("int16")
    assert any(t.dtype == torch.int16 for t in kept) and not any(t.shape == shape for t in kept)
    for a, b in zip(ours, grads("fp32"), strict=True):
        assert (a - b).norm() <= 1e-4 * b.norm()


def test_wrong_operands_are_refused():
    with pytest.raises(ValueError, match="rms_norm: weight must have the shape"):
        module.rms_norm(torch.randn(3, 8), torch.randn(9), 1e-5)
    with pytest.raises(ValueError, match="rms_norm: x must be float32"):
        module.rms_norm(torch.randn(3, 8).double(), None, 1e-5)
