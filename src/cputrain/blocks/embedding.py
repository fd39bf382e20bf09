"""Embedding modules: the sum of several tables' rows, LayerNorm and dropout in one pass.

Models differ in how they number positions and default the types, so that part stays theirs: stock's forward runs, but
its tables answer with a `PendingRows` instead of a tensor. Sums of these, the norm and the dropout are only noted, and
the fused operator runs at the end. Anything else that the model does with them makes them the tensor they stand for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from cputrain.blocks.residual import dropout_rate
from cputrain.ops.embeddings import embed
from cputrain.padding import StandIn, computed
from cputrain.patching.bind import (
    Patches,
    step_aside,
    untouched,
    why_not_global_hooks,
    why_not_parts,
    why_not_tensors,
)
from cputrain.patching.half_precision import is_half

_recording: ContextVar[bool] = ContextVar("cputrain_recording_embeddings", default=False)
_MOST_TABLES = 3


class PendingRows(StandIn):
    """The rows `tables[i][ids[i]]`, summed, then normalised if `norm` is set: not computed yet."""

    def __init__(
        self, tables: tuple[nn.Embedding, ...], ids: tuple[Tensor, ...], norm: nn.LayerNorm | None = None
    ) -> None:
        self.tables, self.ids, self.norm = tables, ids, norm
        self.value: Tensor | None = None  # once code has had the tensor, which it may have changed

    def compute(self) -> Tensor:
        if self.value is None:
            self.value = self._plain_sum() if self.norm is None else self.normalised(None)
        return self.value

    def normalised(self, dropout: nn.Dropout | None) -> Tensor:
        assert self.norm is not None
        shape = torch.broadcast_shapes(*(ids.shape for ids in self.ids))
        flat_ids = [ids.expand(shape).reshape(-1) for ids in self.ids]
        word, position, types = _three(self.tables)
        word_ids, position_ids, type_ids = _three(flat_ids)
        out = embed(
            word_ids,
            type_ids,
            position_ids,
            word.weight,
            None if position is None else position.weight,
            None if types is None else types.weight,
            self.norm.weight,
            self.norm.bias,
            self.norm.eps,
            0.0 if dropout is None else dropout_rate(dropout),
            (word.padding_idx, getattr(position, "padding_idx", None), getattr(types, "padding_idx", None)),
        )
        return out.view(*shape, -1)

    def _plain_sum(self) -> Tensor:
        parts = [
            nn.functional.embedding(i, t.weight, t.padding_idx) for t, i in zip(self.tables, self.ids, strict=True)
        ]
        return sum(parts[1:], parts[0])

    def is_sum(self) -> bool:
        """Whether it is still a sum of rows that no code has had as a tensor."""
        return self.norm is None and self.value is None

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """A hook of transformers' checkpointing asks for gradients that rows of trained tables have anyway."""
        trained = any(table.weight.requires_grad for table in self.tables)
        return self if requires_grad and trained else self.compute().requires_grad_(requires_grad)

    def _joins(self, other: Any) -> bool:
        both = isinstance(other, PendingRows) and self.is_sum() and other.is_sum()
        return both and len(self.tables) + len(other.tables) <= _MOST_TABLES

    def __add__(self, other: Any) -> Any:
        if self._joins(other):
            return PendingRows(self.tables + other.tables, self.ids + other.ids)
        return self.compute() + computed(other)

    def __iadd__(self, other: Any) -> Any:
        """In place: other names of this sum see it too, as they would see the tensor change."""
        if self._joins(other) and _same_shape(self.ids[0], other.ids):
            self.tables, self.ids = self.tables + other.tables, self.ids + other.ids
            return self
        self.value = self.compute().__iadd__(computed(other))
        return self


def _same_shape(first: Tensor, others: Sequence[Tensor]) -> bool:
    """Whether adding these rows in place leaves the sum its shape."""
    return torch.broadcast_shapes(first.shape, *(ids.shape for ids in others)) == first.shape


def _three(found: Sequence[Any]) -> list[Any]:
    return [*found, *[None] * (_MOST_TABLES - len(found))]


def table_forward(self: nn.Embedding, stock: Callable, input: Tensor) -> Any:
    return PendingRows((self,), (input,)) if _recording.get() else stock(input)


def norm_forward(self: nn.LayerNorm, stock: Callable, input: Any) -> Any:
    if isinstance(input, PendingRows) and input.is_sum():
        return PendingRows(input.tables, input.ids, self)
    return stock(computed(input))


def dropout_forward(self: nn.Dropout, stock: Callable, input: Any) -> Tensor:
    if isinstance(input, PendingRows) and input.norm is not None and input.value is None:
        return input.normalised(self)
    return stock(computed(input))


def fused_forward(self: nn.Module, stock: Callable, *args: Any, **kwargs: Any) -> Tensor:
    reason = _why_not(self)
    if reason is not None:
        step_aside(self, reason)
        return stock(*args, **kwargs)
    token = _recording.set(True)
    try:
        out = stock(*args, **kwargs)
    finally:
        _recording.reset(token)
    return computed(out)


def _parts(module: nn.Module) -> tuple[list[nn.Module], list[nn.Module], list[nn.Module]]:
    children = list(module.children())
    return tuple([c for c in children if isinstance(c, kind)] for kind in (nn.Embedding, nn.LayerNorm, nn.Dropout))  # type: ignore[return-value]


def _why_not(module: nn.Module) -> str | None:
    tables, norms, dropouts = _parts(module)
    if any(table.max_norm is not None or table.scale_grad_by_freq or table.sparse for table in tables):
        return "an embedding has max_norm, scale_grad_by_freq or sparse"
    return (
        why_not_parts(tables, nn.Embedding)
        or why_not_parts(norms, nn.LayerNorm)
        or why_not_parts(dropouts, nn.Dropout)
        or why_not_global_hooks()
        or why_not_tensors(*(part.weight for part in (*tables, *norms)), *(norm.bias for norm in norms))
        or _why_not_sizes(tables, norms)
    )


def _why_not_sizes(tables: list[nn.Module], norms: list[nn.Module]) -> str | None:
    parameters = [*(table.weight for table in tables), *(p for norm in norms for p in (norm.weight, norm.bias))]
    return "tables and norm differ in size" if len({p.shape[-1] for p in parameters if p is not None}) > 1 else None


def take_over(name: str, module: nn.Module, patches: Patches) -> bool:
    tables, norms, dropouts = _parts(module)
    children = list(module.children())
    if not all(untouched(child) for child in children):
        return False
    if len(tables) < 2 or len(norms) != 1 or len(dropouts) > 1 or len(children) != len(tables) + 1 + len(dropouts):
        return False
    if any(is_half(table.weight) for table in tables):  # frozen ones: their rows become fp32 one by one
        return False
    if norms[0].weight is None or norms[0].bias is None or len(norms[0].normalized_shape) != 1:
        return False
    patches.bind(name, module, "forward", fused_forward, "embedding rows, LayerNorm and dropout in one pass", children)
    for part, forward in (
        *((t, table_forward) for t in tables),
        (norms[0], norm_forward),
        *((d, dropout_forward) for d in dropouts),
    ):
        patches.bind(name, part, "forward", forward, "part of the embeddings above")
    return True
