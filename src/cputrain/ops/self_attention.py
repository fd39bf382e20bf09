"""Query, key and value as one product, and attention on it: one operator, so that no other code can hold the product.

Saved for the backward: x and the product (as the format says), the attention's output, the log-sum-exp. The joined
weight is a copy, made anew in the backward.

Shapes: x_TI tokens × in-features, three weights (heads · size) × I.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cputrain.formats import FP32, Format, Joined
from cputrain.formats.int16_saving import as_float
from cputrain.native import workspace
from cputrain.native.operands import require, require_linear
from cputrain.ops.attention import (
    Sequences,
    Settings,
    attention_backward,
    attention_forward,
    four_dimensions,
    require_bias,
    split_packed,
)
from cputrain.ops.attention import plain as attention_plain
from cputrain.ops.dropout import draw_key
from cputrain.ops.gradient import fp32_backward


class _SelfAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TI, heads, settings, key_bias, format, *weights_and_biases):
        weights, biases = weights_and_biases[:3], weights_and_biases[3:]
        ctx.call = format.begin()
        bias = None if biases[0] is None else torch.cat(biases)
        need_weights = any(ctx.needs_input_grad[5:8])
        qkv, saved = ctx.call.forward(
            x_TI, Joined(weights), bias, save=need_weights, scratch="qkv", until_kept="raw", as_saved=True
        )
        ctx.heads, ctx.settings, ctx.key_bias = heads, settings, key_bias
        out, lse = attention_forward(*split_packed(qkv, heads), settings, key_bias)
        saved_out = ctx.call.save_output(out.flatten(1)).view(out.shape)
        ctx.save_for_backward(ctx.call.keep(qkv), saved_out, lse, *weights, *saved)
        return out.flatten(1)

    @staticmethod
    @fp32_backward
    def backward(ctx, grad):
        kept, out, lse, *weights_and_saved = ctx.saved_tensors
        weights, saved = Joined(weights_and_saved[:3]), weights_and_saved[3:]
        qkv = as_float(kept, weights.out_features, "raw")
        dqkv = workspace.spread_rows("qkv", *qkv.shape)
        grad = grad.contiguous().view(out.shape)
        q, k, v = split_packed(qkv, ctx.heads)
        grads = split_packed(dqkv, ctx.heads)
        attention_backward(grad, q, k, v, out.float(), lse, ctx.settings, grads, ctx.key_bias)
        need_x, _, _, _, _, *needed = ctx.needs_input_grad
        need_weights, need_biases = needed[:3], needed[3:]
        gradient = ctx.call.output_grad(dqkv, weight=any(need_weights), bias=any(need_biases))
        grad_x = gradient.input(weights) if need_x else None
        grad_weights = gradient.weight(weights, saved) if any(need_weights) else [None] * 3
        grad_biases = [None] * 3 if gradient.bias is None else gradient.bias.chunk(3)
        return grad_x, *[None] * 4, *_needed(grad_weights, need_weights), *_needed(grad_biases, need_biases)


def _needed(grads: Sequence[Tensor | None], needed: list[bool]) -> list[Tensor | None]:
    return [grad if need else None for grad, need in zip(grads, needed, strict=True)]


def self_attention(
    x_TI: Tensor,
    weights: list[Tensor],
    biases: list[Tensor | None],
    sequences: Sequences,
    *,
    heads: int,
    scale: float,
    causal: bool = False,
    p: float = 0.0,
    key_bias: Tensor | None = None,
    window: int | None = None,
    format: Format = FP32,
) -> Tensor:
    """`attention` of x's queries, keys and values, tokens × (heads · size); all three have a bias or none has.

    `key_bias`, (sequences or 1, 1, 1, keys), is added to the scores and has no gradient.
    """
    for name, weight, bias in zip(("_q", "_k", "_v"), weights, biases, strict=True):
        require_linear("self_attention", x_TI, weight, bias, name)
        require("self_attention", weights[0].shape, **{f"weight{name}": weight})
    if len({bias is None for bias in biases}) > 1:
        raise ValueError("self_attention: all three of query, key and value must have a bias, or none.")
    settings = Settings(sequences, scale, causal, p, draw_key() if p > 0 else 0, window)
    if key_bias is not None:
        require_bias(key_bias)
        key_bias = four_dimensions(key_bias.detach(), sequences, heads)
    return _SelfAttention.apply(x_TI, heads, settings, key_bias, format, *weights, *biases)


def plain(x_TI, weights, biases, sequences, *, heads, key_bias=None, **options) -> Tensor:
    """The same in PyTorch, once the key is drawn."""
    parts = (torch.nn.functional.linear(x_TI, w, b) for w, b in zip(weights, biases, strict=True))
    q, k, v = (part.unflatten(-1, (heads, -1)) for part in parts)
    return attention_plain(q, k, v, sequences, bias=key_bias, **options).flatten(1)
