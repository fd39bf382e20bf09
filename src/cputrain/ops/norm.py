"""LayerNorm over the last dimension: alone, and of the sum residual + dropout(y + bias) that ends a post-norm block.

The sum's norm is a part of larger operators (residual_block.py, feed_forward.py); one backward serves both.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cputrain import native
from cputrain.formats.bf16_saving import note_normed
from cputrain.native.operands import address, contiguous, is_bf16, require, rows_and_cols, saved_dtype
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


def residual_norm_forward(
    y: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    weight: Tensor | None,
    beta: Tensor | None,
    eps: float,
    p: float,
    key: int,
    saves: torch.dtype = torch.float32,
    inplace: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The LayerNorm of z = residual + dropout(y + bias), each row's mean and 1 / deviation, and z as it is saved.

    That is the sum, written over y if `inplace`, or as bf16 the normalised sum, from which the next operator makes the
    result again.
    """
    rows, cols = rows_and_cols(y)
    z = y if inplace and saves is torch.float32 else torch.empty_like(y, dtype=saves)
    out, mean, rstd = torch.empty_like(y), y.new_empty(rows), y.new_empty(rows)
    bias, weight, beta, residual = contiguous(bias, weight, beta, residual)  # type: ignore[assignment]
    z_address = address("norm: z", z, rows * cols, saves)
    native.kernels().residual_norm(
        *(address("norm: y", y, rows * cols), address("norm: bias", bias, cols)),
        address("norm: residual", residual, rows * cols),
        *(address("norm: weight", weight, cols), address("norm: beta", beta, cols)),
        *((None, z_address) if is_bf16(z) else (z_address, None)),
        address("norm: out", out, rows * cols),
        *(address("norm: mean", mean, rows), address("norm: rstd", rstd, rows)),
        *(rows, cols, eps, p, key),
    )
    if is_bf16(z):
        note_normed(out, z, weight, beta)
    return out, mean, rstd, z


def norm_backward(
    grad_out: Tensor,
    z: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    p: float = 0.0,
    key: int = 0,
    grad_sum: Tensor | None = None,
    want_bias: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of z (to which grad_sum is added), y, weight, beta and bias; y's is z's own without dropout.

    z is as it was saved: the norm's input, x of a LayerNorm alone.
    """
    rows, cols = rows_and_cols(z)
    grad_z = torch.empty_like(grad_out)
    grad_y = torch.empty_like(grad_out) if p > 0 else None
    grad_weight, grad_beta = grad_out.new_empty(cols), grad_out.new_empty(cols)
    grad_bias = grad_out.new_empty(cols) if want_bias else None
    (weight,) = contiguous(weight)
    native.kernels().norm_backward(
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
        grad_x, _, grad_weight, grad_bias, _ = norm_backward(
            grad_out.contiguous(), x, mean, rstd, weight, want_bias=False
        )
        return grad_x, None if weight is None else grad_weight, grad_bias if ctx.has_bias else None, None, None


def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, saves: torch.dtype = torch.float32
) -> Tensor:
    """`torch.nn.functional.layer_norm` over the last dimension; x is saved for the backward as `saves`."""
    require("layer_norm", x.shape, x=x)
    require("layer_norm", x.shape[-1:], weight=weight, bias=bias)
    return _LayerNorm.apply(x, weight, bias, eps, saves)


def plain(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """`layer_norm` in PyTorch."""
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)


def residual_plain(y, bias, residual, weight, beta, eps, factors=None) -> tuple[Tensor, Tensor]:
    """The sum and its norm in PyTorch; `factors` is what dropout multiplies by."""
    y = y if bias is None else y + bias
    z = residual + (y if factors is None else y * factors)
    return z, plain(z, weight, beta, eps)
