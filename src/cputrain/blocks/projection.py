"""What a linear layer computes with, whatever wraps it: its weight as it is stored, its bias, its adapter.

Served are torch's Linear and transformers' Conv1D with frozen weights, alone or inside a LoRA layer of peft. Classes
are known by name: neither peft nor transformers need be imported.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from cputrain.blocks import quantised
from cputrain.formats import Dense, Weight
from cputrain.formats.weights import HALF
from cputrain.ops.adapted_linear import Adapted
from cputrain.ops.dropout import draw_key
from cputrain.ops.low_rank import Adapter
from cputrain.patching.bind import why_not_module

_FLOATS = (torch.float32, *HALF)
_LORA = {("peft.tuners.lora.layer", "Linear"), *(("peft.tuners.lora.bnb", n) for n in ("Linear4bit", "Linear8bitLt"))}


def _name(module: nn.Module) -> tuple[str, str]:
    return type(module).__module__, type(module).__name__


def is_lora(module: nn.Module) -> bool:
    """A linear layer with adapters, of peft's LoRA."""
    return _name(module) in _LORA


def is_conv1d(module: nn.Module) -> bool:
    return _name(module) == ("transformers.pytorch_utils", "Conv1D")


def is_linear(module: nn.Module) -> bool:
    """A layer that `read` may know."""
    if is_lora(module):
        return is_linear(module.base_layer) and not is_lora(module.base_layer)  # type: ignore[arg-type]
    return type(module) is nn.Linear or quantised.is_quantised(module)


def base_of(module: nn.Module) -> Any:
    return module.base_layer if is_lora(module) else module


def read(module: nn.Module) -> Adapted | str:
    """What it computes in this call; or why only its own code can say that. Draws the key of the adapter's mask."""
    reason = why_not_module(module)
    if reason is not None:
        return reason
    if not is_lora(module):
        return _base(module)
    adapter = _adapter(module)
    if isinstance(adapter, str):
        return adapter
    found = _base(module.base_layer)  # type: ignore[arg-type]
    return found if isinstance(found, str) else found._replace(adapter=_with_key(adapter))


def _base(module: nn.Module) -> Adapted | str:
    return why_not_module(module) or without_adapter(module)


def without_adapter(module: nn.Module) -> Adapted | str:
    """Its product alone; its hooks are called around it."""
    weight = _weight(module)
    if isinstance(weight, str):
        return weight
    bias: Tensor | None = module.bias  # type: ignore[assignment]
    if bias is not None and (bias.shape != (weight.out_features,) or bias.dtype not in _FLOATS):
        return f"a bias of shape {tuple(bias.shape)} and {bias.dtype}"
    return Adapted(weight, bias)


def _weight(module: Any) -> Weight | str:
    if quantised.is_quantised(module):
        return quantised.weight_of(module)
    if type(module) is not nn.Linear and not is_conv1d(module):
        return f"a base layer is {type(module).__name__}"
    weight = module.weight
    if weight.requires_grad:
        return "a base layer is trained"
    if type(weight) not in (Tensor, nn.Parameter) or weight.layout is not torch.strided or not weight.is_cpu:
        return f"a weight is {type(weight).__name__} on {weight.device}"
    if weight.dtype not in _FLOATS or weight.dim() != 2:
        return f"a weight is {weight.dtype} of shape {tuple(weight.shape)}"
    return Dense(weight.t() if is_conv1d(module) else weight)


def _adapter(module: Any) -> Adapter | str | None:
    """The one active adapter, or None."""
    if module.disable_adapters:
        return "adapters are to be unmerged" if module.merged else None
    if module.merged:
        return None
    active = [name for name in module.active_adapters if name in module.lora_A]
    if not active:
        return None
    if len(active) > 1:
        return f"{len(active)} adapters are active at once"
    name = active[0]
    if name in module.lora_variant:
        return f"its adapter is {type(module.lora_variant[name]).__name__.removesuffix('LinearVariant')}, a variant"
    parts = module.lora_A[name], module.lora_B[name], module.lora_dropout[name]
    reason = _why_not_parts(*parts)
    if reason is not None:
        return reason
    down, up, dropout = parts
    rate = dropout.p if isinstance(dropout, nn.Dropout) and dropout.training else 0.0
    return Adapter(down.weight, up.weight, float(module.scaling[name]), rate)


def _why_not_parts(down: nn.Module, up: nn.Module, dropout: nn.Module) -> str | None:
    for part in (down, up):
        reason = why_not_module(part, nn.Linear)
        if reason is not None:
            return f"in its adapter, {reason}"
        if part.bias is not None:
            return "its adapter has a bias"
        if type(part.weight) is not nn.Parameter or part.weight.dtype not in _FLOATS or not part.weight.is_cpu:  # type: ignore[union-attr]
            return f"its adapter's weights are {part.weight.dtype}"  # type: ignore[union-attr]
    return why_not_module(dropout, nn.Dropout, nn.Identity)


def _with_key(adapter: Adapter | None) -> Adapter | None:
    """peft draws a mask for each target."""
    return adapter if adapter is None or adapter.p == 0 else adapter._replace(key=draw_key())


def features(module: nn.Module) -> tuple[int, int]:
    """Out-features and in-features."""
    base = base_of(module)
    return (base.out_features, base.in_features) if not is_conv1d(base) else tuple(reversed(base.weight.shape))
