"""The feed-forward half of a transformer layer: linear, activation, linear, and what follows (dropout, residual, norm).

Only the input, the first product's raw output and, with a norm, the sum before it are kept; the activation, which is as
large as the first product, is computed again in the backward, in the same pass that needs its derivative anyway.

Shapes: x_TH tokens × hidden, h_TM tokens × middle.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cputrain.ops.activation import activation_backward, activation_forward
from cputrain.ops.activation import plain as activation_plain
from cputrain.ops.dropout import draw_key, dropout
from cputrain.ops.linear import weight_grad
from cputrain.ops.post_norm import post_norm_backward, post_norm_forward


def _two_products(x_TH, weight1, bias1, weight2, kind):
    h_TM = x_TH.mm(weight1.t())
    return h_TM, activation_forward(h_TM, bias1, kind).mm(weight2.t())


def _two_products_backward(ctx, grad_y, x_TH, h_TM, weight1, bias1, weight2, grad_x_start):
    """Gradients of x, weight1, bias1, weight2; that of x is added to `grad_x_start` if there is one."""
    need_x, need_weight1, _, need_weight2 = ctx.needs_input_grad[:4]
    grad_h, grad_bias1, activation = activation_backward(
        grad_y.mm(weight2), h_TM, bias1, ctx.kind, want_activation=need_weight2, inplace=True
    )
    grad_weight2 = weight_grad(grad_y, activation, need_weight2)
    del activation
    grad_weight1 = weight_grad(grad_h, x_TH, need_weight1)
    grad_x = None
    if need_x:
        grad_x = grad_h.mm(weight1) if grad_x_start is None else grad_x_start.addmm_(grad_h, weight1)
    return grad_x, grad_weight1, grad_bias1, grad_weight2


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TH, weight1, bias1, weight2, bias2, kind):
        h_TM, y = _two_products(x_TH, weight1, bias1, weight2, kind)
        ctx.save_for_backward(x_TH, h_TM, weight1, bias1, weight2)
        ctx.kind, ctx.has_bias2 = kind, bias2 is not None
        return y if bias2 is None else y.add_(bias2)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_y):
        grad_y = grad_y.contiguous()
        grads = _two_products_backward(ctx, grad_y, *ctx.saved_tensors, None)
        return *grads, grad_y.sum(0) if ctx.has_bias2 else None, None


class _FeedForwardNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TH, weight1, bias1, weight2, bias2, norm_weight, norm_bias, kind, eps, p, key):
        h_TM, sum_TH = _two_products(x_TH, weight1, bias1, weight2, kind)
        out, mean, rstd = post_norm_forward(sum_TH, bias2, x_TH, norm_weight, norm_bias, eps, p, key)
        ctx.save_for_backward(x_TH, h_TM, weight1, bias1, weight2, norm_weight, sum_TH, mean, rstd)
        ctx.kind, ctx.p, ctx.key, ctx.has_bias2 = kind, p, key, bias2 is not None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out):
        *products, norm_weight, sum_TH, mean, rstd = ctx.saved_tensors
        grad_sum, grad_y, grad_norm_weight, grad_norm_bias, grad_bias2 = post_norm_backward(
            grad_out.contiguous(), sum_TH, mean, rstd, norm_weight, ctx.p, ctx.key
        )
        grads = _two_products_backward(ctx, grad_y, *products, grad_sum)
        return *grads, grad_bias2 if ctx.has_bias2 else None, grad_norm_weight, grad_norm_bias, None, None, None, None


def feed_forward(
    x_TH: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    kind: str,
    p: float = 0.0,
) -> Tensor:
    """dropout(linear2(activation(linear1(x)))); no residual."""
    y = _FeedForward.apply(x_TH, weight1, bias1, weight2, bias2, kind)
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
) -> Tensor:
    """LayerNorm(x + dropout(linear2(activation(linear1(x)))))."""
    key = draw_key() if p > 0 else 0
    return _FeedForwardNorm.apply(x_TH, weight1, bias1, weight2, bias2, norm_weight, norm_bias, kind, eps, p, key)


def plain(x_TH, weight1, bias1, weight2, bias2, kind, factors=None, norm=None) -> Tensor:
    """Both in PyTorch; `factors` is what dropout multiplies by, `norm` is (weight, bias, eps) where there is one."""
    h = activation_plain(torch.nn.functional.linear(x_TH, weight1, bias1), None, kind)
    y = torch.nn.functional.linear(h, weight2, bias2)
    y = y if factors is None else y * factors
    if norm is None:
        return y
    norm_weight, norm_bias, eps = norm
    return torch.nn.functional.layer_norm(x_TH + y, y.shape[-1:], norm_weight, norm_bias, eps)
