"""The feed-forward half of a transformer layer: linear, activation, linear, and what follows (dropout, residual, norm).

Only the input, the first product's raw output and, with a norm, the sum before it are kept; the activation, which is as
large as the first product, is computed again in the backward, in the same pass that needs its derivative anyway.

Shapes: x_TH tokens × hidden, h_TM tokens × middle.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cputrain.ops import workspace
from cputrain.ops.activation import activation_backward
from cputrain.ops.activation import plain as activation_plain
from cputrain.ops.arithmetic import FP32, Arithmetic
from cputrain.ops.dropout import draw_key, dropout
from cputrain.ops.gradient import fp32_backward
from cputrain.ops.linear import OutputGradient, activated_product, forward_product, kept_input
from cputrain.ops.operands import require, require_linear
from cputrain.ops.post_norm import post_norm_backward, post_norm_forward


def _two_products(ctx, x_TH, weight1, bias1, weight2, bias2, kind, arithmetic, passing=""):
    """What must be kept of x and of the first product's raw output, and the second's output."""
    ctx.kind, ctx.call = kind, arithmetic.begin()
    h_TM, kept = forward_product(x_TH, weight1, None, ctx.call, keep=ctx.needs_input_grad[1], passing="middle")
    y_TH, kept_h = activated_product(h_TM, bias1, kind, weight2, bias2, ctx.call, passing)
    return kept, kept_h, y_TH


def _two_products_backward(ctx, grad_y, saved, add_to=None, need_bias2=False):
    """Gradients of x (added to `add_to` if given), weight1, bias1, weight2 and bias2."""
    kept_h, weight1, bias1, weight2, *kept = saved
    need_x, need_weight1, _, need_weight2 = ctx.needs_input_grad[:4]
    second = OutputGradient(grad_y, ctx.call, need_weight2, need_bias2)
    activation = workspace.floats("middle", *kept_h.shape) if need_weight2 else None
    grad_h, grad_bias1 = activation_backward(
        second.of_input(weight2, passing="middle_grad"), kept_h, bias1, ctx.kind, activation, inplace=True
    )
    grad_weight2 = None
    if activation is not None:
        grad_weight2 = second.of_weight(kept_input(activation, ctx.call), weight2.shape[1])
    first = OutputGradient(grad_h, ctx.call, need_weight1)
    grad_weight1 = first.of_weight(kept, weight1.shape[1]) if need_weight1 else None
    grad_x = first.of_input(weight1, add_to) if need_x else None
    return grad_x, grad_weight1, grad_bias1, grad_weight2, second.bias


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TH, weight1, bias1, weight2, bias2, kind, arithmetic):
        kept, kept_h, y_TH = _two_products(ctx, x_TH, weight1, bias1, weight2, bias2, kind, arithmetic)
        ctx.save_for_backward(kept_h, weight1, bias1, weight2, *kept)
        return y_TH

    @staticmethod
    @fp32_backward
    def backward(ctx, grad_y):
        grads = _two_products_backward(ctx, grad_y.contiguous(), ctx.saved_tensors, need_bias2=ctx.needs_input_grad[4])
        return *grads, None, None


class _FeedForwardNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TH, weight1, bias1, weight2, bias2, norm_weight, norm_bias, kind, eps, p, key, arithmetic):
        kept, kept_h, sum_TH = _two_products(ctx, x_TH, weight1, bias1, weight2, None, kind, arithmetic, "sum")
        out, mean, rstd, kept_sum = post_norm_forward(
            sum_TH, bias2, x_TH, norm_weight, norm_bias, eps, p, key, ctx.call.storage
        )
        ctx.save_for_backward(norm_weight, kept_sum, mean, rstd, kept_h, weight1, bias1, weight2, *kept)
        ctx.p, ctx.key, ctx.has_bias2 = p, key, bias2 is not None
        return out

    @staticmethod
    @fp32_backward
    def backward(ctx, grad_out):
        norm_weight, kept_sum, mean, rstd, *products = ctx.saved_tensors
        grad_sum, grad_y, grad_norm_weight, grad_norm_bias, grad_bias2 = post_norm_backward(
            grad_out.contiguous(), kept_sum, mean, rstd, norm_weight, ctx.p, ctx.key
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
    arithmetic: Arithmetic = FP32,
) -> Tensor:
    """dropout(linear2(activation(linear1(x)))); no residual."""
    _check("feed_forward", x_TH, weight1, bias1, weight2, bias2)
    y = _FeedForward.apply(x_TH, weight1, bias1, weight2, bias2, kind, arithmetic)
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
    arithmetic: Arithmetic = FP32,
) -> Tensor:
    """LayerNorm(x + dropout(linear2(activation(linear1(x)))))."""
    _check("feed_forward_norm", x_TH, weight1, bias1, weight2, bias2)
    require("feed_forward_norm", (x_TH.shape[1], weight1.shape[0]), weight2=weight2)
    require("feed_forward_norm", x_TH.shape[1:], norm_weight=norm_weight, norm_bias=norm_bias)
    key = draw_key() if p > 0 else 0
    weights = weight1, bias1, weight2, bias2, norm_weight, norm_bias
    return _FeedForwardNorm.apply(x_TH, *weights, kind, eps, p, key, arithmetic)


def plain(x_TH, weight1, bias1, weight2, bias2, kind, factors=None, norm=None) -> Tensor:
    """Both in PyTorch; `factors` is what dropout multiplies by, `norm` is (weight, bias, eps) where there is one."""
    h = activation_plain(torch.nn.functional.linear(x_TH, weight1, bias1), None, kind)
    y = torch.nn.functional.linear(h, weight2, bias2)
    y = y if factors is None else y * factors
    if norm is None:
        return y
    norm_weight, norm_bias, eps = norm
    return torch.nn.functional.layer_norm(x_TH + y, y.shape[-1:], norm_weight, norm_bias, eps)
