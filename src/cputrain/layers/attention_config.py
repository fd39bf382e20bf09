"""Points a transformers model at our attention: its config names the implementation, and configs are shared.

A config may belong to several models, so the model gets copies of its own; the original stays as it was.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

from torch import nn

from cputrain.layers import attention
from cputrain.layers.patch import Patches

_SERVED = ("sdpa", "eager")


def is_transformers_model(model: nn.Module) -> bool:
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def _configured(model: nn.Module) -> list[tuple[str, nn.Module, Any]]:
    transformers = sys.modules["transformers"]
    found = [(name, module, module.__dict__.get("config")) for name, module in model.named_modules()]
    return [entry for entry in found if isinstance(entry[2], transformers.PretrainedConfig)]


def take_over(model: nn.Module, patches: Patches) -> None:
    """Gives every module of the model a copy of its config; `choose` then names the implementation."""
    if not any(True for _ in _submodels(model)):
        return
    if not all(submodel._can_set_attn_implementation() for _, submodel in _submodels(model)):
        patches.leave("", model, "its attention doesn't go through transformers' registry")
        return
    copies: dict[int, Any] = {}
    for name, module, config in _configured(model):
        if config._attn_implementation in _SERVED:
            if id(config) not in copies:
                copies[id(config)] = copy.copy(config)
            patches.set(name, module, "config", copies[id(config)], "its own copy of the config")


def _submodels(model: nn.Module) -> list[tuple[str, Any]]:
    if "transformers" not in sys.modules:
        return []
    kind = sys.modules["transformers"].PreTrainedModel
    return [(name, module) for name, module in model.named_modules() if isinstance(module, kind)]


def choose(model: nn.Module, patches: Patches, ragged: bool) -> None:
    """Names our implementation in the model's own configs."""
    ours = {id(entry.module.__dict__["config"]) for entry in patches.replaced if entry.attribute == "config"}
    for _, _, config in _configured(model) if ours else ():
        if id(config) in ours:
            stock = attention.stock_name(config._attn_implementation)
            attention.register(stock)
            config._attn_implementation_internal = attention.implementation_name(stock, ragged)
