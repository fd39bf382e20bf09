"""Raw outputs of products, and norms' inputs, kept for the backward as 16-bit integers: half their size.

64 of a row share a scale. Their error is 1.5e-5 of a block's largest value, a tenth of an int16 product's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cputrain import native
from cputrain.native import workspace
from cputrain.native.operands import address

_BLOCK, _WORDS = 64, 66  # values, and with their scale


def rounded(x_TM: Tensor) -> Tensor:
    """x as it is kept: a row of words for each of x."""
    rows, cols = x_TM.shape
    out = torch.empty(rows, _words(cols), dtype=torch.int16)
    native.kernels().round_to_int16(
        address("rounded: x", x_TM, rows * cols),
        address("rounded: out", out, out.numel(), torch.int16),
        *(rows, cols),
    )
    return out


def as_float(kept: Tensor, cols: int, place: str) -> Tensor:
    """What `rounded` kept, in the workspace of that name; what was kept in another dtype is returned as it is."""
    if kept.dtype is not torch.int16:
        return kept
    out = workspace.floats(place, kept.shape[0], cols)
    native.kernels().read_int16(
        address("what was kept", kept, out.shape[0] * _words(cols), torch.int16),
        address("its place in the workspace", out, out.numel()),
        *out.shape,
    )
    return out


def _words(cols: int) -> int:
    return (cols + _BLOCK - 1) // _BLOCK * _WORDS
