"""A linear layer over the real tokens of a padded batch, with a padded result: the vocabulary head of a language model.

Its logits are the largest tensor of the whole model. A product of all real tokens, scattered afterwards, would hold
them twice, and so would the gathered gradient in the backward. Here a few MB at a time are multiplied and copied:
blocks of the vocabulary, so that each weight is read once.

Shapes: x_TI real tokens × in-features, w_OI vocabulary × I, y_PO positions of the padded batch × O; `place` (T) is each
token's position.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from cputrain.formats import FP32, Call, Dense, Format, Saved
from cputrain.ops.gradient import fp32_backward

# What a product writes should still be in the last-level cache when it is copied. On an AMD EPYC (32 MB of it) 700
# tokens × 384 → 30,522 take 200 ms of one core in blocks of 3 or 6 MB, 206 in blocks of 23 MB, 256 as one product and
# a scatter.
BLOCK_BYTES = 4 << 20


def is_worthwhile(tokens: int, out_features: int) -> bool:
    """Whether there is more than a block or two."""
    return tokens * out_features * 4 > 2 * BLOCK_BYTES


def _blocks(tokens: int, out_features: int, call: Call) -> Iterator[tuple[slice, Call]]:
    """Columns, at least 256 so that a product is worth its call, a multiple of every kernel's panel; and whose call.

    One block's products belong to `call`, which may look at a sample of them: as many looks as in any other layer.
    """
    width = max(BLOCK_BYTES // (4 * max(tokens, 1)) // 64 * 64, 256)
    begins = range(0, out_features, width)
    looked_at = begins[tokens % len(begins)]  # another one for other batches
    for begin in begins:
        yield slice(begin, min(begin + width, out_features)), call if begin == looked_at else call.beside()


class _PaddedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TI, w_OI, bias_O, place, positions: int, format: Format) -> Tensor:
        ctx.call = format.begin()
        y_PO = x_TI.new_empty(positions, w_OI.shape[0])
        padded = torch.ones(positions, dtype=torch.bool).index_fill_(0, place, False)
        y_PO.index_fill_(0, padded.nonzero().squeeze(1), 0.0)
        saved: Saved = ()
        for block, call in _blocks(x_TI.shape[0], w_OI.shape[0], ctx.call):
            bias = None if bias_O is None else bias_O[block]
            save = call is ctx.call and ctx.needs_input_grad[1] and not saved
            y_TB, saved_now = call.forward(x_TI, Dense(w_OI[block]), bias, save=save)
            saved = saved or saved_now
            y_PO[:, block].index_copy_(0, place, y_TB)
        ctx.save_for_backward(w_OI, place, *saved)
        return y_PO

    @staticmethod
    @fp32_backward
    def backward(ctx, grad_PO: Tensor):
        w_OI, place, *saved = ctx.saved_tensors
        need_x, need_w, need_bias, *_ = ctx.needs_input_grad
        grad_x = None
        grad_w = torch.empty_like(w_OI) if need_w else None
        grad_bias = w_OI.new_empty(w_OI.shape[0]) if need_bias else None
        for block, call in _blocks(place.shape[0], w_OI.shape[0], ctx.call):
            weight = Dense(w_OI[block])
            grad = call.output_grad(grad_PO[:, block].index_select(0, place), weight=need_w, bias=need_bias)
            if need_x:
                grad_x = grad.input(weight, add_to=grad_x)
            if grad_w is not None:
                (grad_w[block],) = grad.weight(weight, tuple(saved))
            if grad_bias is not None:
                grad_bias[block] = grad.bias
        return grad_x, grad_w, grad_bias, None, None, None


def padded_linear(
    x_TI: Tensor,
    w_OI: Tensor,
    bias_O: Tensor | None,
    place: Tensor,
    positions: int,
    format: Format = FP32,
) -> Tensor:
    """y_PO: x wᵀ + bias at the tokens' places, 0 elsewhere."""
    return _PaddedLinear.apply(x_TI, w_OI, bias_O, place, positions, format)


def plain(x_TI: Tensor, w_OI: Tensor, bias_O: Tensor | None, place: Tensor, positions: int) -> Tensor:
    """The same in PyTorch, for fp32."""
    rows = torch.nn.functional.linear(x_TI, w_OI, bias_O)
    return rows.new_zeros(positions, w_OI.shape[0]).index_copy(0, place, rows)
