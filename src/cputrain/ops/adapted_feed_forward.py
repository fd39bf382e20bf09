"""A gated feed-forward of frozen layers with adapters: down(activation(gate(x)) · up(x)).

Saved are the input, once, and the raw outputs of gate and up; what the gate lets through is computed again in the
backward, for the adapter of `down`.

Shapes: x_TH tokens × hidden, g_TM and u_TM tokens × middle.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cputrain.formats import FP32, Format
from cputrain.formats.int16_saving import as_float
from cputrain.native.operands import require
from cputrain.ops.activation import plain as activation_plain
from cputrain.ops.adapted_linear import Adapted, as_given
from cputrain.ops.adapted_linear import plain as linear_plain
from cputrain.ops.gated_feed_forward import gated, gated_backward
from cputrain.ops.gradient import fp32_backward


class Layers(NamedTuple):
    gate: Adapted
    up: Adapted
    down: Adapted

    def tensors(self) -> tuple[Tensor | None, ...]:
        return tuple(tensor for layer in self for tensor in layer.tensors())

    def with_tensors(self, tensors: tuple[Tensor | None, ...]) -> Layers:
        return Layers(*(layer.with_tensors(*tensors[3 * i : 3 * i + 3]) for i, layer in enumerate(self)))


class _AdaptedFeedForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TH: Tensor, layers: Layers, kind: str, format: Format, *tensors: Tensor | None) -> Tensor:
        ctx.call, ctx.layers, ctx.kind = format.begin(), layers, kind
        gate, up, down = layers.with_tensors(tensors)
        g_TM, t_gate = gate.forward(ctx.call, x_TH, until_kept="gate")
        u_TM, t_up = up.forward(ctx.call, x_TH, until_kept="up")
        y_TH, t_down = down.forward(ctx.call, gated(g_TM, u_TM, kind))
        x_TH = None if t_gate is None and t_up is None else x_TH
        ctx.save_for_backward(x_TH, ctx.call.keep(g_TM), ctx.call.keep(u_TM), t_gate, t_up, t_down, *tensors)
        return y_TH

    @staticmethod
    @fp32_backward
    def backward(ctx, grad_TH: Tensor):
        x_TH, kept_g, kept_u, t_gate, t_up, t_down, *tensors = ctx.saved_tensors
        need_x, _, _, _, *wanted = ctx.needs_input_grad
        gate, up, down = ctx.layers.with_tensors(tuple(tensors))
        g_TM = as_float(kept_g, gate.weight.out_features, "gate")
        u_TM = as_float(kept_u, up.weight.out_features, "up")
        grad_TH = grad_TH.contiguous()
        last = ctx.call.output_grad(grad_TH, weight=False, bias=wanted[6])
        middle = gated(g_TM, u_TM, ctx.kind) if t_down is not None else None
        grad_TM = last.input(down.weight, scratch="middle_grad")
        of_down = down.backward(last, grad_TH, middle, t_down, tuple(wanted[6:]), grad_TM)
        grads = gated_backward(grad_TM, g_TM, u_TM, ctx.kind, None)
        grad_x, found = None, []
        for i, (layer, dy_TM, t_TR) in enumerate(zip((gate, up), grads, (t_gate, t_up), strict=True)):
            gradient = ctx.call.output_grad(dy_TM, weight=False, bias=wanted[3 * i])
            grad_x = gradient.input(layer.weight, add_to=grad_x) if need_x else None
            found += layer.backward(gradient, dy_TM, x_TH, t_TR, tuple(wanted[3 * i : 3 * i + 3]), grad_x)
        return grad_x, None, None, None, *as_given((*found, *of_down), tuple(tensors))


def adapted_feed_forward(x_TH: Tensor, layers: Layers, kind: str, format: Format = FP32) -> Tensor:
    """down(activation(gate(x)) · up(x)), for an activation of KINDS."""
    gate, up, down = (layer.weight for layer in layers)
    require("adapted_feed_forward", (x_TH.shape[0], gate.in_features), x=x_TH)
    found = [(weight.out_features, weight.in_features) for weight in (gate, up, down)]
    if found[0] != found[1] or found[2][1] != found[0][0]:
        raise ValueError(f"adapted_feed_forward: gate, up and down don't fit one another, found {found}.")
    for layer in layers:
        layer.require("adapted_feed_forward")
    return _AdaptedFeedForward.apply(x_TH, layers, kind, format, *layers.tensors())


def plain(x_TH: Tensor, layers: Layers, kind: str) -> Tensor:
    """The same in PyTorch."""
    gate, up, down = layers
    return linear_plain(activation_plain(linear_plain(x_TH, gate), None, kind) * linear_plain(x_TH, up), down)
