"""LayerNorm alone, after a residual sum, and after bias, dropout and residual: forward and every gradient."""

from __future__ import annotations

import pytest
import torch
from accuracy import assert_as_accurate

from cputrain.ops import norm
from cputrain.ops.activation import activation_forward
from cputrain.ops.dropout import factors

KEY = 0x9ABCDEF012345678
SHAPES = [(1, 1), (7, 63), (3, 65), (2, 5, 384), (130, 33), (0, 8), (33,), (3, 770), (67, 17)]


def _leaves(tensors, dtype):
    return [None if t is None else t.detach().to(dtype).requires_grad_() for t in tensors]


def _run(function, tensors, grads, dtype):
    """Outputs, then the gradient of every tensor."""
    leaves = _leaves(tensors, dtype)
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.autograd.backward(outputs, [g.to(dtype) for g in grads])
    return [o.detach() for o in outputs] + [None if leaf is None else leaf.grad for leaf in leaves]


def _factors(p, shape, dtype):
    if p == 0:
        return None
    rows = torch.Size(shape).numel() // max(shape[-1], 1)
    return factors(KEY, p, rows, shape[-1]).view(shape).to(dtype)


def _check(ours, twin, tensors, outputs, names):
    grads = [torch.randn(tensors[0].shape) for _ in range(outputs)]
    assert_as_accurate(
        _run(ours, tensors, grads, torch.float32),
        _run(lambda *a: twin(torch.float32, *a), tensors, grads, torch.float32),
        _run(lambda *a: twin(torch.float64, *a), tensors, grads, torch.float64),
        names,
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("affine", ["both", "weight", "none"])
def test_layer_norm(isa, shape, affine):
    x = torch.randn(shape) * 3 + 1
    weight = None if affine == "none" else torch.randn(shape[-1])
    bias = torch.randn(shape[-1]) if affine == "both" else None
    _check(
        lambda *a: norm.layer_norm(*a, 1e-5),
        lambda dtype, *a: norm.plain(*a, 1e-5),
        [x, weight, bias],
        1,
        ["out", "grad_x", "grad_weight", "grad_bias"],
    )


class _SumAndNorm(torch.autograd.Function):
    """The raw functions as one operator: z = residual + dropout(y + bias), and its norm."""

    @staticmethod
    def forward(ctx, y, bias, residual, weight, beta, eps, p, inplace=False):
        ctx.set_materialize_grads(False)
        out, mean, rstd, z = norm.residual_norm_forward(y, bias, residual, weight, beta, eps, p, KEY, inplace=inplace)
        ctx.save_for_backward(z, mean, rstd, weight)
        ctx.p, ctx.has_bias = p, bias is not None
        return z, out

    @staticmethod
    def backward(ctx, grad_sum, grad_out):
        z, mean, rstd, weight = ctx.saved_tensors
        grad_out = torch.zeros_like(z) if grad_out is None else grad_out
        grad_z, grad_y, grad_weight, grad_beta, grad_bias = norm.norm_backward(
            grad_out, z, mean, rstd, weight, ctx.p, KEY, grad_sum, ctx.has_bias
        )
        return grad_y, grad_bias, grad_z, grad_weight, grad_beta, None, None, None


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("p", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("with_bias", [True, False])
def test_sum_and_norm(isa, shape, p, with_bias):
    bias = torch.randn(shape[-1]) if with_bias else None
    tensors = [torch.randn(shape), bias, torch.randn(shape), torch.randn(shape[-1]), torch.randn(shape[-1])]
    names = ["sum", "out", "grad_y", "grad_bias", "grad_residual", "grad_weight", "grad_beta"]
    _check(
        lambda *a: _SumAndNorm.apply(*a, 1e-12, p),
        lambda dtype, *a: norm.residual_plain(*a, 1e-12, _factors(p, shape, dtype)),
        tensors,
        2,
        names,
    )
    _check(
        lambda *a: _SumAndNorm.apply(*a, 1e-12, p)[1],
        lambda dtype, *a: norm.residual_plain(*a, 1e-12, _factors(p, shape, dtype))[1],
        tensors,
        1,
        names[1:],
    )


def test_same_bits_with_any_number_of_threads(isa, threads):
    """Enough rows for several chunks, which three threads share unevenly."""
    torch.manual_seed(5)
    tensors = [torch.randn(1111, 200), torch.randn(200), torch.randn(1111, 200), torch.randn(200), torch.randn(200)]
    grad = torch.randn(1111, 200)

    def everything():
        torch.manual_seed(6)
        return _run(lambda *a: _SumAndNorm.apply(*a, 1e-5, 0.1)[1], tensors, [grad], torch.float32)

    ours = everything()
    torch.set_num_threads(1)
    for with_threads, alone in zip(ours, everything(), strict=True):
        assert torch.equal(with_threads, alone)


@pytest.mark.parametrize("p", [0.0, 0.25])
def test_the_sum_takes_the_place_of_y(isa, p):
    y, bias, residual = torch.randn(9, 50), torch.randn(50), torch.randn(9, 50)
    weight, beta = torch.randn(50), torch.randn(50)
    expected = residual.double() + (y + bias).double() * (factors(KEY, p, 9, 50) if p else 1)
    _, mean, rstd, _ = norm.residual_norm_forward(y, bias, residual, weight, beta, 1e-5, p, KEY)
    torch.testing.assert_close(y.double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(mean, y.mean(1))
    torch.testing.assert_close(rstd, 1 / (y.var(1, unbiased=False) + 1e-5).sqrt())
    grad_z, grad_y, *_ = norm.norm_backward(torch.randn(9, 50), y, mean, rstd, weight, p, KEY)
    assert (grad_z is grad_y) == (p == 0)


@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (3, 63), (65, 65), (33, 384)])
@pytest.mark.parametrize("p", [0.0, 0.25])
def test_normalised_sum_kept_as_bf16(isa, threads, shape, p):
    """The result is the same to the bit, x̂ is rounded, and the gradient is that of the rounded x̂."""
    y, residual, bias, weight, beta = (torch.randn(s) for s in (shape, shape, *[shape[1:]] * 3))
    out, mean, rstd, z = norm.residual_norm_forward(y.clone(), bias, residual, weight, beta, 1e-5, p, KEY)
    again, mean16, rstd16, kept = norm.residual_norm_forward(
        y, bias, residual, weight, beta, 1e-5, p, KEY, torch.bfloat16
    )
    assert torch.equal(out, again) and torch.equal(mean, mean16) and torch.equal(rstd, rstd16)
    normed = (z - mean[:, None]) * rstd[:, None]
    torch.testing.assert_close(kept, normed.bfloat16(), rtol=2**-7, atol=1e-6)
    grad = torch.randn(shape)
    ours = norm.norm_backward(grad, kept, mean, rstd, weight, p, KEY)
    expected = _norm_backward(
        grad.double(), kept.double(), rstd.double(), weight.double(), _factors(p, shape, torch.float64)
    )
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2e-5, atol=2e-5)


