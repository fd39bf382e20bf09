"""What a layer multiplies its input by: one matrix, or several side by side.

A weight says which tensors autograd knows (`leaves`) and gives the matrix that they stand for; what a format makes of
that matrix is the format's own affair.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor


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

    @abstractmethod
    def leaf_grads(self, grad_OI: Tensor) -> tuple[Tensor, ...]:
        """The leaves' gradients, given the matrix's."""


class Dense(Weight):
    """One matrix."""

    def __init__(self, w_OI: Tensor) -> None:
        self._w = w_OI
        self.out_features, self.in_features = w_OI.shape

    def leaves(self) -> tuple[Tensor, ...]:
        return (self._w,)

    def dense(self) -> Tensor:
        return self._w

    def leaf_grads(self, grad_OI: Tensor) -> tuple[Tensor, ...]:
        return (grad_OI,)


class Joined(Weight):
    """Matrices of one size, one below the other: query, key and value as one product."""

    def __init__(self, parts: tuple[Tensor, ...]) -> None:
        self._parts = parts
        self.out_features, self.in_features = len(parts) * parts[0].shape[0], parts[0].shape[1]

    def leaves(self) -> tuple[Tensor, ...]:
        return self._parts

    def dense(self) -> Tensor:
        return torch.cat(self._parts)

    def leaf_grads(self, grad_OI: Tensor) -> tuple[Tensor, ...]:
        return grad_OI.chunk(len(self._parts))
