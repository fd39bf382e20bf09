"""Self-attention modules: query, key and value as one product, attention on it, and the module's own ending.

Recognised by three linear layers of one input (under the names that models give them), `scaling`, and what they do;
the ending is nothing (BERT), a linear layer (DistilBERT, ViT), or linear, dropout, residual and LayerNorm (ALBERT).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from cputrain.layers import attention as registry
from cputrain.layers.patch import (
    Patches,
    arithmetic_of,
    global_hook_obstacle,
    outputs_to_record,
    parameter_names,
    parts_obstacle,
    step_aside,
    tensor_obstacle,
)
from cputrain.layers.probe import agrees, pattern, quietly, random_rows
from cputrain.layers.residual import dropout_rate, ending_obstacle
from cputrain.ops.linear import flat
from cputrain.ops.residual_block import residual_block
from cputrain.ops.self_attention import self_attention

_TRIPLES = (("query", "key", "value"), ("q_lin", "k_lin", "v_lin"), ("q_proj", "k_proj", "v_proj"))
_OUTPUTS = ("out_lin", "o_proj", "out_proj")


def _triple(module: nn.Module) -> list[nn.Module] | None:
    for names in _TRIPLES:
        parts = [getattr(module, name, None) for name in names]
        if all(isinstance(part, nn.Module) for part in parts):
            return parts  # type: ignore[return-value]
    return None


def _ending(module: nn.Module) -> nn.Module | None:
    for name in _OUTPUTS:
        part = getattr(module, name, None)
        if isinstance(part, nn.Module):
            return part
    return None


def _ends_in_norm(module: nn.Module) -> bool:
    return all(hasattr(module, name) for name in ("dense", "output_dropout", "LayerNorm"))


def _attention_rate(module: nn.Module) -> float | None:
    """The rate of the dropout on the attention weights, or None if the module keeps it under an unknown name."""
    for name in ("attention_dropout", "dropout"):
        found = getattr(module, name, None)
        rate = found.p if isinstance(found, nn.Dropout) else found
        if isinstance(rate, (int, float)):
            return rate if module.training else 0.0
    return None


def _head_size(module: nn.Module) -> int:
    return getattr(module, "attention_head_size", None) or module.head_dim


def _obstacle(module: nn.Module, x: Tensor, args: tuple, options: dict[str, Any]) -> str | None:
    triple = _triple(module)
    if triple is None or _attention_rate(module) is None:
        return "its parts have changed"
    if args or x.dim() != 3:
        return "it was called with more than hidden states and a mask"
    if "attentions" in outputs_to_record(module):
        return "attention weights were asked for"
    reason = (
        parts_obstacle(triple, nn.Linear)
        or registry.asked_for(options)
        or global_hook_obstacle()
        or tensor_obstacle(x, *(part.weight for part in triple))
    )
    if reason is None and not _alike(triple):
        return "query, key and value differ in shape or bias"
    if reason is None and _ends_in_norm(module):
        return ending_obstacle(module.dense, module.output_dropout, module.LayerNorm)
    return reason


def _alike(triple: list[nn.Module]) -> bool:
    return len({part.weight.shape for part in triple}) == 1 and len({part.bias is None for part in triple}) == 1


def fused_forward(
    self: nn.Module, stock: Callable, hidden_states: Tensor, attention_mask: Any = None, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    reason = _obstacle(self, hidden_states, args, kwargs)
    where = None
    if reason is None:
        batch, length = hidden_states.shape[:2]
        stock_name = registry.stock_name(self.config._attn_implementation)
        where = registry.sequences_of(attention_mask, self, batch, length, kwargs.get("is_causal"), stock_name)
        reason = None if where is not None else "the mask is not plain"
    if where is None:
        step_aside(self, str(reason))
        return stock(hidden_states, attention_mask, *args, **kwargs)
    sequences, causal = where
    triple, rate = _triple(self), _attention_rate(self)
    assert triple is not None and rate is not None
    size = _head_size(self)
    heads = triple[0].out_features // size
    context = self_attention(
        flat(hidden_states),
        [part.weight for part in triple],
        [part.bias for part in triple],
        sequences,
        heads=heads,
        scale=self.scaling,
        causal=causal,
        p=rate,
        arithmetic=arithmetic_of(self),
    )
    return _finish(self, context.view(*hidden_states.shape[:2], heads * size), hidden_states), None


def _finish(module: nn.Module, context: Tensor, hidden_states: Tensor) -> Tensor:
    if _ends_in_norm(module):
        norm = module.LayerNorm
        out = residual_block(
            flat(context), flat(hidden_states).contiguous(), module.dense.weight, module.dense.bias,
            norm.weight, norm.bias, norm.eps, dropout_rate(module.output_dropout), arithmetic_of(module),
        )  # fmt: skip
        return out.view(hidden_states.shape)
    ending = _ending(module)
    return context if ending is None else ending(context)


def _formula(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """What the module is taken for, in plain PyTorch."""
    query, key, value = _triple(module)  # type: ignore[misc]
    size = _head_size(module)

    def compute(x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, size)).transpose(1, 2) for part in (query, key, value))
        causal = getattr(module, "is_causal", False)
        out = nn.functional.scaled_dot_product_attention(q, k, v, scale=module.scaling, is_causal=causal)
        out = out.transpose(1, 2).flatten(2)
        if _ends_in_norm(module):
            return module.LayerNorm(x + pattern(module.dense(out)))
        ending = _ending(module)
        return out if ending is None else ending(out)

    return compute


def is_self_attention(module: nn.Module) -> bool:
    triple = _triple(module)
    if triple is None or not all(type(part) is nn.Linear for part in triple):
        return False
    if parameter_names(type(module).forward)[:2] != ["hidden_states", "attention_mask"] or not hasattr(
        module, "scaling"
    ):
        return False
    if not hasattr(module, "config") or not (hasattr(module, "attention_head_size") or hasattr(module, "head_dim")):
        return False
    if not _alike(triple):
        return False  # grouped heads: the registered attention function serves them
    if not registry.SMALLEST_HEAD <= _head_size(module) <= registry.LARGEST_HEAD:
        return False
    stock = type(module).forward.__get__(module)
    return agrees(module, stock, _formula(module), triple[0].in_features) and _rate_is_known(module, stock)


def _rate_is_known(module: nn.Module, stock: Callable) -> bool:
    """Whether the rate that the module gives the attention function is the one that we read from it."""
    token = registry.rates_seen.set([])
    try:
        with quietly(module, training=True):
            stock(random_rows(2, 3, _triple(module)[0].in_features))  # type: ignore[index]
            return registry.rates_seen.get() == [_attention_rate(module)]
    finally:
        registry.rates_seen.reset(token)


def take_over(name: str, module: nn.Module, patches: Patches) -> bool:
    if not is_self_attention(module):
        return False
    patches.bind(
        name,
        module,
        "forward",
        fused_forward,
        "query, key, value as one product; tiled attention with dropout inside",
        module.children(),
    )
    return True
