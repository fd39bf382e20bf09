"""A linear layer: one product and its three gradients, in the layer's number format.

The bias rides along, and gradients of frozen parameters are not computed. Shapes: x_TI tokens × in-features, w_OI
out × in, y_TO.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cputrain.formats import FP32, Dense, Format
from cputrain.native.operands import require_linear
from cputrain.ops.gradient import fp32_backward


def flat(x: Tensor) -> Tensor:
    """All leading dimensions as one: tokens × features."""
    return x.reshape(-1, x.shape[-1])


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TI: Tensor, w_OI: Tensor, bias_O: Tensor | None, format: Format) -> Tensor:
        ctx.call = format.begin()
        y, saved = ctx.call.forward(x_TI, Dense(w_OI), bias_O, save=ctx.needs_input_grad[1])
        ctx.save_for_backward(w_OI, *saved)
        return y

    @staticmethod
    @fp32_backward
    def backward(ctx, grad_TO: Tensor):
        w_OI, *saved = ctx.saved_tensors
        need_x, need_w, need_bias, _ = ctx.needs_input_grad
        weight, grad = Dense(w_OI), ctx.call.output_grad(grad_TO.contiguous(), weight=need_w, bias=need_bias)
        grad_x = grad.input(weight) if need_x else None
        (grad_w,) = grad.weight(weight, saved) if need_w else (None,)
        return grad_x, grad_w, grad.bias, None


def linear(x_TI: Tensor, w_OI: Tensor, bias_O: Tensor | None, format: Format = FP32) -> Tensor:
    require_linear("linear", x_TI, w_OI, bias_O)
    return _Linear.apply(x_TI, w_OI, bias_O, format)
