"""Feed-forward halves: linear, activation, linear, in the shapes that models give them.

- `feed_forward_chunk(x)` of a layer with `intermediate` (dense, activation) and `output` (dense, dropout, LayerNorm):
  the BERT family. The residual and the norm are part of it.
- a module of two linear layers, an activation and perhaps a dropout after them (DistilBERT's FFN, ViT's MLP …).
- `intermediate` alone: linear and activation.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from cputrain.blocks import residual
from cputrain.ops.activation import bias_activation
from cputrain.ops.feed_forward import feed_forward, feed_forward_norm
from cputrain.ops.linear import flat, linear
from cputrain.patching.bind import (
    Patches,
    format_of,
    parameter_names,
    step_aside,
    why_not_global_hooks,
    why_not_linears,
    why_not_module,
    why_not_parts,
)
from cputrain.patching.probe import Formula, difference, dropped

# Classes of transformers.activations by name, so that transformers need not be imported to recognise them.
_BY_NAME = {
    "GELUActivation": "gelu",
    "PytorchGELUTanh": "gelu_tanh",
    "GELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "SiLUActivation": "silu",
    "ReLU": "relu",
    "SiLU": "silu",
}


def known_kind(module: nn.Module) -> str:
    """The kernel's name for an activation that is known to have one."""
    kind = activation_kind(module)
    assert kind is not None
    return kind


def activation_kind(module: nn.Module) -> str | None:
    """The kernel's name for this activation, or None."""
    if not isinstance(module, nn.Module):
        return None
    if type(module) is nn.GELU:
        return "gelu" if module.approximate == "none" else "gelu_tanh"
    home = type(module).__module__
    if not (home.startswith("torch.nn.") or home == "transformers.activations"):
        return None
    return _BY_NAME.get(type(module).__name__)


# ---- linear + activation -------------------------------------------------------------------------------------------


def _why_not_activation(module: nn.Module) -> str | None:
    if activation_kind(module) is None:
        return f"the activation is {type(module).__name__}"
    return why_not_module(module)


def _why_not_intermediate(module: nn.Module, x: Tensor) -> str | None:
    return (
        why_not_module(module.dense, nn.Linear)
        or _why_not_activation(module.intermediate_act_fn)
        or why_not_global_hooks()
        or why_not_linears(x, module.dense)
    )


def intermediate_forward(self: nn.Module, stock: Callable, hidden_states: Tensor) -> Tensor:
    reason = _why_not_intermediate(self, hidden_states)
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


def _why_not_chunk(layer: nn.Module, x: Tensor) -> str | None:
    return (
        why_not_module(layer.intermediate)
        or why_not_module(layer.output)
        or _why_not_intermediate(layer.intermediate, x)
        or residual.why_not(layer.output, x, x)
    )


def chunk_forward(self: nn.Module, stock: Callable, attention_output: Tensor) -> Tensor:
    reason = _why_not_chunk(self, attention_output)
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
            why_not_parts((up, down), nn.Linear)
            or why_not_module(activation)
            or (dropout and why_not_module(dropout))
            or why_not_global_hooks()
            or why_not_linears(hidden_states, up, down)
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
