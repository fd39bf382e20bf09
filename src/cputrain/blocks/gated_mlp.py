"""Gated feed-forwards, down(activation(gate(x)) · up(x)), whatever their three linear layers are called.

Sizes tell which layer comes last where the middle is wider or narrower than the model; which of the other two is the
gate, and the order where all are alike, is asked of the module itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cputrain.blocks import projection
from cputrain.blocks.mlp import activation_kind, known_kind
from cputrain.ops.adapted_feed_forward import Layers, adapted_feed_forward
from cputrain.ops.gated_feed_forward import gated_feed_forward
from cputrain.ops.linear import flat
from cputrain.padding import computed
from cputrain.patching.bind import (
    Patches,
    format_of,
    parameter_names,
    step_aside,
    why_not_global_hooks,
    why_not_linears,
    why_not_module,
    why_not_parts,
    why_not_tensors,
)
from cputrain.patching.probe import Formula, difference

# module.__dict__ key: the names of a module's parts, in the order of `_Parts`.
NAMES = "_cputrain_gated_parts"
WHAT = "gated feed-forward; what the gate lets through is recomputed"


class _Parts(NamedTuple):
    gate: nn.Linear
    up: nn.Linear
    down: nn.Linear
    activation: nn.Module


def _parts(module: nn.Module, names: tuple[str, ...]) -> _Parts:
    return _Parts(*(module._modules[name] for name in names))  # type: ignore[arg-type]


def gated_forward(self: nn.Module, stock: Callable, x: Tensor) -> Tensor:
    x = computed(x)
    names = self.__dict__[NAMES]
    reason = "its parts have changed" if set(self._modules) != set(names) else _why_not(self, x, _parts(self, names))
    parts = _parts(self, names) if reason is None else None
    layers = None if parts is None or _are_plain(parts) else _adapted(parts)
    if reason is not None or parts is None or isinstance(layers, str):
        step_aside(self, reason or str(layers))
        return stock(x)
    if layers is not None:
        y = adapted_feed_forward(flat(x).contiguous(), layers, known_kind(parts.activation), format_of(self))
        return y.view(*x.shape[:-1], y.shape[-1])
    gate, up, down, activation = parts
    weights = gate.weight, gate.bias, up.weight, up.bias, down.weight, down.bias
    y = gated_feed_forward(flat(x).contiguous(), *weights, known_kind(activation), format_of(self))
    return y.view(*x.shape[:-1], y.shape[-1])


def _why_not(module: nn.Module, x: Tensor, parts: _Parts) -> str | None:
    if activation_kind(parts.activation) is None:
        return f"the activation is {type(parts.activation).__name__}"
    reason = why_not_module(parts.activation) or why_not_global_hooks()
    if reason is not None:
        return reason
    if not _are_plain(parts):
        width = projection.features(parts.gate)[1]
        return why_not_tensors(x) if x.shape[-1] == width else f"an input of shape {tuple(x.shape)}"
    return why_not_parts(parts[:3], nn.Linear) or why_not_linears(x, *parts[:3])


def _are_plain(parts: _Parts) -> bool:
    """Three linear layers in fp32, trained or not."""
    return not any(projection.is_linear(part) and not _is_plain(part) for part in parts[:3])


def _is_plain(part: nn.Module) -> bool:
    return type(part) is nn.Linear and part.weight.dtype == torch.float32


def _adapted(parts: _Parts) -> Layers | str:
    """Frozen layers, some with adapters; or why not."""
    found = [projection.read(part) for part in parts[:3]]
    reason = next((layer for layer in found if isinstance(layer, str)), None)
    return reason or Layers(*found)  # type: ignore[arg-type]


def _build(names: tuple[str, ...], module: nn.Module) -> Callable[[Tensor], Tensor]:
    gate, up, down, activation = _parts(module, names)
    return lambda x: down(activation(gate(x)) * up(x))


@cache
def _builder(names: tuple[str, ...]) -> Callable[[nn.Module], Callable[[Tensor], Tensor]]:
    """One function for an order, by which the answer for a layer is remembered for those that are alike."""
    return partial(_build, names)


def _orders(module: nn.Module) -> Iterator[tuple[str, ...]]:
    """Names of gate, up, down and activation, in every order that the sizes allow."""
    linears = [name for name, part in module.named_children() if projection.is_linear(part)]
    activations = [name for name, part in module.named_children() if activation_kind(part) is not None]
    if (len(linears), len(activations), len(module._modules)) != (3, 1, 4):
        return
    if len(parameter_names(type(module).forward)) != 1:
        return
    for order in itertools.permutations(linears):
        gate, up, down = map(projection.features, _parts(module, (*order, *activations))[:3])
        if gate == up == down[::-1]:
            yield (*order, *activations)


def take_over(name: str, module: nn.Module, patches: Patches) -> bool:
    reason = None
    for names in _orders(module):
        if patches.format.saves is not torch.float32:
            reason = f"what is saved of it would be fp32, and the model keeps {patches.format.name}"
            break
        width = projection.features(_parts(module, names).gate)[1]
        formula = Formula("forward", _builder(names), (width,), frozenset(module._modules), any_size=True)
        reason = difference(module, formula)
        if reason is None:
            patches.bind(name, module, "forward", gated_forward, WHAT, list(_parts(module, names)))
            module.__dict__[NAMES] = names
            return True
    if reason is not None:
        patches.leave(name, module, reason)
    return False
