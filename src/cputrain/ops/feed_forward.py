"""The feed-forward half of a transformer layer: linear, activation, linear, and what follows (dropout, residual, norm).

Only the input, the first product's raw output and, with a norm, the sum before it are saved; the activation, which is
as large as the first product, is computed again in the backward, in the same pass that needs its derivative anyway.

Shapes: x_TH tokens × hidden, h_TM tokens × middle.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cputrain.formats import FP32, Dense, Format
from cputrain.formats.int16_saving import as_float
from cputrain.native import workspace
from cputrain.native.operands import require, require_linear
from cputrain.ops.activation import Activated, activation_backward
from cputrain.ops.activation import plain as activation_plain
from cputrain.ops.dropout import draw_key, dropout
from cputrain.ops.gradient import fp32_backward
from cputrain.ops.norm import norm_backward, residual_norm_forward


def _two_products(ctx, x_TH, weight1, bias1, weight2, bias2, kind, format, scratch=""):
    """What is saved of x and of the first product's raw output, and the second's output."""
    ctx.kind, ctx.call = kind, format.begin()
    h_TM, saved = ctx.call.forward(
        x_TH, Dense(weight1), None, save=ctx.needs_input_grad[1], scratch="middle", until_kept="raw"
    )
    y_TH, saved_h = ctx.call.forward_activated(Activated(h_TM, bias1, kind), Dense(weight2), bias2, scratch=scratch)
    return saved, saved_h, y_TH


def _two_products_backward(ctx, grad_y, saved, add_to=None, need_bias2=False):
    """Gradients of x (added to `add_to` if given), weight1, bias1, weight2 and bias2."""
    saved_h, weight1, bias1, weight2, *saved_x = saved
    weight1, weight2 = Dense(weight1), Dense(weight2)
    h_TM = as_float(saved_h, weight1.out_features, "raw")
    need_x, need_weight1, _, need_weight2 = ctx.needs_input_grad[:4]
    second = ctx.call.output_grad(grad_y, weight=need_weight2, bias=need_bias2)
    activation = workspace.floats("middle", *h_TM.shape) if need_weight2 else None
    grad_h, grad_bias1 = activation_backward(
        second.input(weight2, scratch="middle_grad"), h_TM, bias1, ctx.kind, activation, inplace=True
    )
    grad_weight1 = grad_weight2 = None
    if activation is not None:
        (grad_weight2,) = second.weight(weight2, ctx.call.save_input(activation))
    first = ctx.call.output_grad(grad_h, weight=need_weight1)
    if need_weight1:
        (grad_weight1,) = first.weight(weight1, saved_x)
    grad_x = first.input(weight1, add_to=add_to) if need_x else None
    return grad_x, grad_weight1, grad_bias1, grad_weight2, second.bias


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TH, weight1, bias1, weight2, bias2, kind, format):
        saved, saved_h, y_TH = _two_products(ctx, x_TH, weight1, bias1, weight2, bias2, kind, format)
        ctx.save_for_backward(saved_h, weight1, bias1, weight2, *saved)
        return y_TH

    @staticmethod
    @fp32_backward
    def backward(ctx, grad_y):
        grads = _two_products_backward(ctx, grad_y.contiguous(), ctx.saved_tensors, need_bias2=ctx.needs_input_grad[4])
        return *grads, None, None


class _FeedForwardNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TH, weight1, bias1, weight2, bias2, norm_weight, norm_bias, kind, eps, p, key, format):
        saved, saved_h, sum_TH = _two_products(ctx, x_TH, weight1, bias1, weight2, None, kind, format, "sum")
        out, mean, rstd, saved_sum = residual_norm_forward(
            sum_TH, bias2, x_TH, norm_weight, norm_bias, eps, p, key, ctx.call.saves
        )
        ctx.save_for_backward(norm_weight, saved_sum, mean, rstd, saved_h, weight1, bias1, weight2, *saved)
        ctx.p, ctx.key, ctx.has_bias2 = p, key, bias2 is not None
        return out

    @staticmethod
    @fp32_backward
    def backward(ctx, grad_out):
        norm_weight, saved_sum, mean, rstd, *products = ctx.saved_tensors
        grad_sum, grad_y, grad_norm_weight, grad_norm_bias, grad_bias2 = norm_backward(
            grad_out.contiguous(), saved_sum, mean, rstd, norm_weight, ctx.p, ctx.key
        )
        *grads, _ = _two_products_backward(ctx, grad_y, products, add_to=grad_sum)
        return *grads, grad_bias2 if ctx.has_bias2 else None, grad_norm_weight, grad_norm_bias, *[None] * 5


def _check(
    operator: str, x_TH: Tensor, weight1: Tensor, bias1: Tensor | None, weight2: Tensor, bias2: Tensor | None
) -> None:
    require_linear(operator, x_TH, weight1, bias1, "1")
    require(operator, weight2.shape[:1] + weight1.shape[:1], weight2=weight2)
    require(operator, weight2.shape[:1], bias2=bias2)


def feed_forward(
    x_TH: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    kind: str,
    p: float = 0.0,
    format: Format = FP32,
) -> Tensor:
    """dropout(linear2(activation(linear1(x)))); no residual."""
    _check("feed_forward", x_TH, weight1, bias1, weight2, bias2)
    y = _FeedForward.apply(x_TH, weight1, bias1, weight2, bias2, kind, format)
    return dropout(y, p) if p > 0 else y


def feed_forward_norm(
    x_TH: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    norm_weight: Tensor,
    norm_bias: Tensor,
    kind: str,
    eps: float,
    p: float,
    format: Format = FP32,
) -> Tensor:
    """LayerNorm(x + dropout(linear2(activation(linear1(x)))))."""
    _check("feed_forward_norm", x_TH, weight1, bias1, weight2, bias2)
    require("feed_forward_norm", (x_TH.shape[1], weight1.shape[0]), weight2=weight2)
    require("feed_forward_norm", x_TH.shape[1:], norm_weight=norm_weight, norm_bias=norm_bias)
    key = draw_key() if p > 0 else 0
    weights = weight1, bias1, weight2, bias2, norm_weight, norm_bias
    return _FeedForwardNorm.apply(x_TH, *weights, kind, eps, p, key, format)


def plain(x_TH, weight1, bias1, weight2, bias2, kind, factors=None, norm=None) -> Tensor:
    """Both in PyTorch; `factors` is what dropout multiplies by, `norm` is (weight, bias, eps) where there is one."""
    h = activation_plain(torch.nn.functional.linear(x_TH, weight1, bias1), None, kind)
    y = torch.nn.functional.linear(h, weight2, bias2)
    y = y if factors is None else y * factors
    if norm is None:
        return y
    norm_weight, norm_bias, eps = norm
    return torch.nn.functional.layer_norm(x_TH + y, y.shape[-1:], norm_weight, norm_bias, eps)
