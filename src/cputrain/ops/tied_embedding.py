"""Embeddings whose table is the weight of the vocabulary head, too: the gradient of both is one tensor.

Autograd adds up two gradients, each as large as the table; that of the embedding is nearly all zeros. In a backward the
head comes first. It offers its gradient, which waits in autograd for the embedding's, and the embedding adds its rows
to it in place and returns none of its own. That is right only while autograd holds that very tensor, which its
reference count tells: code that also uses the weight may have made autograd replace it by a sum.

Shapes: table_VH vocabulary × hidden, ids of any shape.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

from cputrain import native
from cputrain.native import recycled
from cputrain.native.operands import address
from cputrain.ops.gradient import fp32_backward

CAN_COUNT = hasattr(Tensor, "_use_count")  # torch 2.8 and later, as far as is known


class _Waiting:
    """An embedding whose backward is still to come."""


class SharedTable:
    """What a table's embeddings and head know of each other."""

    def __init__(self) -> None:
        self.waiting: weakref.WeakSet[_Waiting] = weakref.WeakSet()
        self._offered: tuple[int, Tensor] | None = None  # by the head, in the backward of this number

    def offer(self, grad_VH: Tensor) -> None:
        self._offered = (torch._C._current_graph_task_id(), grad_VH) if self.waiting else None

    def held_by_autograd(self) -> Tensor | None:
        """The head's gradient, if autograd is going to add the embedding's to it."""
        if self._offered is None:
            return None
        task, grad_VH = self._offered
        # One reference is ours, the other that of autograd's buffer.
        held = task == torch._C._current_graph_task_id() and grad_VH._use_count() > 1  # type: ignore[attr-defined]
        return grad_VH if held else None

    def done(self, one: _Waiting) -> None:
        self.waiting.discard(one)
        if not self.waiting:
            self._offered = None  # so that autograd can hand the gradient on without a copy


_tables: WeakIdKeyDictionary = WeakTensorKeyDictionary()


def shared_table(table_VH: Tensor) -> SharedTable | None:
    """For the head: None if no embedding of this table is waiting."""
    found: SharedTable | None = _tables.get(table_VH)
    return found if found is not None and found.waiting else None


class _TiedEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, table_VH: Tensor, ids: Tensor, padding_id: int) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.shape, ctx.padding_id = table_VH.shape, padding_id
        ctx.table, ctx.waiting = _tables.setdefault(table_VH, SharedTable()), _Waiting()
        ctx.table.waiting.add(ctx.waiting)
        return torch.embedding(table_VH, ids)

    @staticmethod
    @fp32_backward
    def backward(ctx, grad: Tensor):
        (ids,) = ctx.saved_tensors
        held = ctx.table.held_by_autograd()
        total = recycled.zeros(*ctx.shape) if held is None else held
        _add_rows(grad.contiguous(), ids.contiguous(), total, ctx.padding_id)
        ctx.table.done(ctx.waiting)
        return total if held is None else None, None, None


def _add_rows(grad: Tensor, ids: Tensor, total_VH: Tensor, padding_id: int) -> None:
    rows, cols = ids.numel(), total_VH.shape[1]
    native.kernels().embedding_grad(
        address("tied embedding: gradient", grad, rows * cols),
        address("tied embedding: ids", ids, rows, torch.int64),
        address("tied embedding: gradient of the table", total_VH, total_VH.numel()),
        *(rows, cols, padding_id),
    )


def tied_embedding(table_VH: Tensor, ids: Tensor, padding_id: int | None = None) -> Tensor:
    """`torch.nn.functional.embedding`; rows of `padding_id` get no gradient."""
    vocabulary = table_VH.shape[0]
    skipped = -1 if padding_id is None else padding_id % vocabulary
    return _TiedEmbedding.apply(table_VH, ids, skipped)


def plain(table_VH: Tensor, ids: Tensor, padding_id: int | None = None) -> Any:
    """The same in PyTorch."""
    return torch.nn.functional.embedding(ids, table_VH, padding_id)
