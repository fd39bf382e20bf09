"""Batches without their padding: what travels through a model in place of a mask tensor.

`PaddingMask` leaves transformers' mask factory: which positions of the padded batch are real, and stock's own mask if
it is needed. An encoder or a layer turns it into `RaggedTokens`: the real tokens as one row of the batch, with the
places that they came from. Both reach the attention as the argument `attention_mask`, so that checkpointing replays
them.

`StandIn` is what such objects have in common: model code that looks at one sees the tensor that it stands for, which is
only then computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from cputrain.ops.attention import Sequences
from cputrain.ops.gradient import fp32_backward


class StandIn:
    """Has `compute()`; functions of torch, attributes and operators are those of the tensor that it gives."""

    def compute(self) -> Any:
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # a protocol that looks for a method which neither has; copies ask before all is set
            raise AttributeError(f"{type(self).__name__} has no {name}")
        return getattr(self.compute(), name)

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return function(*tree_map(computed, args), **tree_map(computed, kwargs or {}))


def computed(x: Any) -> Any:
    """The tensor that `x` stands for; `x` itself if it is none of ours."""
    return x.compute() if isinstance(x, StandIn) else x


def _operator(name: str) -> Callable:
    def operator(self: StandIn, *others: Any) -> Any:
        return getattr(self.compute(), name)(*tree_map(computed, others))

    operator.__name__ = name
    return operator


# Python looks operators up on the class, where __getattr__ isn't asked: all that Tensor has, but for those by which an
# object is made, named, copied or stored.
_OF_THE_OBJECT = {
    *("__class__", "__new__", "__init__", "__init_subclass__", "__subclasshook__", "__dir__", "__doc__", "__module__"),
    *("__getattribute__", "__setattr__", "__delattr__", "__dict__", "__weakref__", "__sizeof__", "__hash__"),
    *("__repr__", "__str__", "__torch_function__", "__torch_dispatch__", "__abstractmethods__"),
    *("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__deepcopy__", "__copy__"),
    *("__array_priority__", "__cuda_array_interface__", "__annotations__", "__static_attributes__", "__firstlineno__"),
    *("__annotate__", "__annotate_func__", "__annotations_cache__", "__slots__"),
}
OPERATORS = [
    name
    for name in dir(torch.Tensor)
    if name.startswith("__") and name.endswith("__") and name not in _OF_THE_OBJECT and callable(getattr(Tensor, name))
]
for _name in OPERATORS:
    setattr(StandIn, _name, _operator(_name))


@dataclass(eq=False)
class PaddingMask(StandIn):
    """A padded batch: `real` (batch, length) is True at tokens, None if all are; `make_stock` builds stock's mask.

    It stands for that mask: model code that works on masks gets stock's. `causal` is None if the mask hides more than
    padding, what is to come, tokens further away than `window` and those of other sequences `packed` into the rows
    (chunks, blocks of images): only stock's says what.
    """

    batch: int
    length: int
    real: Tensor | None
    causal: bool | None
    make_stock: Callable[[], Tensor | None]
    window: int | None = None
    packed: Sequences | None = None
    # Why the layers that got it keep the padding ("" if nothing speaks against dropping it), once that was asked.
    kept_because: str | None = None

    @cached_property
    def stock(self) -> Tensor | None:
        return self.make_stock()

    def compute(self) -> Tensor | None:
        return self.stock

    @cached_property
    def ragged(self) -> RaggedTokens:
        """The same batch without its padding."""
        assert self.real is not None
        sequences, place = Sequences.from_lengths(self.real.sum(1)), self.real.flatten().nonzero().squeeze(1)
        return RaggedTokens(sequences, self.causal, place, self.batch, self.length, self.make_stock, self.window)


@dataclass(eq=False)
class RaggedTokens:
    """Real tokens only, as (1, tokens, hidden); `place` is each token's row in the flattened padded batch."""

    sequences: Sequences
    causal: bool | None
    place: Tensor
    batch: int
    length: int
    make_stock: Callable[[], Tensor | None]
    window: int | None = None  # of the padded batch's places
    _gathered: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @cached_property
    def stock(self) -> Tensor | None:
        """Stock's mask of the padded batch."""
        return self.make_stock()

    @cached_property
    def without_holes(self) -> bool:
        """Whether the tokens of every sequence stood side by side, so that distances are what they were."""
        within = torch.ones(len(self.place), dtype=torch.bool)
        within[self.sequences.starts[self.sequences.lengths > 0]] = False
        return bool((self.place.diff() == 1)[within[1:]].all())

    @cached_property
    def begins_rows(self) -> bool:
        """Whether every sequence stands at the beginning of its row, without a gap."""
        starts = self.sequences.starts.repeat_interleave(self.sequences.lengths)
        return torch.equal(self.place % self.length, torch.arange(len(self.place)) - starts)

    def of_each_token(self, dense: Tensor) -> Tensor:
        """(batch or 1, length, …) → (1, tokens, …), once for all layers that are given the same tensor."""
        if id(dense) not in self._gathered:
            place = self.place if dense.shape[0] == self.batch else self.place % self.length
            self._gathered[id(dense)] = dense, dense.flatten(0, 1).index_select(0, place).unsqueeze(0)
        return self._gathered[id(dense)][1]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, dense: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        ctx.shape = dense.shape
        return dense.reshape(-1, dense.shape[-1]).index_select(0, place).unsqueeze(0)

    @staticmethod
    @fp32_backward
    def backward(ctx, grad: Tensor):
        (place,) = ctx.saved_tensors
        return _spread(grad, place, ctx.shape, 0.0), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ragged: Tensor, place: Tensor, batch: int, length: int, fill: float) -> Tensor:
        ctx.save_for_backward(place)
        return _spread(ragged, place, (batch, length, ragged.shape[-1]), fill)

    @staticmethod
    @fp32_backward
    def backward(ctx, grad: Tensor):
        (place,) = ctx.saved_tensors
        return grad.reshape(-1, grad.shape[-1]).index_select(0, place).unsqueeze(0), None, None, None, None


def _spread(rows: Tensor, place: Tensor, shape: tuple[int, ...], fill: float) -> Tensor:
    dense = rows.new_full(shape, fill)
    dense.view(-1, shape[-1]).index_copy_(0, place, rows.reshape(-1, shape[-1]))
    return dense


def gather(dense: Tensor, ragged: RaggedTokens) -> Tensor:
    """(batch, length, hidden) → (1, tokens, hidden)."""
    return _Gather.apply(dense, ragged.place)


def scatter(rows: Tensor, ragged: RaggedTokens, fill: float = 0.0) -> Tensor:
    """(1, tokens, hidden) → (batch, length, hidden), `fill` at padded positions."""
    return _Scatter.apply(rows, ragged.place, ragged.batch, ragged.length, fill)


def gather_heads(dense: Tensor, ragged: RaggedTokens) -> Tensor:
    """(batch, length, heads, size) → (1, tokens, heads, size)."""
    return gather(dense.flatten(2), ragged).unflatten(2, dense.shape[2:])


def scatter_heads(rows: Tensor, ragged: RaggedTokens) -> Tensor:
    """Queries, keys or values: (1, heads, tokens, size) → (batch, heads, length, size)."""
    dense = scatter(rows.transpose(1, 2).flatten(2), ragged)
    return dense.unflatten(2, (rows.shape[1], rows.shape[3])).transpose(1, 2)
