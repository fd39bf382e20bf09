"""Modules that are alike: the layers of a model have the same code, sizes and settings, and one of them is asked."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from cputrain.layers.twin import attention_sizes, small_sizes, twin_of

# Attributes in which the layers of a stack differ although they compute the same.
_NUMBERS = {"layer_idx", "layer_id", "layer_index", "layer_number"}


def signature(module: nn.Module) -> tuple:
    """Equal for modules whose code, sizes and settings are the same, whatever their weights."""
    return tuple((name, type(part), _sizes(part), _settings(part)) for name, part in module.named_modules())


def _sizes(part: nn.Module) -> tuple:
    tensors = (*part._parameters.items(), *part._buffers.items())
    return tuple((name, None if x is None else (tuple(x.shape), x.dtype)) for name, x in tensors)


def _settings(part: nn.Module) -> tuple:
    named = ((name, value) for name, value in part.__dict__.items() if not name.startswith("_"))
    return tuple((name, _comparable(value)) for name, value in named if name not in _NUMBERS)


def _comparable(value: Any) -> Any:
    if isinstance(value, (int, float, str, bytes, type(None), torch.dtype, torch.device)):
        return type(value), value
    if isinstance(value, (tuple, list)):
        return type(value), tuple(map(_comparable, value))
    if isinstance(value, types.MethodType):  # a method on the instance is bound to each layer for itself
        return type(value), value.__func__
    return type(value), id(getattr(value, "_cputrain_original", value))


def repeated_layers(module: nn.Module) -> set[nn.Module]:
    """Layers of its lists that repeat earlier ones: what a list computes is seen in the layers before them.

    At least two layers of a list stay, and all before the last of a new kind, because models count their layers.
    """
    repeated: set[nn.Module] = set()
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            kinds = [(signature(layer), _of_layer(module, i, len(child))) for i, layer in enumerate(child)]
            last_new = max((kinds.index(kind) for kind in kinds), default=0)
            repeated.update(list(child)[max(last_new + 1, 2) :])
    return repeated


def _of_layer(module: nn.Module, number: int, count: int) -> tuple:
    """What the config says of one layer: lists with an entry for each (`layer_types`)."""
    config = getattr(module, "config", None)
    lists = [v for v in vars(config).values() if isinstance(v, (list, tuple)) and len(v) == count] if config else []
    return tuple(repr(values[number]) for values in lists)


def short_twins(module: nn.Module, *stacks: nn.Module) -> Iterator[tuple[dict[int, int], nn.Module]]:
    """Twins of `module`, and which sizes are smaller in each: without layers of `stacks` that repeat others, if need be
    at full size, at last with all layers."""
    repeated = {layer for stack in stacks for layer in repeated_layers(stack)}
    sizes = small_sizes(module, attention_sizes(module))
    if sizes:
        yield sizes, twin_of(module, repeated.__contains__, sizes)
    yield {}, twin_of(module, repeated.__contains__)
    if repeated:
        yield {}, twin_of(module)
