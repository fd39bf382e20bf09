"""Matrix products in block-scaled 16-bit integers: faster than fp32 on CPUs without bf16, with less error than bf16.

Each operand is quantised and packed first (`pack`), then multiplied (`product`). A linear layer needs three products,
and each of its matrices in two orientations; `pack` makes one or both in one go, and what it returns is plain memory
that may be kept from the forward to the backward:

    forward         y_TO  = x_TI · w_OIᵀ     x by rows, left       w by rows, right
    input gradient  dx_TI = dy_TO · w_OI     dy by rows, left      w by columns, right
    weight gradient dw_OI = dy_TOᵀ · x_TI    dy by columns, left   x by columns, right

Every vector is cut into blocks of at most 384 values, and each block gets the scale that makes its norm 46300 and its
largest value at most 32767; csrc/kernels/matmul_quantise.h says why sums then can't overflow. A zero stays a zero. A
block with an infinity or a NaN makes all results of its vector NaN (fp32 gives NaN or an infinity for each of them).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from cputrain import native
from cputrain.ops.operands import require_float32, require_size

Role = Literal["left", "right"]
_ROLES = {"left": 0, "right": 1}


@dataclass(frozen=True)
class Packed:
    """`vectors` vectors of length `depth`, quantised and laid out for one side of a product."""

    memory: Tensor
    vectors: int
    depth: int
    role: Role


def _empty(vectors: int, depth: int, role: Role) -> Packed:
    size = ctypes.c_int64()
    native.kernels().int16_packed_bytes(vectors, depth, _ROLES[role], ctypes.addressof(size))
    return Packed(torch.empty(size.value, dtype=torch.uint8), vectors, depth, role)


def _rows_contiguous(x: Tensor) -> Tensor:
    return x if x.shape[1] <= 1 or x.stride(1) == 1 else x.contiguous()


def pack(
    x: Tensor, rows: Role | None = None, columns: Role | None = None, column_sums: Tensor | None = None
) -> tuple[Packed | None, Packed | None]:
    """`x` by its rows, by its columns, or both; `column_sums` receives what its name says (a bias gradient)."""
    require_float32("pack", x=x, column_sums=column_sums)
    if x.dim() != 2 or (rows is None and columns is None) or (column_sums is not None and columns is None):
        raise ValueError(
            f"pack: x must have two dimensions (found {x.dim()}), and rows or columns a role; sums need columns."
        )
    x = _rows_contiguous(x)
    by_rows = _empty(x.shape[0], x.shape[1], rows) if rows else None
    by_columns = _empty(x.shape[1], x.shape[0], columns) if columns else None
    if column_sums is not None:
        require_size("pack", (x.shape[1],), column_sums=column_sums)
    native.kernels().int16_pack(
        x.data_ptr(),
        x.stride(0),
        *x.shape,
        by_rows.memory.data_ptr() if by_rows else None,
        _ROLES[rows or "left"],
        by_columns.memory.data_ptr() if by_columns else None,
        _ROLES[columns or "left"],
        None if column_sums is None else column_sums.data_ptr(),
    )
    return by_rows, by_columns


def by_rows(x: Tensor, role: Role) -> Packed:
    packed, _ = pack(x, rows=role)
    assert packed is not None
    return packed


def by_columns(x: Tensor, role: Role, column_sums: Tensor | None = None) -> Packed:
    _, packed = pack(x, columns=role, column_sums=column_sums)
    assert packed is not None
    return packed


def product(
    left: Packed, right: Packed, out: Tensor | None = None, bias: Tensor | None = None, accumulate: bool = False
) -> Tensor:
    """out[r, c] = left vector r · right vector c (+ bias[c]) (+ out[r, c] if `accumulate`)."""
    if left.depth != right.depth or (left.role, right.role) != ("left", "right"):
        raise ValueError(
            f"product: needs a left and a right operand of one depth, found {left.role} of depth {left.depth} and "
            f"{right.role} of depth {right.depth}."
        )
    if out is None:
        if accumulate:
            raise ValueError("product: accumulate needs an `out` to add to.")
        out = torch.empty(left.vectors, right.vectors)
    require_float32("product", out=out, bias=bias)
    require_size("product", (left.vectors, right.vectors), out=out)
    require_size("product", (right.vectors,), bias=bias)
    if _rows_contiguous(out) is not out:
        raise ValueError("product: the rows of out must be contiguous.")
    bias = None if bias is None else bias.contiguous()
    native.kernels().int16_product(
        left.memory.data_ptr(),
        right.memory.data_ptr(),
        out.data_ptr(),
        out.stride(0),
        left.vectors,
        right.vectors,
        left.depth,
        None if bias is None else bias.data_ptr(),
        int(accumulate),
    )
    return out


def linear_forward(x_TI: Tensor, w_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """y_TO = x_TI · w_OIᵀ + bias_O."""
    return product(by_rows(x_TI, "left"), by_rows(w_OI, "right"), bias=bias_O)


def linear_input_grad(dy_TO: Tensor, w_OI: Tensor, out: Tensor | None = None, accumulate: bool = False) -> Tensor:
    """dx_TI = dy_TO · w_OI, or added to `out`."""
    return product(by_rows(dy_TO, "left"), by_columns(w_OI, "right"), out=out, accumulate=accumulate)


def linear_weight_grad(
    dy_TO: Tensor,
    x_TI: Tensor,
    out: Tensor | None = None,
    accumulate: bool = False,
    bias_grad: Tensor | None = None,
) -> Tensor:
    """dw_OI = dy_TOᵀ · x_TI, or added to `out`; `bias_grad` receives the column sums of dy."""
    left = by_columns(dy_TO, "left", column_sums=bias_grad)
    return product(left, by_columns(x_TI, "right"), out=out, accumulate=accumulate)
