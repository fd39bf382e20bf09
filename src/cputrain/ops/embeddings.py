"""Embeddings: the sum of up to three tables' rows, LayerNorm and dropout in one pass.

The gradients of the tables are dense, as stock's, but only rows in use are worked on. The sum is gathered again in the
backward rather than kept.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from cputrain import native
from cputrain.native import recycled
from cputrain.native.operands import address, contiguous, require
from cputrain.ops import norm
from cputrain.ops.dropout import draw_key
from cputrain.ops.gradient import fp32_backward
from cputrain.ops.shared_table import Waiting

# Which row of each table gets no gradient: word, position, token type.
PaddingRows = tuple[int | None, int | None, int | None]


def embedding_grad(
    grad_rows: Tensor, ids: Tensor, num_rows: int, padding_idx: int | None, add_to: Tensor | None = None
) -> Tensor:
    """The gradient of a table of `num_rows` rows, of which row ids[i] got grad_rows[i]; for plain nn.Embedding, too.

    Added to `add_to` in place if given.
    """
    grad_rows = grad_rows.reshape(-1, grad_rows.shape[-1]).contiguous()
    rows, cols = grad_rows.shape
    ids = _flat_ids(ids)
    _check_ids("ids", ids, rows, num_rows)  # again: code that shares their memory may have changed them since
    grad = recycled.zeros(num_rows, cols) if add_to is None else add_to
    native.kernels().embedding_grad(
        address("embedding_grad: rows", grad_rows, rows * cols),
        address("embedding_grad: ids", ids, rows, torch.int64),
        address("embedding_grad: table", grad, num_rows * cols),
        *(rows, cols, _row_number(padding_idx, num_rows)),
    )
    return grad


def _flat_ids(ids: Tensor) -> Tensor:
    if ids.dtype not in (torch.int64, torch.int32):  # in stock's words
        raise RuntimeError(
            "Expected tensor for argument #1 'indices' to have one of the following scalar types: Long, Int; "
            f"but got {ids.type()} instead (while checking arguments for embedding)"
        )
    return ids.reshape(-1).to(torch.int64).contiguous()


def _row_number(padding_idx: int | None, num_rows: int) -> int:
    """-1, which is no row's number, for none; stock counts negative ones from the end."""
    if padding_idx is None:
        return -1
    return padding_idx if padding_idx >= 0 else num_rows + padding_idx


def _check_ids(name: str, ids: Tensor, rows: int, table_rows: int) -> None:
    place, where = ctypes.c_int64(), address(f"embed: {name}", ids, rows, torch.int64)
    native.kernels().find_outside(where, rows, table_rows, ctypes.addressof(place))
    if place.value >= 0:
        raise IndexError(
            f"index out of range in self: {name} has {int(ids[place.value])} at {place.value}, "
            f"but its table has {table_rows} rows."
        )


