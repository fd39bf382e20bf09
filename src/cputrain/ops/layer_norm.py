"""LayerNorm over the last dimension, alone and after a residual sum (the start of a pre-norm block)."""

from __future__ import annotations

import torch
from torch import Tensor

from cputrain import native
from cputrain.formats.bf16_saving import note_normed
from cputrain.native.operands import address, contiguous, is_bf16, require, rows_and_cols, saved_dtype
from cputrain.ops.dropout import draw_key
from cputrain.ops.gradient import fp32_backward


def layer_norm_forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, saves: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The result, and for the backward each row's mean and 1 / deviation, and x or, as bf16, the normalised x.

    x is contiguous.
    """
    rows, cols = rows_and_cols(x)
    out, mean, rstd = torch.empty_like(x), x.new_empty(rows), x.new_empty(rows)
    saved = None if saves is torch.float32 else torch.empty_like(x, dtype=saves)
    native.kernels().layer_norm(
        address("layer_norm: x", x, rows * cols),
        *(address("layer_norm: weight", weight, cols), address("layer_norm: bias", bias, cols)),
        *(address("layer_norm: out", out, rows * cols), address("layer_norm: saved", saved, rows * cols, saves)),
        *(address("layer_norm: mean", mean, rows), address("layer_norm: rstd", rstd, rows)),
        *(rows, cols, eps),
    )
    if saved is None:
        return out, mean, rstd, x
    note_normed(out, saved, weight, bias)
    return out, mean, rstd, saved


def layer_norm_backward(
    grad_out: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, weight and bias."""
    grad_x, _, grad_weight, grad_bias, _ = joined_norm_backward(grad_out, x, mean, rstd, weight, None, 0.0, 0, False)
    return grad_x, grad_weight, grad_bias


def joined_norm_forward(
    y: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    weight: Tensor | None,
    beta: Tensor | None,
    eps: float,
    p: float,
    key: int,
    z: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The LayerNorm of z = residual + dropout(y + bias), its mean and 1 / deviation.

    `z` receives the sum or, if it is bf16, the normalised sum.
    """
    rows, cols = rows_and_cols(y)
    out, mean, rstd = torch.empty_like(y), y.new_empty(rows), y.new_empty(rows)
    bias, weight, beta = contiguous(bias, weight, beta)
    z_address = address("norm: z", z, rows * cols, saved_dtype(z))
    native.kernels().post_norm(
        *(address("norm: y", y, rows * cols), address("norm: bias", bias, cols)),
        address("norm: residual", residual, rows * cols),
        *(address("norm: weight", weight, cols), address("norm: beta", beta, cols)),
        *((None, z_address) if is_bf16(z) else (z_address, None)),
        address("norm: out", out, rows * cols),
        *(address("norm: mean", mean, rows), address("norm: rstd", rstd, rows)),
        *(rows, cols, eps, p, key),
    )
    return out, mean, rstd


def joined_norm_backward(
    grad_out: Tensor,
    z: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    grad_sum: Tensor | None,
    p: float,
    key: int,
    want_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of z (to which grad_sum is added), y, weight, beta and bias; y's is z's own without dropout.

    z is as it was saved.
    """
    rows, cols = rows_and_cols(z)
    grad_z = torch.empty_like(grad_out)
    grad_y = torch.empty_like(grad_out) if p > 0 else None
    grad_weight, grad_beta = grad_out.new_empty(cols), grad_out.new_empty(cols)
    grad_bias = grad_out.new_empty(cols) if want_bias else None
    (weight,) = contiguous(weight)
    native.kernels().layer_norm_backward(
        address("norm: gradient", grad_out, rows * cols),
        address("norm: z", z, rows * cols, saved_dtype(z)),
        is_bf16(z),
        *(address("norm: mean", mean, rows), address("norm: rstd", rstd, rows)),
        *(address("norm: weight", weight, cols), address("norm: gradient of the sum", grad_sum, rows * cols)),
        address("norm: gradient of z", grad_z, rows * cols),
        address("norm: gradient of y", grad_y, rows * cols),
        address("norm: gradient of weight", grad_weight, cols),
        address("norm: gradient of beta", grad_beta, cols),
        address("norm: gradient of bias", grad_bias, cols),
        *(rows, cols, p, key),
    )
    return grad_z, grad_z if grad_y is None else grad_y, grad_weight, grad_beta, grad_bias


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps, saves):
        x, weight, bias = contiguous(x, weight, bias)
        out, mean, rstd, saved = layer_norm_forward(x, weight, bias, eps, saves)
        ctx.save_for_backward(saved, mean, rstd, weight)
        ctx.has_bias = bias is not None
        return out

    @staticmethod
    @fp32_backward
    def backward(ctx, grad_out):
        x, mean, rstd, weight = ctx.saved_tensors
        grad_x, grad_weight, grad_bias = layer_norm_backward(grad_out.contiguous(), x, mean, rstd, weight)
        return grad_x, None if weight is None else grad_weight, grad_bias if ctx.has_bias else None, None, None


class _ResidualLayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, weight, bias, eps, p, key):
        x, residual, weight, bias = contiguous(x, residual, weight, bias)
        total = torch.empty_like(x)
        out, mean, rstd = joined_norm_forward(x, None, residual, weight, bias, eps, p, key, total)
        ctx.save_for_backward(total, mean, rstd, weight)
        ctx.has_bias, ctx.p, ctx.key = bias is not None, p, key
        ctx.set_materialize_grads(False)
        return total, out

    @staticmethod
    @fp32_backward
    def backward(ctx, grad_sum, grad_out):
        total, mean, rstd, weight = ctx.saved_tensors
        grad_out = torch.zeros_like(total) if grad_out is None else grad_out.contiguous()
        grad_sum = None if grad_sum is None else grad_sum.contiguous()
        grad_residual, grad_x, grad_weight, grad_bias, _ = joined_norm_backward(
            grad_out, total, mean, rstd, weight, grad_sum, ctx.p, ctx.key, False
        )
        grad_weight = None if weight is None else grad_weight
        return grad_x, grad_residual, grad_weight, grad_bias if ctx.has_bias else None, None, None, None


def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, saves: torch.dtype = torch.float32
) -> Tensor:
    """`torch.nn.functional.layer_norm` over the last dimension; x is saved for the backward as `saves`."""
    require("layer_norm", x.shape, x=x)
    require("layer_norm", x.shape[-1:], weight=weight, bias=bias)
    return _LayerNorm.apply(x, weight, bias, eps, saves)


def residual_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, p: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The sum residual + dropout(x), and its LayerNorm."""
    require("residual_layer_norm", x.shape, x=x, residual=residual)
    require("residual_layer_norm", x.shape[-1:], weight=weight, bias=bias)
    return _ResidualLayerNorm.apply(x, residual, weight, bias, eps, p, draw_key() if p > 0 else 0)


def plain(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """`layer_norm` in PyTorch."""
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)


def residual_plain(x, residual, weight, bias, eps, factors=None):
    """`residual_layer_norm` in PyTorch; `factors` is what dropout multiplies by."""
    total = residual + (x if factors is None else x * factors)
    return total, plain(total, weight, bias, eps)
