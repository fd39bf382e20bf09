"""Matrix products in block-scaled 16-bit integers: faster than fp32 on CPUs without bf16, with less error than bf16.

Each operand is quantised and packed, then multiplied. A linear layer needs three products, and each of its matrices in
two orientations:

    forward         y_TO  = x_TI · w_OIᵀ     x by rows, left       w by rows, right
    input gradient  dx_TI = dy_TO · w_OI     dy by rows, left      w by columns, right
    weight gradient dw_OI = dy_TOᵀ · x_TI    dy by columns, left   x by columns, right

`by_rows` and `by_columns` make an operand that `product` packs on its way, into memory that is then thrown away.
Sources may be float32 or bfloat16.
`pack` packs at once, both orientations in one read if asked to; the result is plain memory that may be used more than
once and kept from the forward to the backward.

Every vector is cut into blocks of at most 512 values, and each block gets the scale that makes its norm 46300 and its
largest value at most 32767; csrc/kernels/matmul_quantise.h says why sums then can't overflow. A zero stays a zero. A
block with an infinity or a NaN makes all results of its vector NaN (fp32 gives NaN or an infinity for each of them).
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from cputrain import native
from cputrain.formats.stored import Stored
from cputrain.native.operands import address, contiguous, is_bf16, require, rows_of, saved_dtype

Role = Literal["left", "right"]
_STORED = 2  # kStoredSource of csrc/api.h
_ROLES = {"left": 0, "right": 1}
# As in csrc/kernels/matmul_layout.h and matmul_quantise.h.
_MOST, _NORM, _LARGEST, _UNIT = 512, 46300.0, 32767.0, 4096.0


class _Operand(ctypes.Structure):
    """Int16Operand of csrc/api.h."""

    _fields_ = [
        ("source", ctypes.c_void_p),
        ("kind", ctypes.c_int64),
        ("stride", ctypes.c_int64),
        ("by_columns", ctypes.c_int64),
        ("sums", ctypes.c_void_p),
        ("packed", ctypes.c_void_p),
    ]


class _Term(ctypes.Structure):
    """Int16Term of csrc/api.h."""

    _fields_ = [("left", _Operand), ("right", _Operand), ("depth", ctypes.c_int64)]


@dataclass(frozen=True)
class Operand:
    """`vectors` vectors of length `depth` for one side of a product: packed, or with the `source` to be packed from."""

    memory: Tensor
    vectors: int
    depth: int
    role: Role
    source: Tensor | Stored | None = None
    columns: bool = False
    sums: Tensor | None = None

    def _native(self) -> _Operand:
        memory, source = self._address(), self.source
        if source is None:
            return _Operand(None, 0, 0, 0, None, memory)
        if isinstance(source, Stored):
            weight = source.native()
            operand = _Operand(ctypes.addressof(weight), _STORED, source.cols, int(self.columns), None, memory)
            operand.weight = weight  # which lives as long
            return operand
        shape = (self.depth, self.vectors) if self.columns else (self.vectors, self.depth)
        place, stride = rows_of("int16 operand: x", source, shape, saved_dtype(source))
        sums = address("int16 operand: sums", self.sums, self.vectors)
        return _Operand(place, is_bf16(source), stride, int(self.columns), sums, memory)

    def _address(self) -> int | None:
        size = _packed_bytes(native.kernels().isa, self.vectors, self.depth, self.role)
        return address("int16 operand: packed memory", self.memory, size, torch.uint8)


@lru_cache(maxsize=4096)
def _packed_bytes(isa: str, vectors: int, depth: int, role: Role) -> int:
    size = ctypes.c_int64()
    native.kernels_of(isa).int16_packed_bytes(vectors, depth, _ROLES[role], ctypes.addressof(size))
    return size.value


def _memory(vectors: int, depth: int, role: Role) -> Tensor:
    return torch.empty(_packed_bytes(native.kernels().isa, vectors, depth, role), dtype=torch.uint8)


def _checked(x: Tensor, sums: Tensor | None = None) -> Tensor:
    if x.dim() != 2:
        raise ValueError(f"int16 operand: x must have two dimensions, found {x.dim()}; flatten the leading ones.")
    if x.dtype != torch.bfloat16 or not x.is_cpu:
        require("int16 operand", x.shape, x=x)
    require("int16 operand", x.shape[1:], sums=sums)
    if sums is not None and not sums.is_contiguous():
        raise ValueError("int16 operand: sums must be contiguous.")
    return x if x.shape[1] <= 1 or x.stride(1) == 1 else x.contiguous()


def by_rows(x: Tensor | Stored, role: Role) -> Operand:
    """The rows of `x` as vectors; packed when they are multiplied."""
    if isinstance(x, Stored):
        return Operand(_memory(x.rows, x.cols, role), x.rows, x.cols, role, x)
    x = _checked(x)
    rows, cols = x.shape
    return Operand(_memory(rows, cols, role), rows, cols, role, x)


def by_columns(x: Tensor | Stored, role: Role, sums: Tensor | None = None) -> Operand:
    """The columns of `x` as vectors; packed when they are multiplied. `sums` receives their sums then."""
    if isinstance(x, Stored):
        return Operand(_memory(x.cols, x.rows, role), x.cols, x.rows, role, x, True)
    x = _checked(x, sums)
    rows, cols = x.shape
    return Operand(_memory(cols, rows, role), cols, rows, role, x, True, sums)


def pack(
    x: Tensor, rows: Role | None = None, columns: Role | None = None, sums: Tensor | None = None
) -> tuple[Operand | None, Operand | None]:
    """`x` packed by its rows, by its columns, or both; `sums` receives the column sums (a bias gradient)."""
    if (rows is None and columns is None) or (sums is not None and columns is None):
        raise ValueError("pack: give rows or columns a role ('left' or 'right'); sums need columns.")
    x = _checked(x, sums)
    count, width = x.shape
    row_operand = Operand(_memory(count, width, rows), count, width, rows) if rows else None
    column_operand = Operand(_memory(width, count, columns), width, count, columns) if columns else None
    place, stride = rows_of("int16 operand: x", x, (count, width), saved_dtype(x))
    native.kernels().int16_pack(
        *(place, is_bf16(x), stride, count, width),
        *(row_operand and row_operand._address(), _ROLES[rows or "left"]),
        *(column_operand and column_operand._address(), _ROLES[columns or "left"]),
        address("int16 operand: sums", sums, width),
    )
    return row_operand, column_operand


def pack_activated(h: Tensor, bias: Tensor | None, activation: int) -> Operand:
    """The rows of activation(h + bias) for the left side; they are packed as they are computed, and never written.

    `activation` is its number in csrc/kernels/activation.h.
    """
    require("pack_activated", h.shape, h=h)
    h = _checked(h)
    (bias,), (rows, cols) = contiguous(bias), h.shape
    operand = Operand(_memory(rows, cols, "left"), rows, cols, "left")
    place, stride = rows_of("pack_activated: h", h, (rows, cols))
    bias_place = address("pack_activated: bias", bias, cols)
    native.kernels().int16_pack_activated(place, bias_place, activation, stride, rows, cols, operand._address())
    return operand


def product(
    left: Operand,
    right: Operand,
    out: Tensor | None = None,
    bias: Tensor | None = None,
    accumulate: bool = False,
    plus: tuple[Operand, Operand] | None = None,
) -> Tensor:
    """out[r, c] = left vector r · right vector c (+ the same of `plus`) (+ bias[c]) (+ out[r, c] if `accumulate`)."""
    _check_sides(left, right)
    if plus is not None:
        _check_sides(*plus)
        if (plus[0].vectors, plus[1].vectors) != (left.vectors, right.vectors) or left.columns:
            raise ValueError("product: what is added must have the same vectors, and the left side be packed by rows.")
    if out is None:
        if accumulate:
            raise ValueError("product: accumulate needs an `out` to add to.")
        out = torch.empty(left.vectors, right.vectors, dtype=torch.float32)
    require("product", (right.vectors,), bias=bias)
    place, stride = rows_of("product: out", out, (left.vectors, right.vectors))
    if stride < right.vectors and left.vectors > 1:
        raise ValueError(f"product: the rows of out overlap, {stride} apart.")
    (bias,), sides = contiguous(bias), (left._native(), right._native())
    term = None if plus is None else _Term(plus[0]._native(), plus[1]._native(), plus[0].depth)
    native.kernels().int16_product(
        *(ctypes.addressof(sides[0]), ctypes.addressof(sides[1]), place, stride),
        *(left.vectors, right.vectors, left.depth),
        None if term is None else ctypes.addressof(term),
        *(address("product: bias", bias, right.vectors), int(accumulate)),
    )
    return out


def _check_sides(left: Operand, right: Operand) -> None:
    if left.depth != right.depth or (left.role, right.role) != ("left", "right"):
        raise ValueError(
            f"product: needs a left and a right operand of one depth, found {left.role} of depth {left.depth} and "
            f"{right.role} of depth {right.depth}."
        )


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
    left = by_columns(dy_TO, "left", sums=bias_grad)
    return product(left, by_columns(x_TI, "right"), out=out, accumulate=accumulate)


def block_depth(depth: int) -> int:
    """How many values of a vector share a scale."""
    blocks = max(math.ceil(depth / _MOST), 1)
    return math.ceil(math.ceil(depth / blocks) / 32) * 32


def quantise(vectors: Tensor, scales: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """What packing does to the rows of `vectors`: integers (as float64) and a scale for each row and block.

    An integer times its scale / 4096 is the value again. `scales` are the kernel's own, if its results are to be
    reproduced to the last bit: sums of squares depend on their order.
    """
    blocks = [block.float() for block in vectors.split(max(block_depth(vectors.shape[1]), 1), dim=1)]
    results = [_quantise_block(block, None if scales is None else scales[:, i]) for i, block in enumerate(blocks)]
    values, found = zip(*results, strict=True)
    return torch.cat(values, dim=1), torch.stack(found, dim=1)


def _quantise_block(block: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    largest = block.abs().amax(dim=1)
    before = torch.where((largest < 1e-15) & (largest > 0), 2.0**100, 1.0)
    before = torch.where((largest > 1e17) & largest.isfinite(), 2.0**-100, before)
    if scale is None:
        norm = block.double().norm(dim=1) * (_UNIT / _NORM)
        scale = torch.maximum(norm, largest.double() * (_UNIT / _LARGEST)).float()
    scale = torch.where(block.isfinite().all(dim=1), scale, torch.nan)
    factor = torch.where(scale > 0, _UNIT / (scale * before), 0.0)
    values = (block * before[:, None] * factor[:, None]).round()
    return torch.where(scale.isfinite()[:, None], values, 0.0).double(), scale


def plain(
    left: Tensor,
    right: Tensor,
    bias: Tensor | None = None,
    start: Tensor | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """`product` of the rows of `left` and `right` in PyTorch, bit for bit if given the kernel's `scales`."""
    left_values, left_scales = quantise(left, scales[0] if scales else None)
    right_values, right_scales = quantise(right, scales[1] if scales else None)
    depth = max(block_depth(left.shape[1]), 1)
    out = torch.zeros(left.shape[0], right.shape[0]) if start is None else start.clone()
    out = out if bias is None else out + bias
    pairs = zip(left_values.split(depth, dim=1), right_values.split(depth, dim=1), strict=True)
    for i, (a, b) in enumerate(pairs):
        sums = (a @ b.t()).float()  # integers below 2³¹: exact in float64, rounded once
        out = sums * 2.0**-24 * left_scales[:, i, None] * right_scales[None, :, i] + out
    return out
