"""LayerNorm(residual + dropout(linear(x))): the end of a post-norm block, one product and one pass.

Saved for the backward: x (where products run in fp32 as it is: it comes from attention, which saves it so), the sum
before the norm (written over the product's own output), its mean and deviation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cputrain.formats import FP32, Dense, Format
from cputrain.native.operands import require, require_linear
from cputrain.ops.dropout import draw_key
from cputrain.ops.gradient import fp32_backward
from cputrain.ops.norm import norm_backward, residual_norm_forward


class _ResidualBlock(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TI, residual_TO, weight, bias, norm_weight, norm_bias, eps, p, key, format):
        ctx.call = format.begin()
        sum_TO, saved = ctx.call.forward(
            x_TI, Dense(weight), None, save=ctx.needs_input_grad[2], held=True, scratch="sum"
        )
        out, mean, rstd, saved_sum = residual_norm_forward(
            sum_TO, bias, residual_TO, norm_weight, norm_bias, eps, p, key, ctx.call.saves
        )
        ctx.save_for_backward(weight, norm_weight, saved_sum, mean, rstd, *saved)
        ctx.p, ctx.key, ctx.has_bias = p, key, bias is not None
        return out

    @staticmethod
    @fp32_backward
    def backward(ctx, grad_out):
        weight, norm_weight, saved_sum, mean, rstd, *saved = ctx.saved_tensors
        grad_sum, grad_y, grad_norm_weight, grad_norm_bias, grad_bias = norm_backward(
            grad_out.contiguous(), saved_sum, mean, rstd, norm_weight, ctx.p, ctx.key
        )
        need_x, _, need_weight = ctx.needs_input_grad[:3]
        weight, grad = Dense(weight), ctx.call.output_grad(grad_y, weight=need_weight)
        grad_x = grad.input(weight) if need_x else None
        (grad_weight,) = grad.weight(weight, saved) if need_weight else (None,)
        grad_bias = grad_bias if ctx.has_bias else None
        return grad_x, grad_sum, grad_weight, grad_bias, grad_norm_weight, grad_norm_bias, *[None] * 4


def residual_block(
    x_TI: Tensor,
    residual_TO: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor,
    norm_bias: Tensor,
    eps: float,
    p: float,
    format: Format = FP32,
) -> Tensor:
    require_linear("residual_block", x_TI, weight, bias)
    require("residual_block", (x_TI.shape[0], weight.shape[0]), residual=residual_TO)
    require("residual_block", weight.shape[:1], norm_weight=norm_weight, norm_bias=norm_bias)
    key = draw_key() if p > 0 else 0
    return _ResidualBlock.apply(x_TI, residual_TO, weight, bias, norm_weight, norm_bias, eps, p, key, format)


def plain(x_TI, residual_TO, weight, bias, norm_weight, norm_bias, eps, factors=None) -> Tensor:
    """The same in PyTorch; `factors` is what dropout multiplies by."""
    y = torch.nn.functional.linear(x_TI, weight, bias)
    y = y if factors is None else y * factors
    return torch.nn.functional.layer_norm(residual_TO + y, y.shape[-1:], norm_weight, norm_bias, eps)
