"""What a script gets from `import intel_extension_for_pytorch as ipex`: `ipex.optimize`, done by cputrain."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from cputrain import __version__, api
from cputrain.integrations import settings
from cputrain.integrations.notices import Refused, say_stock_once
from cputrain.log import say_once

__all__ = ["__version__", "optimize"]


def optimize(
    model: nn.Module,
    dtype: torch.dtype | None = None,
    optimizer: Optimizer | None = None,
    level: str = "O1",
    inplace: bool = False,
    **others: Any,
) -> nn.Module | tuple[nn.Module, Optimizer]:
    """The model, or model and optimizer, optimised: copies of what was given, unless `inplace`."""
    if dtype not in (None, torch.float32, torch.bfloat16):
        raise Refused(f"ipex.optimize knows torch.float32 and torch.bfloat16, found dtype={dtype}.")
    if others:
        say_once(f"ipex.optimize: {', '.join(sorted(others))} has no effect in cputrain")
    if not inplace:
        model, optimizer = copy.deepcopy((model, optimizer))  # together: the optimizer's parameters are the model's
    if settings.is_off():
        say_stock_once("cputrain stays out: IPEX is off in the configuration, so ipex.optimize changes nothing")
        level = "O0"
    if level == "O0":
        return model if optimizer is None else (model, optimizer)
    precision = settings.precision(script_asks_for_bf16=dtype is torch.bfloat16)
    if optimizer is None:
        return api.optimize(model, dtype=precision, padding=settings.padding())
    return api.optimize(model, optimizer, dtype=precision, padding=settings.padding())
