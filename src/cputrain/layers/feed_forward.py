"""Feed-forward halves: linear, activation, linear, in the shapes that models give them.

- `feed_forward_chunk(x)` of a layer with `intermediate` (dense, activation) and `output` (dense, dropout, LayerNorm):
  the BERT family. The residual and the norm are part of it.
- a module of two linear layers, an activation and perhaps a dropout after them (DistilBERT's FFN, ViT's MLP …).
- `intermediate` alone: linear and activation.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from cputrain.layers import residual
from cputrain.layers.activations import activation_kind, known_kind
from cputrain.layers.patch import (
    Patches,
    arithmetic_of,
    global_hook_obstacle,
    module_obstacle,
    parameter_names,
    parts_obstacle,
    step_aside,
    tensor_obstacle,
)
from cputrain.layers.probe import agrees, pattern
from cputrain.ops.activation import bias_activation
from cputrain.ops.feed_forward import feed_forward, feed_forward_norm
from cputrain.ops.linear import flat, linear

# ---- linear + activation -------------------------------------------------------------------------------------------


def _activation_obstacle(module: nn.Module) -> str | None:
    if activation_kind(module) is None:
        return f"the activation is {type(module).__name__}"
    return module_obstacle(module)


def _intermediate_obstacle(module: nn.Module, x: Tensor) -> str | None:
    return (
        module_obstacle(module.dense, nn.Linear)
        or _activation_obstacle(module.intermediate_act_fn)
        or global_hook_obstacle()
        or tensor_obstacle(x, module.dense.weight)
    )


def intermediate_forward(self: nn.Module, stock: Callable, hidden_states: Tensor) -> Tensor:
    reason = _intermediate_obstacle(self, hidden_states)
    if reason is not None:
        step_aside(self, reason)
        return stock(hidden_states)
    arithmetic = arithmetic_of(self)
    h = linear(flat(hidden_states), self.dense.weight, None, arithmetic)
    a = bias_activation(h, self.dense.bias, known_kind(self.intermediate_act_fn), arithmetic.storage)
    return a.view(*hidden_states.shape[:-1], a.shape[-1])


def _is_intermediate(module: nn.Module) -> bool:
    parts = dict(module.named_children())
    if set(parts) != {"dense", "intermediate_act_fn"} or type(parts["dense"]) is not nn.Linear:
        return False
    if activation_kind(parts["intermediate_act_fn"]) is None:
        return False
    stock = type(module).forward.__get__(module)
    return agrees(module, stock, lambda x: module.intermediate_act_fn(module.dense(x)), module.dense.in_features)


# ---- intermediate + output of the BERT family ----------------------------------------------------------------------


def _chunk_obstacle(layer: nn.Module, x: Tensor) -> str | None:
    return (
        module_obstacle(layer.intermediate)
        or module_obstacle(layer.output)
        or _intermediate_obstacle(layer.intermediate, x)
        or residual.obstacle(layer.output, x, x)
    )


def chunk_forward(self: nn.Module, stock: Callable, attention_output: Tensor) -> Tensor:
    reason = _chunk_obstacle(self, attention_output)
    if reason is not None:
        step_aside(self, reason)
        return stock(attention_output)
    up, down, norm = self.intermediate.dense, self.output.dense, self.output.LayerNorm
    out = feed_forward_norm(
        flat(attention_output).contiguous(),
        up.weight,
        up.bias,
        down.weight,
        down.bias,
        norm.weight,
        norm.bias,
        known_kind(self.intermediate.intermediate_act_fn),
        norm.eps,
        residual.dropout_rate(self.output.dropout),
        arithmetic_of(self),
    )
    return out.view(attention_output.shape)


def _has_chunk(layer: nn.Module) -> bool:
    intermediate, output = getattr(layer, "intermediate", None), getattr(layer, "output", None)
    if not hasattr(type(layer), "feed_forward_chunk") or intermediate is None or output is None:
        return False
    if not _is_intermediate(intermediate) or not residual.is_residual_block(output):
        return False
    stock = type(layer).feed_forward_chunk.__get__(layer)
    return agrees(layer, stock, lambda x: output(intermediate(x), x), intermediate.dense.in_features)


# ---- two linear layers and an activation ---------------------------------------------------------------------------


def _parts(module: nn.Module) -> tuple[nn.Linear, nn.Module, nn.Linear, nn.Dropout | None] | None:
    """(first linear, activation, second linear, dropout), told apart by their classes and sizes, or None."""
    linears = [part for part in module.children() if type(part) is nn.Linear]
    dropouts = [part for part in module.children() if type(part) is nn.Dropout]
    activations = [part for part in module.children() if activation_kind(part) is not None]
    if len(linears) != 2 or len(activations) != 1 or len(dropouts) > 1:
        return None
    if len(list(module.children())) != 3 + len(dropouts):
        return None
    up, down = linears
    if (up.in_features, up.out_features) != (down.out_features, down.in_features):
        return None
    if up.in_features == up.out_features:
        return None  # which one comes first can't be told from the sizes
    if up.out_features < up.in_features:
        up, down = down, up
    return up, activations[0], down, dropouts[0] if dropouts else None


def mlp_forward(self: nn.Module, stock: Callable, hidden_states: Tensor) -> Tensor:
    parts = _parts(self)
    reason = "its parts have changed" if parts is None else None
    if parts is not None:
        up, activation, down, dropout = parts
        reason = (
            parts_obstacle((up, down), nn.Linear)
            or module_obstacle(activation)
            or (dropout and module_obstacle(dropout))
            or global_hook_obstacle()
            or tensor_obstacle(hidden_states, up.weight, down.weight)
        )
    if reason is not None:
        step_aside(self, reason)
        return stock(hidden_states)
    p = 0.0 if dropout is None else residual.dropout_rate(dropout)
    x = flat(hidden_states).contiguous()
    weights = up.weight, up.bias, down.weight, down.bias
    y = feed_forward(x, *weights, known_kind(activation), p, arithmetic_of(self))
    return y.view(hidden_states.shape)


def _mlp_method(module: nn.Module) -> str | None:
    """Which method of `module` is linear, activation, linear (and dropout) of one input: its forward or a chunk's."""
    parts = _parts(module)
    if parts is None:
        return None
    up, activation, down, dropout = parts

    def formula(x: Tensor) -> Tensor:
        y = down(activation(up(x)))
        return y if dropout is None else pattern(y)

    method = "ff_chunk" if hasattr(type(module), "ff_chunk") else "forward"
    if len(parameter_names(getattr(type(module), method))) != 1:
        return None
    stock = getattr(type(module), method).__get__(module)
    return method if agrees(module, stock, formula, up.in_features) else None


# ---- taking over ---------------------------------------------------------------------------------------------------


def take_over(name: str, module: nn.Module, patches: Patches) -> bool:
    if _has_chunk(module):
        what = "feed-forward, residual and LayerNorm; activation recomputed"
        halves = (module.intermediate, module.output)
        patches.bind(name, module, "feed_forward_chunk", chunk_forward, what, halves)
        return True
    if _is_intermediate(module):
        patches.bind(name, module, "forward", intermediate_forward, "linear + bias + activation", module.children())
        return True
    method = _mlp_method(module)
    if method is not None:
        what = "linear + activation + linear; activation recomputed"
        patches.bind(name, module, method, mlp_forward, what, module.children())
        return True
    return False
