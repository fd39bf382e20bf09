"""Points a transformers model at our attention: its config names the implementation, and configs are shared.

A config may belong to several models, and users change it while they train. So the modules that look the name up get a
view of their config: everything in it is the config's own, both ways, but for the name of the implementation.
"""

from __future__ import annotations

import copy
import inspect
import operator
import sys
from functools import cache
from types import CodeType
from typing import Any

from torch import nn

from cputrain.blocks import attention_registry
from cputrain.patching.bind import Patches


def take_over(model: nn.Module, patches: Patches) -> str | None:
    """Gives every module that runs attention or makes its mask a view of its config; returns why it can't, if so."""
    submodels: list[Any] = [module for module in model.modules() if is_transformers_model(module)]
    if not submodels:
        return None
    if not hasattr(sys.modules["transformers"], "AttentionMaskInterface"):
        version = sys.modules["transformers"].__version__
        return f"attention and padding are stock's: transformers {version} has no registry of masks"
    if not all(submodel._can_set_attn_implementation() for submodel in submodels):
        return "its attention doesn't go through transformers' registry"
    if any(map(_returns_weights, submodels)):
        return "its code returns attention weights, which ours doesn't write"
    compares = next((type(module).__name__ for _, module, _ in _configured(model) if _compares_name(module)), None)
    if compares is not None:
        return f"the code of {compares} does something else if the attention implementation has another name"
    attention_registry.register()
    # A model around a base model makes no masks: its config, which users hand on to other models, stays untouched.
    outer = {id(submodel) for submodel in submodels if submodel.base_model is not submodel}
    views: dict[int, Any] = {}
    for name, module, config in _configured(model):
        if id(module) in outer:
            continue
        if config._attn_implementation not in attention_registry.STOCK:
            patches.leave(name, module, f"its attention implementation is {config._attn_implementation}")
            continue
        module.__dict__["config"] = views.setdefault(id(config), _view(config))
    return None


def _returns_weights(submodel: Any) -> bool:
    """Whether it returns attention weights unasked (BridgeTower): eager attention has them, and its code names them."""
    code = inspect.unwrap(type(submodel).forward).__code__
    named = any("attentions" in constant for constant in code.co_consts if isinstance(constant, tuple))
    return named and "attentions" not in code.co_names and not submodel._supports_sdpa


def _compares_name(module: nn.Module) -> bool:
    """Whether code beside the registry asks if the implementation is SDPA, as DeepSeek's sparse attention does.

    Under our name such code takes the branch of a kernel that finds the chosen keys by itself, and hides none. Code
    that asks for "eager" alone (GPT-2) wants attention weights, or scores in fp32.
    """
    if "_attn_implementation" in vars(module):  # a copy of the name, which stays stock's (GPT-2 before transformers 5)
        return False
    kinds = type(module).__mro__[: type(module).__mro__.index(_first_base(module))]
    functions = [function for kind in kinds for function in vars(kind).values() if inspect.isfunction(function)]
    return any(_asks_for_sdpa(inspect.unwrap(function).__code__) for function in functions)


def _first_base(module: nn.Module) -> type:
    bases = (sys.modules["transformers"].PreTrainedModel, nn.Module)
    return next(kind for kind in type(module).__mro__ if kind in bases)


def _asks_for_sdpa(code: CodeType) -> bool:
    constants = [part for one in code.co_consts for part in (one if isinstance(one, tuple | frozenset) else (one,))]
    return "_attn_implementation" in code.co_names and "sdpa" in constants


def choose(model: nn.Module, ragged: bool) -> None:
    """Whether the masks are to be handed over as lengths, which only models without padding inside understand."""
    for module in model.modules():
        if is_view(module.__dict__.get("config")):
            object.__setattr__(module.__dict__["config"], "_cputrain_ragged", ragged)


def undo(model: nn.Module) -> None:
    """Gives every module its own config back, with what was changed in it since."""
    for module in model.modules():
        if is_view(module.__dict__.get("config")):
            module.__dict__["config"] = module.__dict__["config"]._cputrain_original


def is_transformers_model(module: nn.Module) -> bool:
    """Whether it is one of transformers' models; if transformers isn't loaded, it can't be."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(module, transformers.PreTrainedModel)


def _configured(model: nn.Module) -> list[tuple[str, nn.Module, Any]]:
    kind = sys.modules["transformers"].PretrainedConfig
    found = [(name, module, module.__dict__.get("config")) for name, module in model.named_modules()]
    return [entry for entry in found if isinstance(entry[2], kind)]


def is_view(config: Any) -> bool:
    """Whether it is a config of ours, which names our attention."""
    return hasattr(type(config), "_cputrain_original")


def _view(config: Any, ragged: bool = False) -> Any:
    view: Any = object.__new__(_view_class(type(config)))  # type: ignore[arg-type]
    object.__setattr__(view, "__dict__", config.__dict__)
    object.__setattr__(view, "_cputrain_original", config)
    object.__setattr__(view, "_cputrain_ragged", ragged)
    return view


@cache
def _view_class(kind: type) -> type:
    class View(kind):  # type: ignore[misc, valid-type]
        """Shares its `__dict__` with the config that it is a view of."""

        __slots__ = ("_cputrain_original", "_cputrain_ragged")

        @property
        def _attn_implementation_internal(self) -> str:
            stock = self.__dict__["_attn_implementation_internal"]
            if stock not in attention_registry.STOCK:
                return stock
            return attention_registry.implementation_name(stock, self._cputrain_ragged)

        @_attn_implementation_internal.setter
        def _attn_implementation_internal(self, name: str) -> None:
            self.__dict__["_attn_implementation_internal"] = attention_registry.stock_name(name)

        def __copy__(self) -> Any:
            return copy.copy(self._cputrain_original)

        def __deepcopy__(self, memo: dict) -> Any:
            return _view(copy.deepcopy(self._cputrain_original, memo), self._cputrain_ragged)

        def __reduce_ex__(self, protocol: object) -> tuple:
            return operator.itemgetter(0), ((self._cputrain_original,),)  # a pickled model is stock's

    View.__name__, View.__qualname__, View.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    return View
