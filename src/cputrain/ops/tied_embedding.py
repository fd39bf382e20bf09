"""Embeddings whose table is the weight of the vocabulary head, too: one gradient for both (shared_table.py).

Shapes: table_VH vocabulary × hidden, ids of any shape.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cputrain.ops.embeddings import embedding_grad
from cputrain.ops.gradient import fp32_backward
from cputrain.ops.shared_table import Waiting


class _TiedEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, table_VH: Tensor, ids: Tensor, padding_id: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.vocabulary, ctx.padding_id, ctx.waiting = len(table_VH), padding_id, Waiting(table_VH)
        return torch.embedding(table_VH, ids)

    @staticmethod
    @fp32_backward
    def backward(ctx, grad: Tensor):
        (ids,) = ctx.saved_tensors
        held = ctx.waiting.held_by_autograd()
        total = embedding_grad(grad, ids, ctx.vocabulary, ctx.padding_id, add_to=held)
        ctx.waiting.done()
        return total if held is None else None, None, None


def tied_embedding(table_VH: Tensor, ids: Tensor, padding_id: int | None = None) -> Tensor:
    """`torch.nn.functional.embedding`; rows of `padding_id` get no gradient."""
    return _TiedEmbedding.apply(table_VH, ids, padding_id)


def plain(table_VH: Tensor, ids: Tensor, padding_id: int | None = None) -> Any:
    """The same in PyTorch."""
    return torch.nn.functional.embedding(ids, table_VH, padding_id)
