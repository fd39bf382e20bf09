"""What a layer multiplies its input by: one matrix, or several side by side.

A weight says which tensors autograd knows (`leaves`) and gives the matrix that they stand for; what a format makes of
that matrix is the format's own affair. Frozen weights may be stored otherwise than as floats (`Packed`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from cputrain.formats import stored
from cputrain.formats.stored import Stored

HALF = (torch.bfloat16, torch.float16)


class Weight(ABC):
    """A matrix of out-features × in-features."""

    out_features: int
    in_features: int

    @abstractmethod
    def leaves(self) -> tuple[Tensor, ...]:
        """The tensors that it is made of, which get the gradients."""

    @abstractmethod
    def dense(self) -> Tensor:
        """The matrix in fp32; made at each call where it isn't a leaf."""

    def panels(self) -> Tensor | Stored:
        """The matrix for products that pack it themselves: as it is stored, if they can read it."""
        return self.dense()

    def looked_at(self) -> Tensor:
        """The matrix in any floats, for a sample of its rows or columns."""
        return self.dense()

    @abstractmethod
    def leaf_grads(self, grad_OI: Tensor) -> tuple[Tensor, ...]:
        """The leaves' gradients, given the matrix's."""


class Dense(Weight):
    """One matrix of floats, or frozen of half-precision floats."""

    def __init__(self, w_OI: Tensor) -> None:
        self._w = w_OI
        self.out_features, self.in_features = w_OI.shape

    def leaves(self) -> tuple[Tensor, ...]:
        return (self._w,)

    def dense(self) -> Tensor:
        return self._w.float()

    def panels(self) -> Tensor | Stored:
        return stored.float16(self._w) if self._w.dtype == torch.float16 else self._w

    def looked_at(self) -> Tensor:
        return self._w

    def leaf_grads(self, grad_OI: Tensor) -> tuple[Tensor, ...]:
        return (grad_OI,)


class Packed(Weight):
    """A frozen matrix of few bits."""

    def __init__(self, matrix: Stored) -> None:
        self._matrix = matrix
        self.out_features, self.in_features = matrix.rows, matrix.cols

    def leaves(self) -> tuple[Tensor, ...]:
        return ()

    def dense(self) -> Tensor:
        return self._matrix.in_workspace()

    def panels(self) -> Tensor | Stored:
        return self._matrix

    def leaf_grads(self, grad_OI: Tensor) -> tuple[Tensor, ...]:
        return ()


class Joined(Weight):
    """Matrices of one size, one below the other: query, key and value as one product."""

    def __init__(self, parts: tuple[Tensor, ...]) -> None:
        self._parts = parts
        self.out_features, self.in_features = len(parts) * parts[0].shape[0], parts[0].shape[1]

    def leaves(self) -> tuple[Tensor, ...]:
        return self._parts

    def dense(self) -> Tensor:
        return torch.cat(self._parts).float()

    def panels(self) -> Tensor | Stored:
        joined = torch.cat(self._parts)
        return joined.float() if joined.dtype == torch.float16 else joined

    def leaf_grads(self, grad_OI: Tensor) -> tuple[Tensor, ...]:
        return grad_OI.chunk(len(self._parts))
