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
    format_of,
    global_hook_obstacle,
    linear_obstacle,
    module_obstacle,
    parameter_names,
    parts_obstacle,
    step_aside,
)
from cputrain.layers.probe import Formula, difference, dropped
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
        or linear_obstacle(x, module.dense)
    )


def intermediate_forward(self: nn.Module, stock: Callable, hidden_states: Tensor) -> Tensor:
    reason = _intermediate_obstacle(self, hidden_states)
    if reason is not None:
        step_aside(self, reason)
        return stock(hidden_states)
    format = format_of(self)
    h = linear(flat(hidden_states), self.dense.weight, None, format)
    a = bias_activation(h, self.dense.bias, known_kind(self.intermediate_act_fn), format.saves)
    return a.view(*hidden_states.shape[:-1], a.shape[-1])


_INTERMEDIATE = frozenset({"dense", "intermediate_act_fn"})


def _build_intermediate(module: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: module.intermediate_act_fn(module.dense(x))


def _intermediate_formula(module: nn.Module) -> Formula | None:
    parts = dict(module.named_children())
    if set(parts) != _INTERMEDIATE or type(parts["dense"]) is not nn.Linear:
        return None
    if activation_kind(parts["intermediate_act_fn"]) is None:
        return None
    return Formula("forward", _build_intermediate, (module.dense.in_features,), _INTERMEDIATE, any_size=True)


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
        format_of(self),
    )
    return out.view(attention_output.shape)


def _build_chunk(layer: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: layer.output(layer.intermediate(x), x)


def _chunk_formula(layer: nn.Module) -> Formula | None:
    intermediate, output = getattr(layer, "intermediate", None), getattr(layer, "output", None)
    if not hasattr(type(layer), "feed_forward_chunk") or intermediate is None or output is None:
        return None
    half = _intermediate_formula(intermediate)
    if half is None or difference(intermediate, half) is not None or not residual.is_residual_block(output):
        return None
    return Formula(
        "feed_forward_chunk", _build_chunk, half.widths, frozenset({"intermediate", "output"}), any_size=True
    )


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
            or linear_obstacle(hidden_states, up, down)
        )
    if reason is not None:
        step_aside(self, reason)
        return stock(hidden_states)
    p = 0.0 if dropout is None else residual.dropout_rate(dropout)
    x = flat(hidden_states).contiguous()
    weights = up.weight, up.bias, down.weight, down.bias
    y = feed_forward(x, *weights, known_kind(activation), p, format_of(self))
    return y.view(hidden_states.shape)


def _build_mlp(module: nn.Module) -> Callable[[Tensor], Tensor]:
    up, activation, down, dropout = _parts(module)  # type: ignore[misc]
    if dropout is None:
        return lambda x: down(activation(up(x)))
    return lambda x: dropped(down(activation(up(x))), dropout.p, dropout.training)


def _mlp_formula(module: nn.Module) -> Formula | None:
    """Linear, activation, linear (and dropout) of one input: a module's forward, or that of a chunk."""
    parts = _parts(module)
    if parts is None:
        return None
    method = "ff_chunk" if hasattr(type(module), "ff_chunk") else "forward"
    if len(parameter_names(getattr(type(module), method))) != 1:
        return None
    return Formula(method, _build_mlp, (parts[0].in_features,), frozenset(module._modules), any_size=True)


# ---- taking over ---------------------------------------------------------------------------------------------------

_SHAPES = (
    (_chunk_formula, chunk_forward, "feed-forward, residual and LayerNorm; activation recomputed"),
    (_intermediate_formula, intermediate_forward, "linear + bias + activation"),
    (_mlp_formula, mlp_forward, "linear + activation + linear; activation recomputed"),
)


def take_over(name: str, module: nn.Module, patches: Patches) -> bool:
    for formula_of, forward, what in _SHAPES:
        formula = formula_of(module)
        if formula is not None:
            bypassed = [part for part_name, part in module.named_children() if part_name in formula.reads]
            return patches.bind_if_same(name, module, formula, forward, what, bypassed)
    return False
