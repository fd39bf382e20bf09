"""Attention through transformers' own registries, so that every model that uses them is served.

Functions are registered per stock implementation: `cputrain_over_sdpa` is ours over stock's "sdpa", which still does
whatever ours can't. The mask factory hands out a `PaddingMask` instead of a tensor, but only to models whose encoder
drops the padding (`cputrain_ragged_over_…`), because other models' code may look into the mask.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from cputrain.layers.patch import tensor_obstacle
from cputrain.ops.attention import Sequences, attention
from cputrain.padding import PaddingMask, RaggedTokens

SMALLEST_HEAD, LARGEST_HEAD = 8, 256

# Arguments that models pass to the attention function and that change nothing for ours.
_HARMLESS = {
    "position_ids",
    "cache_position",
    "use_cache",
    "is_causal",
    "num_items_in_batch",
    "return_dict",
    "cu_seq_lens_q",
}


def implementation_name(stock: str, ragged: bool) -> str:
    """The registered name of ours over the stock implementation `stock`."""
    return f"cputrain_{'ragged_' if ragged else ''}over_{stock}"


def stock_name(implementation: str) -> str:
    return implementation.split("over_", 1)[-1]


def sequences_of(mask: object, module: nn.Module, batch: int, length: int, is_causal: bool | None) -> tuple | None:
    """(sequences, causal) that our attention is to work on, or None if only stock's mask can say it."""
    if isinstance(mask, RaggedTokens):
        return mask.sequences, mask.causal
    if isinstance(mask, PaddingMask):
        return None if mask.dense_sequences is None else (mask.dense_sequences, mask.causal)
    if mask is None:
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        return Sequences.dense(batch, length), bool(causal) and length > 1
    return None


def obstacle(query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> str | None:
    """Why stock's attention must run."""
    asked_for = [
        name for name, given in options.items() if given is not None and given is not False and name not in _HARMLESS
    ]
    if asked_for:
        return f"the attention was called with {', '.join(sorted(asked_for))}"
    if query.shape[2] != key.shape[2]:
        return "queries and keys differ in length (a cache or cross-attention)"
    if not SMALLEST_HEAD <= query.shape[3] <= LARGEST_HEAD or query.shape[3] != value.shape[3]:
        return f"heads of {query.shape[3]} and {value.shape[3]}"
    return tensor_obstacle(query, key, value)


def _rows(x: Tensor) -> Tensor:
    """(batch, heads, length, size) → (batch · length, heads, size), a view where strides allow it."""
    return x.transpose(1, 2).flatten(0, 1)


def _stock_function(module: nn.Module, stock: str) -> Callable:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if stock == "eager":
        return sys.modules[type(module).__module__].eager_attention_forward
    return ALL_ATTENTION_FUNCTIONS[stock]


def _stock_one_by_one(function: Callable, module: nn.Module, qkv: tuple, ragged: RaggedTokens, options: dict) -> tuple:
    """Stock's attention on ragged tokens: sequence after sequence."""
    lengths = ragged.sequences.lengths.tolist()
    parts = zip(*(x.split(lengths, dim=2) for x in qkv), strict=True)
    outs = [function(module, *part, None, **options)[0] for part in parts]
    return _cat_sequences(outs), None


def _cat_sequences(outs: list[Tensor]) -> Tensor:
    import torch

    return torch.cat(outs, dim=1)


def make_attention(stock: str) -> Callable:
    """The function to register as `cputrain_over_<stock>`."""

    def cputrain_attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: object,
        scaling: float | None = None,
        dropout: float = 0.0,
        is_causal: bool | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        batch, heads, length, size = query.shape
        scale = size**-0.5 if scaling is None else scaling
        where = None
        if obstacle(query, key, value, options) is None:
            where = sequences_of(attention_mask, module, batch, length, is_causal)
        if where is not None:
            sequences, causal = where
            out = attention(_rows(query), _rows(key), _rows(value), sequences, scale=scale, causal=causal, p=dropout)
            return out.view(batch, length, heads, size), None
        function = _stock_function(module, stock)
        options.update(scaling=scaling, dropout=dropout)
        if is_causal is not None:
            options["is_causal"] = is_causal
        if isinstance(attention_mask, RaggedTokens):
            return _stock_one_by_one(function, module, (query, key, value), attention_mask, options)
        mask = attention_mask.stock if isinstance(attention_mask, PaddingMask) else attention_mask
        return function(module, query, key, value, mask, **options)

    return cputrain_attention


def make_ragged_mask(stock: str) -> Callable:
    """The mask factory of `cputrain_ragged_over_<stock>`: lengths instead of a matrix, for plain masks."""

    def cputrain_mask(*args: Any, **kwargs: Any) -> object:
        from transformers import masking_utils

        factory = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS[stock]
        function = kwargs.get("mask_function", masking_utils.causal_mask_function)
        plain = function in (masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function)
        q_length, kv_length = kwargs.get("q_length"), kwargs.get("kv_length")
        if (
            args
            or not plain
            or q_length is None
            or q_length != kv_length
            or kwargs.get("q_offset", 0)
            or kwargs.get("kv_offset", 0)
        ):
            return factory(*args, **kwargs)
        real = kwargs.get("attention_mask")
        if real is not None and (real.dim() != 2 or real.shape[1] != q_length or not real.is_cpu):
            return factory(**kwargs)
        real = None if real is None or bool(real.all()) else real.bool()
        causal = function is masking_utils.causal_mask_function
        return PaddingMask(kwargs["batch_size"], q_length, real, causal, lambda: factory(**kwargs))

    return cputrain_mask


def register(stock: str) -> None:
    """Makes ours over `stock` known to transformers; harmless if done before."""
    from transformers import AttentionInterface, masking_utils

    for ragged in (False, True):
        name = implementation_name(stock, ragged)
        AttentionInterface.register(name, make_attention(stock))
        factory = make_ragged_mask(stock) if ragged else masking_utils.ALL_MASK_ATTENTION_FUNCTIONS[stock]
        masking_utils.AttentionMaskInterface.register(name, factory)
