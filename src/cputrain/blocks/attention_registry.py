"""Attention through transformers' own registries, so that every model that uses them is served.

Functions are registered per stock implementation: `cputrain_over_sdpa` is ours over stock's "sdpa", which still does
whatever ours can't. The mask factory hands out a `PaddingMask` instead of a tensor, but only to models whose encoder or
layers drop the padding (`cputrain_ragged_over_…`), because other models' code may look into the mask.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cputrain.blocks.masks import key_bias, make_ragged_mask
from cputrain.formats import probing
from cputrain.ops.attention import Sequences, attention, plain
from cputrain.padding import PaddingMask, RaggedTokens, gather_heads, scatter_heads
from cputrain.patching.bind import outputs_to_record, why_not_tensors
from cputrain.patching.probe import REFUSALS, attention_noted, note_attention_dropout

SMALLEST_HEAD, LARGEST_HEAD = 8, 256

STOCK = ("sdpa", "eager")  # the implementations that ours stand over

# While set, the attention function notes here why stock's attention ran on tokens without their padding.
stock_reasons: ContextVar[list[str] | None] = ContextVar("cputrain_stock_reasons", default=None)

# Arguments that models pass to the attention function and that change nothing for ours.
_HARMLESS = {
    "position_ids",
    "cache_position",
    "use_cache",
    "is_causal",
    "num_items_in_batch",
    "output_hidden_states",
    "return_dict",
    # The mask has what these say:
    "sliding_window",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "seq_idx",
}


def implementation_name(stock: str, ragged: bool) -> str:
    """The registered name of ours over the stock implementation `stock`."""
    return f"cputrain_{'ragged_' if ragged else ''}over_{stock}"


def stock_name(implementation: str) -> str:
    """The stock implementation under `implementation`, or itself if it is none of ours."""
    return implementation.split("over_", 1)[-1] if implementation.startswith("cputrain_") else implementation


class Scope(NamedTuple):
    """What each query may attend to: the tokens of its own sequence, up to itself if causal, less hidden keys."""

    sequences: Sequences
    causal: bool
    key_bias: Tensor | None = None  # -inf or a very low value at hidden keys
    window: int | None = None  # keys further away are hidden


def scope_of(
    mask: object, module: nn.Module, batch: int, length: int, is_causal: bool | None, stock: str
) -> Scope | None:
    """What our attention is to work on, or None if only stock's mask can say it."""
    if isinstance(mask, RaggedTokens):
        return scope_of_ragged(mask)
    if isinstance(mask, PaddingMask):
        if mask.real is not None or mask.causal is None:
            return None
        return Scope(mask.packed or Sequences.dense(batch, length), mask.causal, window=mask.window)
    if mask is None:
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        return Scope(Sequences.dense(batch, length), stock != "eager" and bool(causal))  # eager: by its mask only
    bias = key_bias(mask, batch, length)
    return None if bias is None else Scope(Sequences.dense(batch, length), False, bias)


def scope_of_ragged(tokens: RaggedTokens) -> Scope | None:
    if tokens.causal is None or (tokens.window is not None and not tokens.without_holes):
        return None
    return Scope(tokens.sequences, tokens.causal, window=tokens.window)


_EXTRAS = ("softcap", "s_aux")


class Extras(NamedTuple):
    """What some models' attention does to its scores beside scaling and masking."""

    cap: float = 0.0
    sinks: Tensor | None = None


def extras_of(options: dict[str, Any]) -> Extras:
    """Soft caps and sinks under the names that transformers gives them."""
    return Extras(options.get("softcap") or 0.0, options.get("s_aux"))


# Whether the function under ours understands these names as we do, by function, class of module and names.
_understood: dict[tuple, bool] = {}


def why_not_extras(module: nn.Module, function: Callable, query: Tensor, key: Tensor, extras: Extras) -> str | None:
    """Stock's function is asked, once, on a few numbers: under one name each model's code could do something else."""
    cap, sinks = extras
    if not isinstance(cap, (int, float)) or cap < 0:
        return f"a soft cap of {cap}"
    if sinks is not None and (not isinstance(sinks, Tensor) or sinks.shape != query.shape[1:2]):
        return "sinks that are not one number for each head"
    if sinks is not None and (reason := why_not_tensors(sinks)):
        return reason
    asked = function, type(module), cap != 0, sinks is not None
    if asked not in _understood:
        _understood[asked] = _is_understood(module, function, query.shape[1], key.shape[1], extras)
    return None if _understood[asked] else "its soft cap or its sinks are another formula"


def _is_understood(module: nn.Module, function: Callable, heads: int, kv_heads: int, extras: Extras) -> bool:
    draws = torch.Generator().manual_seed(0)
    cap, sinks = extras
    with torch.no_grad(), torch.autocast("cpu", enabled=False), attention_noted():
        q, k, v = (torch.randn(5, count, 8, generator=draws) for count in (heads, kv_heads, kv_heads))
        scale = 1.0 + cap / 4  # scores that the cap bends
        mask = torch.zeros(5, 5).masked_fill(torch.ones(5, 5).triu(1).bool(), torch.finfo(torch.float32).min)
        given = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        options = {"softcap": cap or None, "s_aux": sinks}
        try:
            out = function(module, *given, mask[None, None], scaling=scale, dropout=0.0,
                           **{name: x for name, x in options.items() if x is not None})[0]  # fmt: skip
        except REFUSALS:
            return False
        expected = plain(q, k, v, Sequences.dense(1, 5), scale=scale, causal=True, cap=cap, sinks=sinks)
        return out.shape == (1, *expected.shape) and bool(torch.allclose(out[0], expected, 1e-4, 1e-5))


