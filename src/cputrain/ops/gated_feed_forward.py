"""The gated feed-forward of language models: down(activation(gate(x)) · up(x)).

Saved are the input, once for both first products, and their raw outputs; what the gate lets through is computed again
in the backward, in the pass that needs its derivatives anyway.

Shapes: x_TH tokens × hidden, g_TM and u_TM tokens × middle.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cputrain import native
from cputrain.formats import FP32, Dense, Format
from cputrain.formats.int16_saving import as_float
from cputrain.native import workspace
from cputrain.native.operands import address, require, require_linear
from cputrain.ops.activation import KINDS
from cputrain.ops.activation import plain as activation_plain
from cputrain.ops.gradient import fp32_backward


def gated(g_TM: Tensor, u_TM: Tensor, kind: str) -> Tensor:
    count, out = g_TM.numel(), workspace.floats("middle", *g_TM.shape)
    native.kernels().gated(
        *(address("gated: gate", g_TM, count), address("gated: up", u_TM, count)),
        *(address("gated: out", out, count), count, KINDS[kind]),
    )
    return out


def gated_backward(
    grad_TM: Tensor, g_TM: Tensor, u_TM: Tensor, kind: str, value: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The gradients of gate, written over `grad_TM`, and up; `value` receives what the gate lets through."""
    count, grad_up = g_TM.numel(), workspace.floats("up_grad", *u_TM.shape)
    place = address("gated: gradient", grad_TM, count)
    native.kernels().gated_backward(
        *(place, address("gated: gate", g_TM, count), address("gated: up", u_TM, count), place),
        *(address("gated: gradient of up", grad_up, count), address("gated: value", value, count)),
        *(count, KINDS[kind]),
    )
    return grad_TM, grad_up


class _GatedFeedForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TH, gate, gate_bias, up, up_bias, down, down_bias, kind: str, format: Format) -> Tensor:
        ctx.kind, ctx.call = kind, format.begin()
        wants = ctx.needs_input_grad[1] or ctx.needs_input_grad[3]
        g_TM, saved = ctx.call.forward(x_TH, Dense(gate), gate_bias, save=wants, until_kept="gate")
        u_TM, _ = ctx.call.forward(x_TH, Dense(up), up_bias, save=False, until_kept="up")
        y_TH, _ = ctx.call.forward(gated(g_TM, u_TM, kind), Dense(down), down_bias, save=False)
        ctx.save_for_backward(ctx.call.keep(g_TM), ctx.call.keep(u_TM), gate, up, down, *saved)
        return y_TH

    @staticmethod
    @fp32_backward
    def backward(ctx, grad_TH: Tensor):
        kept_g, kept_u, gate, up, down, *saved = ctx.saved_tensors
        g_TM, u_TM = as_float(kept_g, len(gate), "gate"), as_float(kept_u, len(up), "up")
        need_x, need_gate, need_gate_bias, need_up, need_up_bias, need_down, need_down_bias, *_ = ctx.needs_input_grad
        last = ctx.call.output_grad(grad_TH.contiguous(), weight=need_down, bias=need_down_bias)
        value = workspace.floats("middle", *g_TM.shape) if need_down else None
        grads = gated_backward(last.input(Dense(down), scratch="middle_grad"), g_TM, u_TM, ctx.kind, value)
        grad_down = None
        if value is not None:
            (grad_down,) = last.weight(Dense(down), ctx.call.save_input(value))
        grad_x, found = None, []
        wanted = ((gate, need_gate, need_gate_bias), (up, need_up, need_up_bias))
        for grad_TM, (weight, need_weight, need_bias) in zip(grads, wanted, strict=True):
            grad = ctx.call.output_grad(grad_TM, weight=need_weight, bias=need_bias)
            found.append(grad.weight(Dense(weight), tuple(saved))[0] if need_weight else None)
            found.append(grad.bias)
            grad_x = grad.input(Dense(weight), add_to=grad_x) if need_x else None
        return grad_x, *found, grad_down, last.bias, None, None


def gated_feed_forward(
    x_TH: Tensor,
    gate: Tensor,
    gate_bias: Tensor | None,
    up: Tensor,
    up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    kind: str,
    format: Format = FP32,
) -> Tensor:
    """down(activation(gate(x)) · up(x)), for an activation of KINDS."""
    require_linear("gated_feed_forward", x_TH, gate, gate_bias)
    require("gated_feed_forward", gate.shape, up=up)
    require("gated_feed_forward", gate.shape[:1], up_bias=up_bias)
    require("gated_feed_forward", down.shape[:1] + gate.shape[:1], down=down)
    require("gated_feed_forward", down.shape[:1], down_bias=down_bias)
    return _GatedFeedForward.apply(x_TH, gate, gate_bias, up, up_bias, down, down_bias, kind, format)


def plain(x_TH, gate, gate_bias, up, up_bias, down, down_bias, kind) -> Tensor:
    """The same in PyTorch."""
    linear = torch.nn.functional.linear
    return linear(
        activation_plain(linear(x_TH, gate, gate_bias), None, kind) * linear(x_TH, up, up_bias), down, down_bias
    )
