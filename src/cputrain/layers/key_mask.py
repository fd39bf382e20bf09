"""Masks that hide keys and nothing else: stock's mask of a padded batch is the same for all heads and queries.

Our attention adds it as one row for each sequence, which stays in the cache, where stock reads a matrix.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

# The rows of masks that were looked at: all layers of a model get the same. By the mask's version, too.
_known: WeakIdKeyDictionary = WeakIdKeyDictionary()


_HIDDEN = -1e30  # masks that are added have the lowest value of their dtype, or -inf, at hidden keys


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
        return None if bool((first < _HIDDEN).all(-1).any()) else first.contiguous()
    return torch.zeros(first.shape).masked_fill_(~first, -torch.inf)
