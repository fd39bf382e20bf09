"""Objects that stand for a tensor: what a model does with them it does with the tensor, which is only then computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map


class StandIn:
    """Has `compute()`; functions of torch, attributes and operators are those of the tensor that it gives."""

    def compute(self) -> Tensor:
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        return getattr(self.compute(), name)

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return function(*tree_map(computed, args), **tree_map(computed, kwargs or {}))


def computed(x: Any) -> Any:
    """The tensor that `x` stands for; `x` itself if it is none of ours."""
    return x.compute() if isinstance(x, StandIn) else x


def _operator(name: str) -> Callable:
    def operator(self: StandIn, *others: Any) -> Any:
        return getattr(self.compute(), name)(*map(computed, others))

    return operator


# Python looks operators up on the class, where __getattr__ isn't asked.
_ARITHMETIC = ("add", "radd", "mul", "rmul", "truediv", "rtruediv", "sub", "rsub", "matmul", "neg", "pow")
for _name in (*_ARITHMETIC, "getitem", "len", "bool"):
    setattr(StandIn, f"__{_name}__", _operator(f"__{_name}__"))
