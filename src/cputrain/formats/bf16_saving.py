"""Activations saved as bf16, once even if two operators save them.

The output of one operator is the input of the next, and both save it. What the first saved is noted beside the tensor
that it returned, so that the second finds it, also through a view: stock's code stands between them and passes tensors
only. It is noted in a table, not as an attribute: attributes are pickled with a tensor.

Two forms: x rounded, or a LayerNorm's normalised input with the two rows (2 × I) by which it is multiplied and added
to; the norm's backward and the next product's then need one and the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

from cputrain import native
from cputrain.formats.base import Saved
from cputrain.native import workspace
from cputrain.native.operands import address, rows_and_cols, underlying


@dataclass(frozen=True)
class _Noted:
    version: int  # of the tensor: a change in place makes what was saved of it wrong
    tensors: tuple[Tensor, Tensor]  # values as bf16, and the rows that make them x again
    is_rounded: bool  # the values are the tensor's own, rounded


_noted: WeakIdKeyDictionary = WeakTensorKeyDictionary()


def _note(x: Tensor, tensors: tuple[Tensor, Tensor], is_rounded: bool) -> None:
    if not x.is_inference():  # it has no version
        _noted[x] = _Noted(x._version, tensors, is_rounded)


def note_normed(out_TI: Tensor, normed_TI: Tensor, weight_I: Tensor | None, bias_I: Tensor | None) -> None:
    """out = normed · weight + bias is a LayerNorm's result: an operator that saves it saves `normed`."""
    _note(out_TI, (normed_TI, _rows_of(weight_I, bias_I, out_TI.shape[-1])), is_rounded=False)


def as_bf16(x_TI: Tensor, rounded_only: bool = False) -> tuple[Tensor, Tensor]:
    """x as bf16, and the rows that make it x again."""
    source = underlying(x_TI)
    noted = None if source is None else _noted.get(source)
    if noted is not None and noted.version == x_TI._version and noted.is_rounded >= rounded_only:
        values, rows = noted.tensors
        if rows.shape[1] == x_TI.shape[-1]:
            return values.view(x_TI.shape), rows
    values = x_TI.detach().to(torch.bfloat16, memory_format=torch.contiguous_format)
    saved = values, _rows_of(None, None, x_TI.shape[-1])
    if source is not None:
        _note(source, saved, is_rounded=True)
    return saved


def _rows_of(weight_I: Tensor | None, bias_I: Tensor | None, features: int) -> Tensor:
    """Copies of both: another module's parameters may be gone by the backward (fully_shard)."""
    weight_I = torch.ones(features, dtype=torch.float32) if weight_I is None else weight_I.detach()
    return torch.stack((weight_I, torch.zeros(features, dtype=torch.float32) if bias_I is None else bias_I.detach()))


def rounded(x_TO: Tensor, bias_O: Tensor | None) -> Tensor:
    """bf16 of x + bias, in one pass."""
    out = torch.empty_like(x_TO, dtype=torch.bfloat16)
    rows, cols = rows_and_cols(x_TO)
    native.kernels().round_to_bf16(
        address("rounded: x", x_TO, rows * cols),
        address("rounded: bias", bias_O, cols),
        address("rounded: out", out, rows * cols, torch.bfloat16),
        *(rows, cols),
    )
    return out


def as_float(saved: Saved) -> Tensor:
    """What `as_bf16` saved, in a workspace: to be read before the next call."""
    if len(saved) == 1:
        return saved[0]
    saved_TI, (factor_I, offset_I) = saved
    out = workspace.floats("saved", *saved_TI.shape)
    rows, cols = rows_and_cols(saved_TI)
    native.kernels().read_bf16(
        address("what was saved", saved_TI, rows * cols, torch.bfloat16),
        address("its factor", factor_I, cols),
        address("its offset", offset_I, cols),
        address("its place in the workspace", out, rows * cols),
        *(rows, cols),
    )
    return out
