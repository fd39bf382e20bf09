"""Self-attention modules that compute their attention themselves, instead of through transformers' registry.

BERT and its descendants are such before transformers 5, and ViT in the oldest release that is served. They are replaced
as those of the registry are (self_attention.py). Without the registry stock's forward can't work on ragged tokens, so
where ours steps aside, stock's gets the padded batch that they came from.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from cputrain.blocks import attention_registry as registry
from cputrain.blocks import config_view
from cputrain.blocks.masks import hides_nothing
from cputrain.blocks.residual import why_not_ending
from cputrain.blocks.self_attention import alike, ending_of, ends_in_norm, finish, finish_plainly, head_size, triple_of
from cputrain.formats import probing
from cputrain.ops.attention import Sequences
from cputrain.ops.linear import flat
from cputrain.ops.self_attention import self_attention
from cputrain.padding import RaggedTokens, gather, scatter
from cputrain.patching.bind import (
    Patches,
    format_of,
    parameter_names,
    probed,
    step_aside,
    why_not_global_hooks,
    why_not_parts,
    why_not_tensors,
)
from cputrain.patching.probe import Formula, difference, dropped, note_attention_dropout

WHAT = "query, key, value as one product; tiled attention with dropout inside"

# How forwards begin: BERT's, ViT's, which takes no mask, and DistilBERT's, which gets the hidden states three times.
_BEGINNINGS = (["hidden_states", "attention_mask"], ["hidden_states", "head_mask"], ["query", "key", "value", "mask"])
_MASKS = ("attention_mask", "mask")
_RATES = ("dropout_prob", "attention_probs_dropout_prob", "attention_dropout", "dropout")

# What a forward of this class returns when nothing else is asked for: a tuple of so many, or 0 for a tensor alone.
_lengths: dict[type, int] = {}


@cache
def _names(forward: Callable) -> list[str]:
    return parameter_names(forward)


@cache
def _names_in_code(forward: Callable) -> frozenset[str]:
    """The attributes and functions that a forward mentions, under decorators too."""
    return frozenset(inspect.unwrap(forward).__code__.co_names)


def _rate_source(module: nn.Module) -> Any:
    """The number, or the dropout layer, that its code takes for the attention weights; None if unknown."""
    mentioned = _names_in_code(type(module).forward)
    return next((getattr(module, name) for name in _RATES if name in mentioned and hasattr(module, name)), None)


def _attention_rate(module: nn.Module) -> float | None:
    source = _rate_source(module)
    rate = source.p if isinstance(source, nn.Dropout) else source
    if not isinstance(rate, (int, float)):
        return None
    return rate if module.training else 0.0


def _is_plain(module: nn.Module) -> bool:
    """Neither causal, nor with distances in its scores: BERT's has attributes for both."""
    causal = getattr(module, "is_decoder", False) or getattr(module, "is_causal", False)
    return not causal and getattr(module, "position_embedding_type", "absolute") == "absolute"


# ---- what runs -----------------------------------------------------------------------------------------------------