def _addresses(tables_and_ids: tuple[Tensor | None, ...], rows: int, cols: int) -> list[int | None]:
    """Of each table and its ids in turn; the ids are inside, whatever has been written to them since they came."""
    found: list[int | None] = []
    names = ("input_ids", "position_ids", "token_type_ids")
    for name, table, ids in zip(names, tables_and_ids[::2], tables_and_ids[1::2], strict=True):
        if table is not None and ids is not None:
            _check_ids(name, ids, rows, table.shape[0])
            found.append(address(f"embed: the table of {name}", table, table.shape[0] * cols))
            found.append(address(f"embed: {name}", ids, rows, torch.int64))
        else:
            found += [None, None]
    return found


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, word, position, token_type, weight, bias, word_ids, position_ids, type_ids, options):
        eps, ctx.p, ctx.key, ctx.padding = options
        ctx.waiting = Waiting(word) if ctx.needs_input_grad[0] else None
        word, position, token_type, weight, bias = contiguous(word, position, token_type, weight, bias)
        rows, cols = len(word_ids), word.shape[1]
        out, mean, rstd = word.new_empty(rows, cols), word.new_empty(rows), word.new_empty(rows)
        native.kernels().embed(
            *_addresses((word, word_ids, position, position_ids, token_type, type_ids), rows, cols),
            *(address("embed: the norm's weight", weight, cols), address("embed: the norm's bias", bias, cols)),
            *(address("embed: out", out, rows * cols), address("embed: mean", mean, rows)),
            address("embed: rstd", rstd, rows),
            *(rows, cols, eps, ctx.p, ctx.key),
        )
        ctx.save_for_backward(word, position, token_type, weight, word_ids, position_ids, type_ids, mean, rstd)
        return out

    @staticmethod
    @fp32_backward
    def backward(ctx, grad_out):
        word, position, token_type, weight, word_ids, position_ids, type_ids, mean, rstd = ctx.saved_tensors
        grad_out = grad_out.contiguous()
        grad_sum, grad_weight, grad_bias = (
            torch.empty_like(grad_out),
            torch.empty_like(weight),
            torch.empty_like(weight),
        )
        rows, cols = len(word_ids), word.shape[1]
        native.kernels().embed_backward(
            address("embed: gradient", grad_out, rows * cols),
            *_addresses((word, word_ids, position, position_ids, token_type, type_ids), rows, cols),
            *(address("embed: mean", mean, rows), address("embed: rstd", rstd, rows)),
            *(address("embed: the norm's weight", weight, cols), address("embed: sum", grad_sum, rows * cols)),
            address("embed: gradient of the norm's weight", grad_weight, cols),
            address("embed: gradient of the norm's bias", grad_bias, cols),
            *(rows, cols, ctx.p, ctx.key),
        )
        tables, ids = (word, position, token_type), (word_ids, position_ids, type_ids)
        held = None if ctx.waiting is None else ctx.waiting.held_by_autograd()
        grads = [
            embedding_grad(grad_sum, i, table.shape[0], padding, add_to) if needed else None
            for table, i, padding, needed, add_to in zip(
                tables, ids, ctx.padding, ctx.needs_input_grad[:3], (held, None, None), strict=True
            )
        ]
        if ctx.waiting is not None:
            ctx.waiting.done()
        if held is not None:
            grads[0] = None
        return *grads, grad_weight, grad_bias, None, None, None, None


def _ids_of(name: str, ids: Tensor | None, table: Tensor | None, word: Tensor, word_ids: Tensor) -> Tensor | None:
    if table is None:
        return None
    require("embed", (len(table), word.shape[1]), **{f"the table of {name}": table})
    return torch.zeros_like(word_ids) if ids is None else _flat_ids(ids)


def embed(
    input_ids: Tensor,
    token_type_ids: Tensor | None,
    position_ids: Tensor | None,
    word: Tensor,
    position: Tensor | None,
    token_type: Tensor | None,
    ln_weight: Tensor,
    ln_bias: Tensor,
    eps: float,
    p: float,
    padding_idx: PaddingRows = (None, None, None),
) -> Tensor:
    """dropout(LayerNorm(word + position + type)), one row per id; a table without ids means its row 0."""
    if word.dim() != 2:
        raise ValueError(f"embed: word must have two dimensions, found {word.dim()}.")
    require("embed", word.shape, word=word)
    require("embed", word.shape[1:], ln_weight=ln_weight, ln_bias=ln_bias)
    word_ids = _flat_ids(input_ids)
    other_ids = (
        _ids_of("position_ids", position_ids, position, word, word_ids),
        _ids_of("token_type_ids", token_type_ids, token_type, word, word_ids),
    )
    options = (eps, p, draw_key() if p > 0 else 0, padding_idx)
    return _Embed.apply(word, position, token_type, ln_weight, ln_bias, word_ids, *other_ids, options)


def plain(
    input_ids,
    token_type_ids,
    position_ids,
    word,
    position,
    token_type,
    ln_weight,
    ln_bias,
    eps,
    padding_idx,
    factors=None,
):
    """The same in PyTorch; `factors` is what dropout multiplies by."""
    tables = zip((word, position, token_type), (input_ids, position_ids, token_type_ids), padding_idx, strict=True)
    rows = [
        torch.nn.functional.embedding(torch.zeros_like(input_ids) if i is None else i, table, padding).flatten(0, -2)
        for table, i, padding in tables
        if table is not None
    ]
    out = norm.plain(sum(rows[1:], rows[0]), ln_weight, ln_bias, eps)
    return out if factors is None else out * factors