def _norm_backward(grad, normed, rstd, weight, kept):
    """The gradients of residual, y, weight, beta and bias by their formulas, from x̂."""
    g = grad * weight
    residual = rstd[:, None] * (g - g.mean(1, keepdim=True) - normed * (g * normed).mean(1, keepdim=True))
    residual = residual if grad.shape[1] > 1 else torch.zeros_like(residual)  # x̂ of one column is 0
    y = residual if kept is None else residual * kept
    return residual, y, (grad * normed).sum(0), grad.sum(0), y.sum(0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("affine", ["both", "weight", "none"])
def test_layer_norm_kept_as_bf16(isa, threads, shape, affine):
    """The result to the bit; every gradient within bf16's rounding of x̂."""
    tensors = [torch.randn(shape) * 3 + 1]
    tensors += [
        torch.randn(shape[-1]) if affine != "none" else None,
        torch.randn(shape[-1]) if affine == "both" else None,
    ]
    grad = torch.randn(shape)
    ours = _run(lambda *a: norm.layer_norm(*a, 1e-5, torch.bfloat16), tensors, [grad], torch.float32)
    exact = _run(lambda *a: norm.layer_norm(*a, 1e-5), tensors, [grad], torch.float32)
    assert torch.equal(ours[0], exact[0])
    for a, b in zip(ours[1:], exact[1:], strict=True):
        assert a is b is None or (a - b).norm() <= 2**-7 * b.norm() + 1e-5


def test_bf16_of_what_is_no_number(isa):
    values = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0, 1e-42, 3.4e38, 1.00390625, 1.01171875]).repeat(5)
    _, kept = activation_forward(values, None, "identity", torch.bfloat16)
    torch.testing.assert_close(kept, values.bfloat16(), rtol=0, atol=0, equal_nan=True)


def test_inputs_are_left_alone(isa):
    tensors = [torch.randn(4, 33), torch.randn(33), torch.randn(4, 33), torch.randn(33), torch.randn(33)]
    before = [t.clone() for t in tensors]
    norm.residual_norm_forward(*tensors, 1e-5, 0.5, KEY, inplace=False)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


def test_non_contiguous_and_expanded(isa):
    x, weight = torch.randn(40, 6).t(), torch.randn(80)[::2]
    torch.testing.assert_close(norm.layer_norm(x, weight, None, 1e-5), norm.plain(x, weight, None, 1e-5))
    leaf = x.clone().requires_grad_()
    norm.layer_norm(leaf, weight, None, 1e-5).sum().backward()  # an expanded gradient
    assert torch.isfinite(leaf.grad).all()


def test_large_mean_does_not_cancel(isa):
    """E[x²] - E[x]² would lose all digits here: the mean is 4096 times the deviation."""
    x = torch.randn(4, 384) + 4096
    exact = norm.plain(x.double(), None, None, 1e-5)
    stock = norm.plain(x, None, None, 1e-5)
    assert_as_accurate([norm.layer_norm(x, None, None, 1e-5)], [stock], [exact], ["out"])


def test_nan_stays_in_its_row(isa):
    x = torch.randn(3, 40)
    x[1, 39] = float("nan")
    nan = norm.layer_norm(x, torch.ones(40), torch.zeros(40), 1e-5).isnan()
    assert nan[1].all() and not nan[0].any() and not nan[2].any()


def test_wrong_tensors_are_named():
    x = torch.randn(3, 4)
    with pytest.raises(ValueError, match=r"weight must be float32 on the CPU, found torch.float64"):
        norm.layer_norm(x, torch.ones(4).double(), None, 1e-5)
    with pytest.raises(ValueError, match=r"bias must have the shape \(4,\), found \(5,\)"):
        norm.layer_norm(x, None, torch.ones(5), 1e-5)
    with pytest.raises(ValueError, match=r"residual must be 12 contiguous elements"):
        norm.residual_norm_forward(x, None, torch.randn(4), torch.ones(4), torch.ones(4), 1e-5, 0.0, KEY)
