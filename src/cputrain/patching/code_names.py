"""Which names a module's code mentions, so that nothing that it reads is taken for nothing.

A probe sees what a module computes today. An attribute that changes nothing yet (a temperature of 1.0, a layer-drop of
0.0) is invisible to it, but not to a look at the names in the compiled code. The look is coarse on purpose: a name is
held against the module whatever object it is looked up on, so that it needs to know nothing of a Python version's
instructions, and errs on the side of leaving a module alone.
"""

from __future__ import annotations

import builtins
import inspect
import types
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# By these, code reads or writes what it doesn't name.
_INDIRECT = {"getattr", "setattr", "delattr", "hasattr", "vars", "globals", "locals", "eval", "exec", "super",
             "__dict__", "__getattr__", "__class__"}  # fmt: skip
# Libraries whose functions may be called by name: what they compute is probed, and they read nothing of the module's.
_LIBRARIES = ("torch", "transformers", "typing", "collections", "math")


def unexplained(module: nn.Module, method: str, explained: Collection[str]) -> str | None:
    """The first thing that `module.method` mentions and that is neither in `explained` nor plain tensor code."""
    seen: set[types.CodeType] = set()
    pending = [getattr(type(module), method)]
    while pending:
        for function in _layers_of(pending.pop()):
            if isinstance(function, str):
                return function
            if function.__code__ in seen:
                continue
            seen.add(function.__code__)
            for name, value in _mentioned(function):
                reason, called = _explain(module, name, value, explained)
                if reason is not None:
                    return reason
                pending.extend(called)
    return None


_UNKNOWN = object()  # a name that is an attribute of something, and no global of the function


def _layers_of(function: Any) -> list[types.FunctionType | str]:
    """A function, or what is left of it under the decorators of known libraries."""
    found: list[types.FunctionType | str] = []
    while True:
        if not isinstance(function, types.FunctionType):
            return [f"its code calls a {type(function).__name__}, which can't be read"]
        inner = getattr(function, "__wrapped__", None)
        if inner is None or not _of_a_library(function):
            found.append(function)
        if inner is None:
            return found
        function = inner


def _of_a_library(value: Any) -> bool:
    code = getattr(value, "__code__", None)
    # functools.wraps copies the name of the module, but not the globals.
    home = value.__globals__.get("__name__") if code is not None else getattr(value, "__module__", None)
    return isinstance(home, str) and home.split(".")[0] in _LIBRARIES


def _mentioned(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    closure = inspect.getclosurevars(function).nonlocals if function.__closure__ else {}
    for code in _codes(function.__code__):
        for name in code.co_names:
            yield name, function.__globals__.get(name, _UNKNOWN)
        yield from ((name, closure[name]) for name in code.co_freevars if name in closure)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A function's code, and that of the functions and comprehensions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _explain(module: nn.Module, name: str, value: Any, explained: Collection[str]) -> tuple[str | None, list[Callable]]:
    """(why the name is not explained, functions that it leads to)."""
    if name in explained or name == "training":  # it is probed in training and in evaluation
        return None, []
    if name in _INDIRECT:
        return f"its code uses {name}", []
    of_class = inspect.getattr_static(type(module), name, None)
    if name in module.__dict__ or name in _registered(module):
        return f"its code mentions its {name}", []
    if of_class is not None and not hasattr(nn.Module, name):
        is_method = isinstance(of_class, types.FunctionType)
        return (None, [of_class]) if is_method else (f"its code mentions its class's {name}", [])
    if value is not _UNKNOWN:
        return _explain_global(name, value)
    if hasattr(builtins, name) or any(hasattr(home, name) for home in (Tensor, torch, nn, F, tuple, list, dict)):
        return None, []
    return f"its code mentions {name}", []


def _registered(module: nn.Module) -> set[str]:
    return {*module._parameters, *module._buffers, *module._modules}


def _explain_global(name: str, value: Any) -> tuple[str | None, list[Callable]]:
    if isinstance(value, (types.ModuleType, type, types.BuiltinFunctionType)) or value is None:
        return None, []
    if callable(value) and (_of_a_library(value) or isinstance(value, torch._ops.OpOverloadPacket)):
        return None, []
    if isinstance(value, types.FunctionType):
        return None, [value]
    home = type(value).__module__.split(".")[0]
    known = home in ("typing", "logging", "types") or type(value).__name__ == "AttentionInterface"
    return (None, []) if known else (f"its code mentions {name}", [])
