"""Query, key and value as one product, and attention on it: one operator, so that what lies between is never a tensor
that somebody else may hold.

Kept for the backward: x and the product (as the arithmetic says), the attention's output, the log-sum-exp. The joined
weight is a copy, made anew in the backward.

Shapes: x_TI tokens × in-features, three weights (heads · size) × I.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cputrain.ops import workspace
from cputrain.ops.arithmetic import FP32, Arithmetic, rounded
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
from cputrain.ops.linear import OutputGradient, forward_product
from cputrain.ops.operands import require, require_linear


class _SelfAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TI, heads, settings, key_bias, arithmetic, *weights_and_biases):
        weights, biases = weights_and_biases[:3], weights_and_biases[3:]
        ctx.call = arithmetic.begin()
        bias = None if biases[0] is None else torch.cat(biases)
        need_weights = any(ctx.needs_input_grad[5:8])
        to_round = ctx.call.kind == "bf16"
        joined, added = torch.cat(weights), None if to_round else bias
        qkv, kept = forward_product(x_TI, joined, added, ctx.call, keep=need_weights, passing="qkv", narrow=True)
        if to_round:  # now, not after the attention: the backward must find the log-sum-exp of what it reads
            qkv = rounded(qkv, bias)
        ctx.heads, ctx.settings, ctx.key_bias = heads, settings, key_bias
        out, lse = attention_forward(*split_packed(qkv, heads), settings, key_bias)
        kept_out = out  # as the next product keeps it, which is bf16 only if it multiplies that
        if ctx.call.kind == "native_bf16":
            kept_out = ctx.call.keep(out.flatten(1))[0].view(out.shape)
        ctx.save_for_backward(qkv, kept_out, lse, *weights, *kept)
        return out.flatten(1)

    @staticmethod
    @fp32_backward
    def backward(ctx, grad):
        qkv, out, lse, *weights_and_kept = ctx.saved_tensors
        weights, kept = weights_and_kept[:3], weights_and_kept[3:]
        dqkv = workspace.spread_rows("qkv", *qkv.shape)
        grad = grad.contiguous().view(out.shape)
        q, k, v = split_packed(qkv, ctx.heads)
        grads = split_packed(dqkv, ctx.heads)
        attention_backward(grad, q, k, v, out.float(), lse, ctx.settings, grads, ctx.key_bias)
        need_x, _, _, _, _, *needed = ctx.needs_input_grad
        need_weights, need_biases = needed[:3], needed[3:]
        gradient = OutputGradient(dqkv, ctx.call, any(need_weights), any(need_biases))
        grad_x = gradient.of_input(torch.cat(weights)) if need_x else None
        grad_weight = gradient.of_weight(kept, weights[0].shape[1]) if any(need_weights) else None
        return grad_x, *[None] * 4, *_thirds(grad_weight, need_weights), *_thirds(gradient.bias, need_biases)


def _thirds(joined: Tensor | None, needed: list[bool]) -> list[Tensor | None]:
    """The joined gradient cut up again; parts that nobody needs are left out."""
    if joined is None:
        return [None] * 3
    return [part if need else None for part, need in zip(joined.chunk(3), needed, strict=True)]


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
    arithmetic: Arithmetic = FP32,
) -> Tensor:
    """`attention` of x's queries, keys and values, tokens × (heads · size); all three have a bias or none has.

    `key_bias`, (sequences or 1, 1, 1, keys), is added to the scores and has no gradient.
    """
    for name, weight, bias in zip(("_q", "_k", "_v"), weights, biases, strict=True):
        require_linear("self_attention", x_TI, weight, bias, name)
        require("self_attention", weights[0].shape, **{f"weight{name}": weight})
    if len({bias is None for bias in biases}) > 1:
        raise ValueError("self_attention: all three of query, key and value must have a bias, or none.")
    settings = Settings(sequences, scale, causal, p, draw_key() if p > 0 else 0)
    if key_bias is not None:
        require_bias(key_bias)
        key_bias = four_dimensions(key_bias.detach(), sequences, heads)
    return _SelfAttention.apply(x_TI, heads, settings, key_bias, arithmetic, *weights, *biases)


def plain(x_TI, weights, biases, sequences, *, heads, scale, causal=False, p=0.0, key=0, key_bias=None) -> Tensor:
    """The same in PyTorch, once the key is drawn."""
    parts = (torch.nn.functional.linear(x_TI, w, b) for w, b in zip(weights, biases, strict=True))
    q, k, v = (part.unflatten(-1, (heads, -1)) for part in parts)
    return attention_plain(q, k, v, sequences, scale=scale, causal=causal, p=p, key=key, bias=key_bias).flatten(1)
