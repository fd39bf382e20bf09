"""LayerNorm(residual + dropout(linear(x))): the end of a post-norm block, one product and one pass.

Kept for the backward: x, the sum before the norm (written over the product's own output), its mean and deviation.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cputrain.ops.dropout import draw_key
from cputrain.ops.linear import weight_grad
from cputrain.ops.post_norm import post_norm_backward, post_norm_forward


class _ResidualBlock(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TI, residual_TO, weight, bias, norm_weight, norm_bias, eps, p, key):
        sum_TO = x_TI.mm(weight.t())
        out, mean, rstd = post_norm_forward(sum_TO, bias, residual_TO, norm_weight, norm_bias, eps, p, key)
        ctx.save_for_backward(x_TI, weight, norm_weight, sum_TO, mean, rstd)
        ctx.p, ctx.key, ctx.has_bias = p, key, bias is not None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out):
        x_TI, weight, norm_weight, sum_TO, mean, rstd = ctx.saved_tensors
        grad_sum, grad_y, grad_norm_weight, grad_norm_bias, grad_bias = post_norm_backward(
            grad_out.contiguous(), sum_TO, mean, rstd, norm_weight, ctx.p, ctx.key
        )
        grad_x = grad_y.mm(weight) if ctx.needs_input_grad[0] else None
        grad_weight = weight_grad(grad_y, x_TI, ctx.needs_input_grad[2])
        return (
            grad_x,
            grad_sum,
            grad_weight,
            grad_bias if ctx.has_bias else None,
            grad_norm_weight,
            grad_norm_bias,
            None,
            None,
            None,
        )


def residual_block(
    x_TI: Tensor,
    residual_TO: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor,
    norm_bias: Tensor,
    eps: float,
    p: float,
) -> Tensor:
    key = draw_key() if p > 0 else 0
    return _ResidualBlock.apply(x_TI, residual_TO, weight, bias, norm_weight, norm_bias, eps, p, key)


def plain(x_TI, residual_TO, weight, bias, norm_weight, norm_bias, eps, factors=None) -> Tensor:
    """The same in PyTorch; `factors` is what dropout multiplies by."""
    y = torch.nn.functional.linear(x_TI, weight, bias)
    y = y if factors is None else y * factors
    return torch.nn.functional.layer_norm(residual_TO + y, y.shape[-1:], norm_weight, norm_bias, eps)
