"""Objects that stand for a tensor: what a model does with them it does with the tensor, which is only then computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map


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
