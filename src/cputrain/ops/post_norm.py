"""LayerNorm(residual + dropout(y + bias)): the end of a post-norm block, in one pass."""

from __future__ import annotations

import torch
from torch import Tensor

from cputrain.formats.bf16_saving import note_normed
from cputrain.native.operands import contiguous, require
from cputrain.ops import layer_norm
from cputrain.ops.dropout import draw_key
from cputrain.ops.gradient import fp32_backward


def post_norm_forward(
    y: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    weight: Tensor,
    beta: Tensor,
    eps: float,
    p: float,
    key: int,
    saves: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The result, each row's mean and 1 / deviation, and what the backward needs of the sum before the norm.

    That is the sum itself, over y, or as bf16 the normalised sum, of which whoever uses the result makes it again.
    """
    z = y if saves is torch.float32 else torch.empty_like(y, dtype=saves)
    norm = layer_norm.joined_norm_forward(y, bias, residual.contiguous(), weight, beta, eps, p, key, z)
    if z is not y:
        note_normed(norm[0], z, weight, beta)
    return *norm, z


def post_norm_backward(
    grad_out: Tensor, z: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, p: float, key: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of residual, y, weight, beta and bias; that of y is the residual's own tensor without dropout."""
    grads = layer_norm.joined_norm_backward(grad_out, z, mean, rstd, weight, None, p, key, True)
    return grads


class _PostNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, bias, residual, weight, beta, eps, p, key):
        y, bias, residual, weight, beta = contiguous(y, bias, residual, weight, beta)
        z = torch.empty_like(y)
        out, mean, rstd = layer_norm.joined_norm_forward(y, bias, residual, weight, beta, eps, p, key, z)
        ctx.save_for_backward(z, mean, rstd, weight)
        ctx.p, ctx.key, ctx.has_bias = p, key, bias is not None
        return out

    @staticmethod
    @fp32_backward
    def backward(ctx, grad_out):
        z, mean, rstd, weight = ctx.saved_tensors
        grad_z, grad_y, grad_weight, grad_beta, grad_bias = post_norm_backward(
            grad_out.contiguous(), z, mean, rstd, weight, ctx.p, ctx.key
        )
        return grad_y, grad_bias if ctx.has_bias else None, grad_z, grad_weight, grad_beta, None, None, None


def post_norm(
    y: Tensor, bias: Tensor | None, residual: Tensor, weight: Tensor, beta: Tensor, eps: float, p: float
) -> Tensor:
    """LayerNorm(residual + dropout(y + bias)) over the last dimension."""
    require("post_norm", y.shape, y=y, residual=residual)
    require("post_norm", y.shape[-1:], bias=bias, weight=weight, beta=beta)
    return _PostNorm.apply(y, bias, residual, weight, beta, eps, p, draw_key() if p > 0 else 0)


def plain(y, bias, residual, weight, beta, eps, factors=None):
    """The same in PyTorch; `factors` is what dropout multiplies by."""
    y = y if bias is None else y + bias
    y = y if factors is None else y * factors
    return layer_norm.plain(residual + y, weight, beta, eps)
