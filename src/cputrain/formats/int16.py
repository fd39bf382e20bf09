"""int16: products of block-scaled 16-bit integers (int16_matmul.py), watched by a guard (int16_guard.py).

What is saved of an input is its columns as they were packed for the weight's gradient, at half its size; raw outputs of
feed-forwards, joined queries, keys and values, and norms' inputs are saved as 16-bit integers, too (int16_saving.py).
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from cputrain import native
from cputrain.formats import int16_matmul as matmul
from cputrain.formats import int16_saving
from cputrain.formats.base import Activated, Call, Format, OutputGrad, Saved, Use, probing
from cputrain.formats.fp32 import FP32
from cputrain.formats.int16_guard import Guard, Watch
from cputrain.formats.stored import Stored
from cputrain.formats.weights import Weight
from cputrain.native import workspace
from cputrain.native.operands import underlying

# A vocabulary's weight is packed and multiplied in parts: packed at once, it would take half its size once more, and
# so would the gradient of its logits. On an AMD Zen 4, parts of 8,192 also save 5 – 12% of the whole's CPU time.
_PART, _FEWEST = 8192, 16384


def _parts(out_features: int) -> list[slice]:
    width = out_features if out_features < _FEWEST else _PART
    return [slice(begin, min(begin + width, out_features)) for begin in range(0, out_features, max(width, 1))]


def _of(panels: Tensor | Stored, part: slice) -> Tensor | Stored:
    return panels[part] if isinstance(panels, Tensor) else panels.part(part)


class _Latest:
    """The input that a thread packed last: query, key and value, or gate and up, are products of one tensor.

    It is known by the tensor itself and its version. Its panels are held until the next is packed.
    """

    source: weakref.ref[Tensor] | None = None
    known: tuple[int, torch.Size, str] | None = None  # its version, its shape, and whose instruction set the panels are
    rows: matmul.Operand
    columns: matmul.Operand | None = None

    def packed(self, x: Tensor, want_columns: bool) -> tuple[matmul.Operand, matmul.Operand | None]:
        source = underlying(x)
        known = (0 if source is None else x._version, x.shape, native.kernels().isa)
        if source is None or self.source is None or self.source() is not source or self.known != known:
            return self._pack(x, want_columns, source, known)
        if want_columns and self.columns is None:
            self.columns = matmul.pack(x, columns="right")[1]
        return self.rows, self.columns if want_columns else None

    def _pack(
        self, x: Tensor, want_columns: bool, source: Tensor | None, known: tuple[int, torch.Size, str]
    ) -> tuple[matmul.Operand, matmul.Operand | None]:
        rows, columns = matmul.pack(x, rows="left", columns="right" if want_columns else None)
        assert rows is not None
        self.source = None if source is None else weakref.ref(source)
        if source is not None:
            self.known, self.rows, self.columns = known, rows, columns
        return rows, columns


class Int16(Format):
    name = "int16"
    overrules_autocast = True

    def __init__(self, guard: Guard | None = None) -> None:
        self.guard = guard or Guard()

    @property
    def fallback(self) -> str | None:
        return self.guard.trouble

    def __deepcopy__(self, memo: dict) -> Int16:
        return Int16(self.guard.copy())

    def keep(self, x_TI: Tensor) -> Tensor:
        return x_TI if probing.get() else int16_saving.rounded(x_TI)

    def remembered(self) -> dict[str, Any]:
        return self.guard.remembered()

    def remember(self, found: dict[str, Any]) -> None:
        self.guard.remember(found)

    def start(self) -> Call:
        watch = self.guard.begin()
        return Int16Call(watch) if watch.is_int16 else _Fp32Call(watch)


class Int16Call(Call):
    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def beside(self) -> Call:
        """One part's products are watched: as many looks as in any other layer."""
        return Int16Call(Watch())

    def product(self, x: Tensor, weight: Weight, bias: Tensor | None, use: Use) -> tuple[Tensor, Saved]:
        rows, columns = workspace.object_of_thread("input packed last", _Latest).packed(x, use.save)
        out = workspace.floats(use.until_kept, x.shape[0], weight.out_features) if use.until_kept else use.out
        y = self._product(rows, weight, bias, out, use.plus)
        if self.watch.looks:
            self.watch.look_at_rows("a forward product", x, weight.looked_at())
        return y, () if columns is None else self._saved(x, columns)

    def forward_activated(
        self, x: Activated, weight: Weight, bias: Tensor | None, *, scratch: str = ""
    ) -> tuple[Tensor, Tensor]:
        y = self._product(x.packed(), weight, bias)
        if self.watch.looks:
            self.watch.look_at_rows("a forward product", x.values()[0], weight.looked_at())
        return y, self.keep(x.h)

    def keep(self, y_TM: Tensor) -> Tensor:
        return int16_saving.rounded(y_TM)

    @staticmethod
    def _product(
        rows: matmul.Operand,
        weight: Weight,
        bias_O: Tensor | None,
        out: Tensor | None = None,
        plus: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        y = torch.empty(rows.vectors, weight.out_features, dtype=torch.float32) if out is None else out
        panels = weight.panels()
        for part in _parts(weight.out_features):
            bias = None if bias_O is None else bias_O[part]
            term = None if plus is None else (matmul.by_rows(plus[0], "left"), matmul.by_rows(plus[1][part], "right"))
            matmul.product(rows, matmul.by_rows(_of(panels, part), "right"), out=y[:, part], bias=bias, plus=term)
        return y

    def save_input(self, x_TI: Tensor) -> Saved:
        _, columns = matmul.pack(x_TI, columns="right")
        assert columns is not None
        return self._saved(x_TI, columns)

    def _saved(self, x_TI: Tensor, columns: matmul.Operand) -> Saved:
        self.watch.note_columns(x_TI)
        return (columns.memory,)

    def output_grad(self, dy_TO: Tensor, *, weight: bool, bias: bool = False) -> OutputGrad:
        self.watch.begin_backward()
        return _OutputGrad(dy_TO, self.watch, weight, bias)


class _OutputGrad(OutputGrad):
    """Each product packs dy on its way, and the weight's sums the bias' gradient."""

    def __init__(self, dy_TO: Tensor, watch: Watch, weight: bool, bias: bool) -> None:
        self.dy, self._watch = dy_TO, watch
        self.bias = None if not bias else dy_TO.new_empty(dy_TO.shape[1]) if weight else dy_TO.sum(0)

    def input(self, weight: Weight, *, add_to: Tensor | None = None, scratch: str = "") -> Tensor:
        panels, out = weight.panels(), add_to
        if self._watch.looks:
            self._watch.look_at_rows("an input gradient", self.dy, weight.looked_at(), transposed=True)
        if out is None:
            shape = self.dy.shape[0], weight.in_features
            out = workspace.floats(scratch, *shape) if scratch else self.dy.new_empty(shape)
        for part in _parts(weight.out_features):
            left, right = matmul.by_rows(self.dy[:, part], "left"), matmul.by_columns(_of(panels, part), "right")
            matmul.product(left, right, out=out, accumulate=add_to is not None or part.start > 0)
        return out

    def matrix(self, in_features: int, saved: Saved, *, add_to: Tensor | None = None) -> Tensor:
        self._watch.look_at_columns("a weight gradient", self.dy)
        right = matmul.Operand(saved[0], in_features, self.dy.shape[0], "right")
        dw = self.dy.new_empty(self.dy.shape[1], in_features) if add_to is None else add_to
        for part in _parts(dw.shape[0]):
            sums = None if self.bias is None else self.bias[part]
            left = matmul.by_columns(self.dy[:, part], "left", sums=sums)
            matmul.product(left, right, out=dw[part], accumulate=add_to is not None)
        return dw


class _Fp32Call(Call):
    """A layer that int16 spoils computes in fp32; its guard still hears of its backward."""

    def __init__(self, watch: Watch) -> None:
        self.watch, self._call = watch, FP32.start()

    def product(self, x: Tensor, weight: Weight, bias: Tensor | None, use: Use) -> tuple[Tensor, Saved]:
        return self._call.product(x, weight, bias, use)

    def save_input(self, x_TI: Tensor) -> Saved:
        return self._call.save_input(x_TI)

    def output_grad(self, dy_TO: Tensor, *, weight: bool, bias: bool = False) -> OutputGrad:
        self.watch.begin_backward()
        return self._call.output_grad(dy_TO, weight=weight, bias=bias)
