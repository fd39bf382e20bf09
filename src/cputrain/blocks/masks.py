"""Which tokens are real, instead of a matrix that says so for each pair of them.

Models that go through transformers' registry of masks get it from our mask factory. Others (BERT before transformers 5)
make a matrix that is added to the scores; what it hides is read from it.

A mask that hides keys and nothing else (stock's of a padded batch) is the same for all heads and queries. Our attention
adds it as one row for each sequence, which stays in the cache, where stock reads a matrix (`key_bias`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from cputrain.blocks import mask_functions
from cputrain.padding import PaddingMask
from cputrain.patching.bind import why_not_transform

# What models add to a score to hide it: the lowest value of their dtype, or -inf. Of bf16's, which is above fp32's.
_HIDDEN = torch.finfo(torch.bfloat16).min


def make_ragged_mask(stock: str) -> Callable:
    """The mask factory of `cputrain_ragged_over_<stock>`."""
    from transformers import masking_utils  # not inside: torch.compile of torch 2.8 can't follow it there

    def cputrain_mask(*args: Any, **kwargs: Any) -> object:
        factory = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS[stock]
        if args or torch.compiler.is_compiling() or why_not_transform() is not None:
            return factory(*args, **kwargs)
        batch, real = kwargs["batch_size"], kwargs.get("attention_mask")
        length, offset = _queries(kwargs)
        if kwargs["kv_length"] != length or offset or kwargs.get("kv_offset", 0):
            return factory(**kwargs)  # there are earlier tokens in a cache, or keys of another sequence
        if real is not None and (real.shape != (batch, length) or not real.is_cpu):
            return factory(**kwargs)
        real = None if real is None or bool(real.all()) else real.bool()
        mask = PaddingMask(batch, length, real, None, lambda: factory(**kwargs))
        one_by_one = kwargs.get("use_vmap", True)  # the function answers single numbers only
        _look(mask, kwargs["mask_function"], one_by_one)
        return mask if real is not None or mask.causal is not None else mask.stock

    return cputrain_mask


def _look(mask: PaddingMask, function: Callable, one_by_one: bool) -> None:
    """Notes what the mask hides beside padding, as far as our attention can hide it."""
    sight = mask_functions.read(function)
    if sight is None:
        if mask.real is not None and not one_by_one:
            mask.causal = _is_causal(function, mask.batch, mask.length)
        return
    before, behind = (None if reach is None or reach >= mask.length - 1 else reach
                      for reach in (sight.before, sight.behind))  # fmt: skip
    causal = sight.behind == 0
    if not causal and before != behind:
        return
    if sight.numbers or sight.positions:
        mask.packed = None if mask.real is not None else mask_functions.packed(sight, mask.batch, mask.length)
        if mask.packed is None:
            return
    mask.causal, mask.window = causal, before


def _queries(kwargs: dict[str, Any]) -> tuple[int, int]:
    """How many queries there are, and the number of the first; transformers 4 gives the numbers of all."""
    if "q_length" in kwargs:
        return kwargs["q_length"], int(kwargs.get("q_offset", 0))
    numbers = kwargs["cache_position"]
    return len(numbers), int(numbers[0])


def _is_causal(function: Callable, batch: int, length: int) -> bool | None:
    """Whether a mask function shows each token all others up to itself, or all."""
    index = torch.arange(length)
    seen = function(torch.arange(batch)[:, None, None, None], torch.zeros(1, 1, 1, 1, dtype=torch.long),
                    index[:, None], index)  # fmt: skip
    seen = seen.expand(*seen.shape[:-2], length, length)
    if bool(seen.all()):
        return False
    return True if bool((seen == (index[:, None] >= index)).all()) else None


def padding_of(mask: object, batch: int, length: int) -> PaddingMask | None:
    """The padding that a mask of (batch, 1, 1 or length, length) hides, if it hides the same from every token."""
    if not _is_added(mask) or mask.shape not in ((batch, 1, 1, length), (batch, 1, length, length)):
        return None
    of_first = mask[:, :, :1]
    hidden = of_first <= _HIDDEN
    if not bool(((of_first == 0) | hidden).all()) or not bool((mask == of_first).all()):
        return None
    real = ~hidden[:, 0, 0] if bool(hidden.any()) else None
    return PaddingMask(batch, length, real, False, lambda: mask)


def hides_nothing(mask: object) -> bool:
    """Whether a mask that is added to the scores is 0 everywhere."""
    return _is_added(mask) and not bool(mask.any())


def _is_added(mask: object) -> TypeGuard[Tensor]:
    """Whether it can be looked at, and is a constant of four dimensions; one of booleans isn't added."""
    if not isinstance(mask, Tensor) or type(mask) is not Tensor or mask.dim() != 4 or not mask.is_floating_point():
        return False
    return mask.is_cpu and not mask.requires_grad and why_not_transform() is None


# The rows of masks that were looked at: all layers of a model get the same. By the mask's version, too.
_known: WeakIdKeyDictionary = WeakIdKeyDictionary()


_LOWEST = -1e30  # masks that are added have the lowest value of their dtype, or -inf, at hidden keys


def key_bias(mask: object, batch: int, length: int) -> Tensor | None:
    """What to add to the scores, (batch or 1, 1, 1, keys), or None if the mask says more than which keys are hidden.

    A boolean mask is -inf where it hides a key: a query without any key gets 0, as from stock.
    """
    if not isinstance(mask, Tensor) or not _has_shape(mask, batch, length):
        return None
    known = _known.get(mask)
    if known is None or known[0] != mask._version:
        known = _known[mask] = mask._version, _row(mask)
    return known[1]


def _has_shape(mask: Tensor, batch: int, length: int) -> bool:
    if type(mask) is not Tensor or mask.dtype not in (torch.bool, torch.float32) or mask.requires_grad:
        return False
    if mask.dim() != 4 or not mask.is_cpu or mask.is_inference():
        return False
    return (
        mask.shape[0] in (1, batch) and mask.shape[1] == 1 and mask.shape[2] in (1, length) and mask.shape[3] == length
    )


def _row(mask: Tensor) -> Tensor | None:
    first = mask[:, :, :1]
    if mask.shape[2] > 1 and mask.stride(2) and not bool((mask == first).all()):
        return None
    if mask.dtype == torch.float32:  # of a row without a key, stock makes what its implementation likes
        return None if bool((first < _LOWEST).all(-1).any()) else first.contiguous()
    return torch.zeros(first.shape, dtype=torch.float32).masked_fill_(~first, -torch.inf)
