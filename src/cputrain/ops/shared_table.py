"""A table that embeddings and a vocabulary head share: the gradient of all is one tensor.

Autograd adds up two gradients, each as large as the table; that of an embedding is nearly all zeros. In a backward the
head comes first. It offers its gradient, which waits in autograd for the embedding's, and the embedding adds its rows
to it in place and returns none of its own. That is right only while autograd holds that very tensor, which its
reference count tells: code that also uses the weight may have made autograd replace it by a sum.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

CAN_COUNT = hasattr(Tensor, "_use_count")  # torch 2.8 and later, as far as is known


class SharedTable:
    """What a table's embeddings and head know of each other."""

    def __init__(self) -> None:
        self.waiting: weakref.WeakSet[Waiting] = weakref.WeakSet()
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

    def done(self, one: Waiting) -> None:
        self.waiting.discard(one)
        if not self.waiting:
            self._offered = None  # so that autograd can hand the gradient on without a copy


_tables: WeakIdKeyDictionary = WeakTensorKeyDictionary()


class Waiting:
    """An embedding whose backward is still to come."""

    def __init__(self, table_VH: Tensor) -> None:
        self._table: SharedTable = _tables.setdefault(table_VH, SharedTable())
        if CAN_COUNT:
            self._table.waiting.add(self)

    def held_by_autograd(self) -> Tensor | None:
        return self._table.held_by_autograd()

    def done(self) -> None:
        self._table.done(self)


def shared_table(table_VH: Tensor) -> SharedTable | None:
    """For the head: None if no embedding of this table is waiting."""
    found: SharedTable | None = _tables.get(table_VH)
    return found if found is not None and found.waiting else None