def _why_not_scope(tokens: RaggedTokens) -> str:
    if tokens.causal is None:
        return "its mask hides more than padding and what is to come"
    return "its window is one of places, and rows have holes"


def asked_for(options: dict[str, Any], served: tuple[str, ...] = ()) -> str | None:
    """Arguments of the attention that ours doesn't know; `served` are known to the caller."""
    unknown = [
        name
        for name, given in options.items()
        if given is not None and given is not False and name not in (*_HARMLESS, *served)
    ]
    return f"it was called with {', '.join(sorted(unknown))}" if unknown else None


def why_not(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> str | None:
    """Why stock's attention must run."""
    if "attentions" in outputs_to_record(module):
        return "attention weights were asked for"
    if query.shape[2] != key.shape[2]:
        return "queries and keys differ in length (a cache or cross-attention)"
    if not SMALLEST_HEAD <= query.shape[3] <= LARGEST_HEAD or query.shape[3] != value.shape[3]:
        return f"heads of {query.shape[3]} and {value.shape[3]}"
    return asked_for(options, _EXTRAS) or why_not_tensors(query, key, value)


def why_not_bias(bias: Tensor, query: Tensor, mask: object) -> str | None:
    """Why our attention can't add this bias, which is one of the padded batch."""
    ragged = mask if isinstance(mask, RaggedTokens) else None
    batch, length = (query.shape[0], query.shape[2]) if ragged is None else (ragged.batch, ragged.length)
    if bias.dim() != 4 or bias.shape[0] not in (1, batch) or bias.shape[1:] != (query.shape[1], length, length):
        return f"a bias of {tuple(bias.shape)}"
    if ragged is not None and not ragged.begins_rows:
        return "a bias, where padding stands before tokens"
    return why_not_tensors(bias)


def _rows(x: Tensor) -> Tensor:
    """(batch, heads, length, size) → (batch · length, heads, size), a view where strides allow it."""
    return x.transpose(1, 2).flatten(0, 1)


def _stock_function(module: nn.Module, stock: str) -> Callable:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if stock == "eager":
        return sys.modules[type(module).__module__].eager_attention_forward
    return ALL_ATTENTION_FUNCTIONS[stock]


def _stock_on_padded(function: Callable, module: nn.Module, qkv: tuple, ragged: RaggedTokens, options: dict) -> Tensor:
    """Stock's attention of ragged tokens: as the padded batch that they came from."""
    dense = function(module, *(scatter_heads(x, ragged) for x in qkv), ragged.stock, **options)[0]
    return gather_heads(dense, ragged)


def make_attention(stock: str) -> Callable:
    """The function to register as `cputrain_over_<stock>`."""

    def cputrain_attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        scaling: float | None = None,
        dropout: float = 0.0,
        is_causal: bool | None = None,
        position_bias: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        scope = reason = None
        if not torch.compiler.is_compiling():
            dropout = note_attention_dropout(dropout)
            batch, heads, length, size = query.shape
            extras = extras_of(options)
            reason = why_not(module, query, key, value, options)
            if reason is None and (extras.cap or extras.sinks is not None):
                reason = why_not_extras(module, _stock_function(module, stock), query, key, extras)
            if reason is None and position_bias is not None:
                reason = why_not_bias(position_bias, query, attention_mask)
            if reason is None:
                scope = scope_of(attention_mask, module, batch, length, is_causal, stock)
        if scope is not None and (position_bias is None or scope.key_bias is None):
            scale = size**-0.5 if scaling is None else scaling
            q, k, v = (_rows(x) for x in (query, key, value))
            bias = scope.key_bias if position_bias is None else position_bias
            out = attention(
                q, k, v, scope.sequences, scale=scale, causal=scope.causal, p=dropout, bias=bias, window=scope.window,
                cap=extras.cap, sinks=extras.sinks,
            )  # fmt: skip
            return out.view(batch, length, heads, size), None
        function = _stock_function(module, stock)
        if not torch.compiler.is_compiling() and probing.get():
            function = attention_noted()(function)
        options.update(scaling=scaling, dropout=dropout)
        if position_bias is not None:
            options["position_bias"] = position_bias
        if isinstance(attention_mask, RaggedTokens):
            if (reasons := stock_reasons.get()) is not None:
                reasons.append(reason or _why_not_scope(attention_mask))
            return _stock_on_padded(function, module, (query, key, value), attention_mask, options), None
        if is_causal is not None:
            options["is_causal"] = is_causal
        mask = attention_mask.stock if isinstance(attention_mask, PaddingMask) else attention_mask
        return function(module, query, key, value, mask, **options)

    return cputrain_attention


def register() -> None:
    """Makes ours over each stock implementation known to transformers; harmless if done before."""
    from transformers import AttentionInterface, masking_utils

    for stock in STOCK:
        stock_factory = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS[stock]
        for ragged, factory in ((False, stock_factory), (True, make_ragged_mask(stock))):
            name = implementation_name(stock, ragged)
            AttentionInterface.register(name, make_attention(stock))
            masking_utils.AttentionMaskInterface.register(name, factory)