@probed
def fused_forward(self: nn.Module, stock: Callable, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    given = dict(zip(_names(type(self).forward)[1:], args, strict=False)) | kwargs
    mask = next((given.pop(name) for name in _MASKS if name in given), None)
    reason = "its encoder is probed" if probing.get() else _why_not(self, hidden_states, given)
    scope = None if reason is not None else _scope(mask, hidden_states)
    if scope is None:
        step_aside(self, reason or "the mask is not plain")
        if isinstance(mask, RaggedTokens):
            return _stock_on_padded(stock, mask, hidden_states, args, kwargs)
        return stock(hidden_states, *args, **kwargs)
    triple, rate, size = triple_of(self), _attention_rate(self), head_size(self)
    assert triple is not None and rate is not None
    heads = triple[0].out_features // size
    weights, biases = [part.weight for part in triple], [part.bias for part in triple]
    context = self_attention(
        flat(hidden_states), weights, biases, scope.sequences,
        heads=heads, scale=size**-0.5, causal=scope.causal, window=scope.window, p=rate, format=format_of(self),
    )  # fmt: skip
    out = finish(self, context.view(*hidden_states.shape[:2], heads * size), hidden_states)
    length = _lengths[type(self)]
    return (out, None)[:length] if length else out


def _why_not(module: nn.Module, x: Tensor, options: dict[str, Any]) -> str | None:
    triple = triple_of(module)
    if triple is None or _attention_rate(module) is None or not _is_plain(module):
        return "its parts have changed"
    if x.dim() != 3 or any(options.pop(name, x) is not x for name in ("key", "value")):
        return "it was called with more than hidden states and a mask"
    reason = (
        why_not_parts(triple, nn.Linear)
        or registry.asked_for(options)
        or why_not_global_hooks()
        or why_not_tensors(x, *(part.weight for part in triple))
    )
    if reason is None and not alike(triple):
        return "query, key and value differ in shape or bias"
    if reason is None and ends_in_norm(module):
        return why_not_ending(module.dense, module.output_dropout, module.LayerNorm)
    return reason


def _scope(mask: object, x: Tensor) -> registry.Scope | None:
    """What each query may attend to, or None if only stock's mask can say it."""
    if isinstance(mask, RaggedTokens):
        return registry.scope_of_ragged(mask)
    return registry.Scope(Sequences.dense(*x.shape[:2]), False) if mask is None or hides_nothing(mask) else None


def _stock_on_padded(
    stock: Callable, ragged: RaggedTokens, hidden_states: Tensor, args: tuple, kwargs: dict[str, Any]
) -> Any:
    """Stock's method of ragged tokens: on the padded batch."""
    dense = scatter(hidden_states, ragged)

    def padded(x: Any) -> Any:
        return ragged.stock if x is ragged else dense if x is hidden_states else x

    out = stock(dense, *map(padded, args), **{name: padded(value) for name, value in kwargs.items()})
    return (gather(out[0], ragged), *out[1:]) if isinstance(out, tuple) else gather(out, ragged)


# ---- recognising them ----------------------------------------------------------------------------------------------

# What the code of such modules mentions beside its parts: sizes and options that are checked at each call, and what
# they do when they are given a cache, other keys or a mask of heads, with which the fused forward steps aside.
_READS = {
    *_RATES,
    *("attention_head_size", "num_attention_heads", "all_head_size", "hidden_size", "n_heads", "dim", "p", "config"),
    *(
        "is_decoder",
        "is_causal",
        "is_cross_attention",
        "position_embedding_type",
        "require_contiguous_qkv",
        "layer_idx",
    ),
    *(
        "max_position_embeddings",
        "distance_embedding",
        "prune_heads",
        "pruned_heads",
        "logger",
        "warning_once",
        "warning",
    ),
    *("super", "__class__", "forward", "get", "update", "is_updated", "self_attention_cache", "cross_attention_cache"),
    *("key_cache", "value_cache", "layers", "keys", "values", "transpose_for_scores", "masked_fill"),
}


def take_over(name: str, module: nn.Module, patches: Patches) -> bool:
    if not _looks_like_self_attention(module):
        return False
    reason = None
    for build in (_build_with_layer, _build_with_rate):
        reason = next(
            (r for mask in (_unmasked, _masked) if (r := difference(module, _formula(module, build, mask)))), None
        )
        if reason is None:
            patches.bind(name, module, "forward", fused_forward, WHAT, module.children())
            return True
    patches.leave(name, module, str(reason))
    return False


def _looks_like_self_attention(module: nn.Module) -> bool:
    triple, config = triple_of(module), module.__dict__.get("config")
    if triple is None or not all(type(part) is nn.Linear for part in triple) or not alike(triple):
        return False
    if config_view.is_view(config) or getattr(config, "_attn_implementation", "eager") not in registry.STOCK:
        return False  # it goes through the registry, or to an implementation that the user has chosen
    names = parameter_names(type(module).forward)
    if not any(names[: len(beginning)] == beginning for beginning in _BEGINNINGS):
        return False
    if not hasattr(module, "attention_head_size") or _attention_rate(module) is None or not _is_plain(module):
        return False
    return registry.SMALLEST_HEAD <= head_size(module) <= registry.LARGEST_HEAD


def _formula(module: nn.Module, build: Callable, call: Callable) -> Formula:
    triple = triple_of(module)
    assert triple is not None
    ends = [module.dense, module.LayerNorm, module.output_dropout] if ends_in_norm(module) else [ending_of(module)]
    used = {name for name, part in module.named_children() if any(part is other for other in (*triple, *ends))}
    return Formula("forward", build, (triple[0].in_features,), frozenset({*_READS, *used}), call=call, vary=_vary)


def _build_with_layer(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """What the module is taken for, in plain PyTorch: with dropout as a layer on the attention weights."""
    return lambda x: _attend(module, x, lambda w: dropped(w, _attention_rate(module) or 0.0, module.training))


def _build_with_rate(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """The same with dropout inside torch's attention."""

    def noted(weights: Tensor) -> Tensor:
        note_attention_dropout(_attention_rate(module) or 0.0)
        return weights

    return lambda x: _attend(module, x, noted)


def _attend(module: nn.Module, x: Tensor, on_weights: Callable[[Tensor], Tensor]) -> Tensor:
    size = head_size(module)
    q, k, v = (part(x).unflatten(-1, (-1, size)).transpose(1, 2) for part in triple_of(module))  # type: ignore[union-attr]
    out = on_weights((q @ k.mT * size**-0.5).softmax(-1)) @ v
    out = out.transpose(1, 2).flatten(2)
    return finish_plainly(module, out, x)


def _vary(module: nn.Module) -> None:
    """Other rates, so that the module is seen to read the one that the fused forward reads."""
    for number, name in enumerate(_RATES):
        if isinstance(getattr(module, name, None), float):
            setattr(module, name, 0.29 + 0.01 * number)


def _unmasked(module: nn.Module) -> Callable[[Tensor], Any]:
    return _with_mask(module, None)


def _masked(module: nn.Module) -> Callable[[Tensor], Any]:
    """With a mask that hides nothing."""
    return _with_mask(module, torch.zeros(2, 1, 1, 3, dtype=torch.float32))


def _with_mask(module: nn.Module, mask: Tensor | None) -> Callable[[Tensor], Any]:
    """Stock's method as a function of the hidden states alone."""
    stock, names = type(module).forward.__get__(module), _names(type(module).forward)
    masked = {name: mask for name in _MASKS if name in names}

    def call(x: Tensor) -> Any:
        out = stock(*[x] * (3 if names[0] == "query" else 1), **masked)
        return _with_length_noted(module, out)

    return call


def _with_length_noted(module: nn.Module, out: Any) -> Any:
    """Refuses what has more in it than the result and attention weights, for which no caller has asked."""
    rest = out[1:] if isinstance(out, tuple) else ()
    if len(rest) > 1 or any(x is not None and not (isinstance(x, Tensor) and x.dim() == 4) for x in rest):
        raise TypeError("it gives more than attention")
    _lengths[type(module)] = len(out) if isinstance(out, tuple) else 0
    return out
