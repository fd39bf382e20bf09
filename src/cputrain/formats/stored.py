"""Frozen weights as they are stored: fp16, or numbers of 4 or 8 bits with their scales.

A product unpacks them on their way into its panels (csrc/kernels/matmul_stored.h), so that they never exist as floats;
formats whose products are torch's get them unpacked, in a workspace.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cputrain import native
from cputrain.native import workspace
from cputrain.native.operands import address

_FLOAT16, _FOUR_BITS, _EIGHT_BITS = range(3)  # StoredKind of csrc/api.h
FEWEST_IN_BLOCK = 16  # elements that share a scale: smaller blocks would be all overhead, and exist nowhere


class _StoredWeight(ctypes.Structure):
    """StoredWeight of csrc/api.h."""

    _fields_ = [
        ("kind", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("values", "code", "scales", "nested", "nested_scales")),
        *((name, ctypes.c_int64) for name in ("block", "nested_block")),
        ("nested_offset", ctypes.c_float),
        *((name, ctypes.c_int64) for name in ("first", "first_row")),
    ]


@dataclass(frozen=True)
class Nested:
    """Scales that are bytes: `code[byte] · scales[number // block] + offset`."""

    code: Tensor  # 256
    scales: Tensor
    block: int
    offset: float


@dataclass(frozen=True)
class Stored:
    """A matrix out × in, of which `first_row` … are used."""

    kind: int
    values: Tensor
    rows: int
    cols: int
    scales: Tensor | None = None
    code: Tensor | None = None
    block: int = 1
    nested: Nested | None = None
    first_row: int = 0

    def part(self, rows: slice) -> Stored:
        return replace(self, first_row=self.first_row + rows.start, rows=rows.stop - rows.start)

    def native(self) -> _StoredWeight:
        """What the kernels read; every size is checked here."""
        last = (self.first_row + self.rows) * self.cols
        nested = self.nested
        return _StoredWeight(
            self.kind,
            self._values(last),
            address("4-bit weight: code", self.code, 16),
            self._scales(last),
            None if nested is None else address("4-bit weight: code of its scales", nested.code, 256),
            None
            if nested is None
            else address("4-bit weight: scales of its scales", nested.scales, nested.scales.numel()),
            *(self.block, 1 if nested is None else nested.block, 0.0 if nested is None else nested.offset),
            *(self.first_row * self.cols, self.first_row),
        )

    def _values(self, count: int) -> int | None:
        dtype = {_FLOAT16: torch.float16, _FOUR_BITS: torch.uint8, _EIGHT_BITS: torch.int8}[self.kind]
        needed = (count + 1) // 2 if self.kind == _FOUR_BITS else count
        if self.values.numel() < needed:
            raise ValueError(f"a stored weight has {self.values.numel()} values, {needed} are needed.")
        return address("stored weight: values", self.values, self.values.numel(), dtype)

    def _scales(self, count: int) -> int | None:
        if self.scales is None:
            return None
        needed = self.first_row + self.rows if self.kind == _EIGHT_BITS else -(-count // self.block)
        if self.scales.numel() < needed or (self.nested and self.nested.scales.numel() * self.nested.block < needed):
            raise ValueError(f"a stored weight has {self.scales.numel()} scales, {needed} are needed.")
        dtype = torch.float32 if self.nested is None else torch.uint8
        return address("stored weight: scales", self.scales, self.scales.numel(), dtype)

    def unpacked(self, out: Tensor | None = None) -> Tensor:
        """All of it as floats."""
        out = torch.empty(self.rows, self.cols, dtype=torch.float32) if out is None else out
        weight = self.native()
        place = address("stored weight: out", out, self.rows * self.cols)
        native.kernels().unpack_weight(ctypes.addressof(weight), place, self.rows, self.cols)
        return out

    def in_workspace(self) -> Tensor:
        """The same, to be read before the next call."""
        return self.unpacked(workspace.floats("stored_weight", self.rows, self.cols))


def float16(w_OI: Tensor) -> Stored:
    rows, cols = w_OI.shape
    return Stored(_FLOAT16, w_OI.contiguous(), rows, cols)


def four_bits(
    values: Tensor, shape: tuple[int, int], code: Tensor, scales: Tensor, block: int, nested: Nested | None = None
) -> Stored:
    """Two numbers in a byte of `values`, the first in its high half; `block` numbers of the flattened matrix share one
    of the scales."""
    return Stored(_FOUR_BITS, values, *shape, scales, code, block, nested)


def eight_bits(values: Tensor, scales: Tensor) -> Stored:
    """Signed bytes, each row with its scale."""
    rows, cols = values.shape
    return Stored(_EIGHT_BITS, values, rows, cols, scales)
