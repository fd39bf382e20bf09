"""Activations of h + bias: forward, both gradients, the recomputed value, and how accurate GELU is."""

from __future__ import annotations

import pytest
import torch
from accuracy import assert_as_accurate

from cputrain.ops.activation import KINDS, activation_backward, activation_forward, bias_activation, plain

SHAPES = [(1, 1), (7, 63), (3, 65), (2, 5, 384), (130, 33), (0, 8), (33,), (3, 4097), (67, 17)]


def _run(function, h, bias, grad, dtype):
    leaves = [None if t is None else t.detach().to(dtype).requires_grad_() for t in (h, bias)]
    out = function(*leaves)
    out.backward(grad.to(dtype))
    return [out.detach()] + [None if leaf is None else leaf.grad for leaf in leaves]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("with_bias", [True, False])
def test_equals_plain_twin(isa, shape, kind, with_bias):
    h, grad = torch.randn(shape) * 3, torch.randn(shape)
    bias = torch.randn(shape[-1]) if with_bias else None
    assert_as_accurate(
        _run(lambda h, b: bias_activation(h, b, kind), h, bias, grad, torch.float32),
        _run(lambda h, b: plain(h, b, kind), h, bias, grad, torch.float32),
        _run(lambda h, b: plain(h, b, kind), h, bias, grad, torch.float64),
        ["out", "grad_h", "grad_bias"],
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("with_bias", [True, False])
def test_recomputed_value_and_places(isa, kind, with_bias):
    """The value from the backward is the forward's, and writing in place changes no bit."""
    h, grad = torch.randn(50, 77) * 3, torch.randn(50, 77)
    bias = torch.randn(77) if with_bias else None
    value, kept = activation_forward(h, bias, kind)
    assert kept is h
    again = torch.empty_like(h)
    grad_h, grad_bias = activation_backward(grad, h, bias, kind, again)
    torch.testing.assert_close(again, value, rtol=5e-7, atol=1e-12)
    assert (grad_bias is None) == (bias is None)
    in_place, _ = activation_backward(grad, h, bias, kind, inplace=True)
    assert in_place is grad and torch.equal(in_place, grad_h)
    before = h.clone()
    out, kept = activation_forward(h, bias, kind, torch.bfloat16, inplace=True)
    assert out is h and torch.equal(h, value) and torch.equal(kept, before.bfloat16())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 63), (65, 65), (40, 200), (0, 5)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_gradient_from_bf16_is_that_of_the_rounded_input(isa, threads, kind, shape, with_bias):
    h, grad = torch.randn(shape) * 3, torch.randn(shape)
    bias = torch.randn(shape[1]) if with_bias else None
    _, kept = activation_forward(h.clone(), bias, kind, torch.bfloat16)
    values = [torch.empty(shape), torch.empty(shape)]
    ours = activation_backward(grad, kept, bias, kind, values[0])
    rounded = activation_backward(grad, kept.float(), bias, kind, values[1])
    for a, b in zip((*ours, values[0]), (*rounded, values[1]), strict=True):
        assert a is b or torch.equal(a, b)


@pytest.mark.parametrize("with_bias", [True, False])
def test_same_bits_with_any_number_of_threads(isa, threads, with_bias):
    h, grad, bias = torch.randn(1111, 200), torch.randn(1111, 200), torch.randn(200) if with_bias else None
    values = [torch.empty_like(h), torch.empty_like(h)]
    ours = activation_backward(grad, h, bias, "gelu", values[0])
    torch.set_num_threads(1)
    alone = activation_backward(grad, h, bias, "gelu", values[1])
    for a, b in zip((*ours, values[0]), (*alone, values[1]), strict=True):
        assert a is b or torch.equal(a, b)


@pytest.mark.parametrize("kind", KINDS)
def test_infinities_and_nan_as_stock(isa, kind):
    """In every lane of a vector and in the part of one at the end; -0.0 and numbers far outside, too.

    Where stock's float32 and float64 disagree (float32 GELU of inf is NaN, of 3e38 inf), either is right.
    """
    special = torch.tensor(
        [float("inf"), float("-inf"), float("nan"), 0.0, -0.0, 1e30, -1e30, 88.0, -88.0, 3e38, -3e38]
    )
    h = special.repeat(7)
    grad = torch.ones_like(h)
    ours = _run(lambda h, b: bias_activation(h, b, kind), h, None, grad, torch.float32)
    single = _run(lambda h, b: plain(h, b, kind), h, None, grad, torch.float32)
    double = _run(lambda h, b: plain(h, b, kind), h, None, grad, torch.float64)
    for our, *stock in list(zip(ours, single, double, strict=True))[:2]:
        close = [our.double().isclose(s.double(), rtol=1e-6, atol=1e-30, equal_nan=True) for s in stock]
        assert (close[0] | close[1]).all(), (our, *stock)


def _floats(step: int) -> torch.Tensor:
    """Every step-th float32 from ±1e-38 to ±13."""
    bits = torch.arange(0x00800000, 0x41500000, step, dtype=torch.int32)
    return torch.cat([bits.view(torch.float32), -bits.view(torch.float32)])


def test_gelu_keeps_its_digits_on_both_sides(isa):
    """Relative to the exact result; stock's own has none left at -6."""
    x = _floats(step=4999)
    exact = x.double() * torch.special.erfc(x.double() * -(0.5**0.5)) / 2
    relative = ((activation_forward(x, None, "gelu")[0].double() - exact) / exact).abs()
    assert relative[x > -1].max() < 3 * 2**-23
    assert relative.max() < 5 * 2**-23


def test_non_contiguous(isa):
    h, bias = torch.randn(40, 6).t(), torch.randn(80)[::2]
    torch.testing.assert_close(bias_activation(h, bias, "gelu"), plain(h, bias, "gelu"))


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="kind is 'swish'; choose one of identity, relu, silu, gelu, gelu_tanh"):
        bias_activation(torch.randn(3, 4), None, "swish")
    with pytest.raises(ValueError, match=r"bias must have the shape \(4,\), found \(3,\)"):
        bias_activation(torch.randn(3, 4), torch.randn(3), "relu")
    with pytest.raises(ValueError, match=r"h must be float32 on the CPU, found torch.bfloat16"):
        bias_activation(torch.randn(3, 4).bfloat16(), None, "relu")
