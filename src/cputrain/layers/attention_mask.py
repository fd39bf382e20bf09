"""The mask factory of our attention: which tokens are real, instead of a matrix that says so for each pair of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cputrain.layers.patch import transform_obstacle
from cputrain.padding import PaddingMask


def make_ragged_mask(stock: str) -> Callable:
    """The mask factory of `cputrain_ragged_over_<stock>`."""
    from transformers import masking_utils  # not inside: torch.compile of torch 2.8 can't follow it there

    def cputrain_mask(*args: Any, **kwargs: Any) -> object:
        factory = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS[stock]
        if args or torch.compiler.is_compiling() or transform_obstacle() is not None:
            return factory(*args, **kwargs)
        batch, real = kwargs["batch_size"], kwargs.get("attention_mask")
        length, offset = _queries(kwargs)
        if kwargs["kv_length"] != length or offset or kwargs.get("kv_offset", 0):
            return factory(**kwargs)  # there are earlier tokens in a cache, or keys of another sequence
        if real is not None and (real.shape != (batch, length) or not real.is_cpu):
            return factory(**kwargs)
        real = None if real is None or bool(real.all()) else real.bool()
        function = kwargs["mask_function"]
        causal: bool | None = function is masking_utils.causal_mask_function
        if not causal and function is not masking_utils.bidirectional_mask_function:
            if real is None:
                return factory(**kwargs)
            causal = _is_causal(function, batch, length, kwargs.get("use_vmap", True))
        return PaddingMask(batch, length, real, causal, lambda: factory(**kwargs))

    return cputrain_mask


def _queries(kwargs: dict[str, Any]) -> tuple[int, int]:
    """How many queries there are, and the number of the first; transformers 4 gives the numbers of all."""
    if "q_length" in kwargs:
        return kwargs["q_length"], int(kwargs.get("q_offset", 0))
    numbers = kwargs["cache_position"]
    return len(numbers), int(numbers[0])


def _is_causal(function: Callable, batch: int, length: int, one_by_one: bool) -> bool | None:
    """Whether a mask function shows each token all others up to itself, or all (a window as long as the sequence)."""
    if one_by_one:  # it answers single numbers only
        return None
    index = torch.arange(length)
    seen = function(torch.arange(batch)[:, None, None, None], torch.zeros(1, 1, 1, 1, dtype=torch.long),
                    index[:, None], index)  # fmt: skip
    seen = seen.expand(*seen.shape[:-2], length, length)
    if bool(seen.all()):
        return False
    return True if bool((seen == (index[:, None] >= index)).all()) else None
