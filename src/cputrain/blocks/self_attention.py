"""Self-attention modules: query, key and value as one product, attention on it, and the module's own ending.

Recognised by three linear layers of one input (under the names that models give them), `scaling`, and what they do;
the ending is nothing (BERT), a linear layer (DistilBERT, ViT), or linear, dropout, residual and LayerNorm (ALBERT).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from cputrain.blocks import attention_registry as registry
from cputrain.blocks.residual import dropout_rate, why_not_ending
from cputrain.ops.linear import flat
from cputrain.ops.residual_block import residual_block
from cputrain.ops.self_attention import self_attention
from cputrain.patching.bind import (
    Patches,
    format_of,
    outputs_to_record,
    parameter_names,
    step_aside,
    why_not_global_hooks,
    why_not_linears,
    why_not_parts,
)
from cputrain.patching.probe import Formula, dropped, note_attention_dropout

_TRIPLES = (("query", "key", "value"), ("q_lin", "k_lin", "v_lin"), ("q_proj", "k_proj", "v_proj"))
_OUTPUTS = ("out_lin", "o_proj", "out_proj")
_RATES = ("attention_dropout", "dropout")  # the rate of the dropout on attention weights, or its layer


def triple_of(module: nn.Module) -> list[nn.Module] | None:
    for names in _TRIPLES:
        parts = [getattr(module, name, None) for name in names]
        if all(isinstance(part, nn.Module) for part in parts):
            return parts  # type: ignore[return-value]
    return None


def ending_of(module: nn.Module) -> nn.Module | None:
    for name in _OUTPUTS:
        part = getattr(module, name, None)
        if isinstance(part, nn.Module):
            return part
    return None


def ends_in_norm(module: nn.Module) -> bool:
    return all(hasattr(module, name) for name in ("dense", "output_dropout", "LayerNorm"))


def _attention_rate(module: nn.Module) -> float | None:
    """The rate of the dropout on the attention weights, or None if the module keeps it under an unknown name."""
    for name in _RATES:
        found = getattr(module, name, None)
        rate = found.p if isinstance(found, nn.Dropout) else found
        if isinstance(rate, (int, float)):
            return rate if module.training else 0.0
    return None


def head_size(module: nn.Module) -> int:
    return getattr(module, "attention_head_size", None) or module.head_dim


def _why_not(module: nn.Module, x: Tensor, args: tuple, options: dict[str, Any]) -> str | None:
    triple = triple_of(module)
    if triple is None or _attention_rate(module) is None:
        return "its parts have changed"
    if args or x.dim() != 3:
        return "it was called with more than hidden states and a mask"
    if "attentions" in outputs_to_record(module):
        return "attention weights were asked for"
    reason = (
        why_not_parts(triple, nn.Linear)
        or registry.asked_for(options)
        or why_not_global_hooks()
        or why_not_linears(x, *triple)  # type: ignore[arg-type]
    )
    if reason is None and not alike(triple):
        return "query, key and value differ in shape or bias"
    if reason is None and ends_in_norm(module):
        return why_not_ending(module.dense, module.output_dropout, module.LayerNorm)
    return reason


def alike(triple: list[nn.Module]) -> bool:
    return len({part.weight.shape for part in triple}) == 1 and len({part.bias is None for part in triple}) == 1


def fused_forward(
    self: nn.Module, stock: Callable, hidden_states: Tensor, attention_mask: Any = None, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    reason = _why_not(self, hidden_states, args, kwargs)
    scope = None
    if reason is None:
        batch, length = hidden_states.shape[:2]
        stock_name = registry.stock_name(self.config._attn_implementation)
        scope = registry.scope_of(attention_mask, self, batch, length, kwargs.get("is_causal"), stock_name)
        reason = None if scope is not None else "the mask is not plain"
    if scope is None:
        step_aside(self, str(reason))
        return stock(hidden_states, attention_mask, *args, **kwargs)
    triple, rate = triple_of(self), _attention_rate(self)
    assert triple is not None and rate is not None
    size = head_size(self)
    heads = triple[0].out_features // size
    context = self_attention(
        flat(hidden_states),
        [part.weight for part in triple],
        [part.bias for part in triple],
        scope.sequences,
        heads=heads,
        scale=self.scaling,
        causal=scope.causal,
        window=scope.window,
        key_bias=scope.key_bias,
        p=rate,
        format=format_of(self),
    )
    return finish(self, context.view(*hidden_states.shape[:2], heads * size), hidden_states), None


def finish(module: nn.Module, context: Tensor, hidden_states: Tensor) -> Tensor:
    if ends_in_norm(module):
        norm = module.LayerNorm
        out = residual_block(
            flat(context), flat(hidden_states).contiguous(), module.dense.weight, module.dense.bias,
            norm.weight, norm.bias, norm.eps, dropout_rate(module.output_dropout), format_of(module),
        )  # fmt: skip
        return out.view(hidden_states.shape)
    ending = ending_of(module)
    return context if ending is None else ending(context)


# What an attention module's code reads beside its parts: sizes, the attention function, and a cache, with which the
# fused forward steps aside.
_READS = {
    *("config", "_attn_implementation", "get_interface", "scaling", "attention_head_size", "head_dim", "is_causal"),
    *("num_heads", "num_attention_heads", "num_key_value_groups", "all_head_size", "embed_dim", "hidden_size"),
    *("p", "layer_idx", "update", "self_attention_cache", "is_updated", "logger", "warning_once"),
}


def _build(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """What the module is taken for, in plain PyTorch."""
    query, key, value = triple_of(module)  # type: ignore[misc]
    size = head_size(module)

    def compute(x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, size)).transpose(1, 2) for part in (query, key, value))
        causal = getattr(module, "is_causal", False)
        note_attention_dropout(_attention_rate(module) or 0.0)
        out = nn.functional.scaled_dot_product_attention(q, k, v, scale=module.scaling, is_causal=causal)
        out = out.transpose(1, 2).flatten(2)
        return finish_plainly(module, out, x)

    return compute


def finish_plainly(module: nn.Module, out: Tensor, x: Tensor) -> Tensor:
    """The plain twin of `finish`."""
    if ends_in_norm(module):
        dropout = module.output_dropout
        return module.LayerNorm(x + dropped(module.dense(out), dropout.p, dropout.training))  # type: ignore[operator]
    ending = ending_of(module)
    return out if ending is None else ending(out)


def _vary(module: nn.Module) -> None:
    """Another scale and another rate, so that the module is seen to read them where the fused forward does."""
    module.scaling = 1.25 * module.scaling
    for name in _RATES:
        if isinstance(getattr(module, name, None), float):
            setattr(module, name, 0.29)


def formula(module: nn.Module) -> Formula | None:
    triple = triple_of(module)
    if triple is None or not all(type(part) is nn.Linear for part in triple):
        return None
    if parameter_names(type(module).forward)[:2] != ["hidden_states", "attention_mask"]:
        return None
    if not isinstance(getattr(module, "scaling", None), float) or not hasattr(module, "config"):
        return None
    if not (hasattr(module, "attention_head_size") or hasattr(module, "head_dim")) or _attention_rate(module) is None:
        return None
    if not alike(triple):
        return None  # grouped heads: the registered attention function serves them
    if not registry.SMALLEST_HEAD <= head_size(module) <= registry.LARGEST_HEAD:
        return None
    reads = _READS | {name for name, part in module.named_children() if part in _used_parts(module, triple)}
    return Formula("forward", _build, (triple[0].in_features,), frozenset({*reads, *_RATES}), vary=_vary)


def _used_parts(module: nn.Module, triple: list[nn.Module]) -> list[nn.Module]:
    ends = [module.dense, module.output_dropout, module.LayerNorm] if ends_in_norm(module) else [ending_of(module)]
    return [*triple, *(part for part in ends if part is not None)]


def take_over(name: str, module: nn.Module, patches: Patches) -> bool:
    what = "query, key, value as one product; tiled attention with dropout inside"
    return patches.bind_if_same(name, module, formula(module), fused_forward, what, module.children())
