"""In which number format a layer's products run, how its activations are kept, and a look at whether that is exact.

fp32   products in fp32, activations kept as they are.
int16  products of block-scaled 16-bit integers (ops/matmul.py), activations kept in fp32 or as they were packed.
bf16   products in fp32, what is kept from the forward to the backward rounded to bf16 (attention's output excepted):
       half the memory on any CPU, and never the emulation of bf16 products, ten times slower than fp32.
native_bf16   all that is kept is bf16, and so are the products' operands: for CPUs that multiply bf16 themselves.

An int16 product loses what is small beside the largest values of its block; nearly always that is far less than bf16
loses everywhere. A layer where it is not (huge outliers that the other operand cancels) is found by a look at a sample
of each product every so often, and computes in fp32 from its next forward on.
"""

from __future__ import annotations

import logging
import threading
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from cputrain import native
from cputrain.ops import matmul, workspace
from cputrain.ops.operands import address, rows_and_cols

logger = logging.getLogger("cputrain")

Kind = Literal["fp32", "int16", "bf16", "native_bf16"]

# What is kept of a product's input, nothing if its weight needs no gradient. In bf16: numbers as bf16, and two rows of
# floats by which they are multiplied and added to. A LayerNorm's result and its backward then need one and the same.
Kept = tuple[Tensor, ...]

_STORAGE = {"bf16": torch.bfloat16, "native_bf16": torch.bfloat16}

# A look multiplies 16 vectors of each side: well under a millisecond, once in so many forwards of a layer.
LOOK_EVERY, SAMPLE = 256, 16
# bf16 has 8 significant bits: a result that is closer than half a unit of the last is as good, whatever bf16 would do.
TOLERATED = 2.0**-9


# Set while a module is only asked what it computes: in fp32, and what happens then is nobody's concern.
probing: ContextVar[bool] = ContextVar("cputrain_probing", default=False)


@dataclass
class Arithmetic:
    """How one layer computes, and what was found when somebody looked."""

    kind: Kind = "fp32"
    forwards: int = 0
    trouble: str | None = None  # why its products returned to fp32

    def __deepcopy__(self, memo: dict) -> Arithmetic:
        return Arithmetic(self.kind, self.forwards, self.trouble)

    def __reduce__(self) -> tuple:
        return type(None), ()  # a pickled model is loaded as stock, even where cputrain isn't installed

    @property
    def storage(self) -> torch.dtype:
        """The type of what is kept from a forward to its backward."""
        return _STORAGE.get(self.kind, torch.float32)

    def begin(self) -> Call:
        """To be asked once in each forward; the backward belongs to the same call."""
        if probing.get():
            return Call("fp32")
        looks = self.kind == "int16" and self.trouble is None and self.forwards % LOOK_EVERY == 0
        self.forwards += 1
        return Call("fp32" if self.trouble else self.kind, self if looks else None, self.forwards)


@dataclass
class Call:
    """One forward of a layer, and its backward."""

    kind: Kind
    watched: Arithmetic | None = None
    number: int = 0
    # Columns of inputs of which only the packed form is kept, by where that lies: what a look at the weight's gradient
    # needs. Copies of a few columns, now and then; not part of the graph.
    _columns: dict[int, Tensor] = field(default_factory=dict)

    @property
    def storage(self) -> torch.dtype:
        """As the arithmetic's, but fp32 while somebody probes."""
        return _STORAGE.get(self.kind, torch.float32)

    def keep(self, x_TI: Tensor) -> Kept:
        """What is kept of x for the backward; in bf16 `kept_as_float` reads it.

        How many tensors, and of which types, is a question of the kind alone: a checkpoint that runs the forward again
        expects what it found before.
        """
        if self.kind not in _STORAGE:
            return (x_TI,)
        kept = _last.kept_of(x_TI, rounded_only=self.kind == "native_bf16")
        if kept is None:
            rounded = x_TI.to(torch.bfloat16, memory_format=torch.contiguous_format)
            kept = rounded, affine_of(None, None, x_TI.shape[-1])
            _last.note(x_TI, kept, rounded=True)
        return kept if self.kind == "bf16" else kept[:1]

    def note_columns(self, kept: Tensor, x_TI: Tensor) -> None:
        if self.watched is not None:
            self._columns[kept.data_ptr()] = x_TI[:, self._spread(x_TI.shape[1])].t().contiguous()

    def look_at_rows(self, what: str, x_TI: Tensor, w: Tensor, transposed: bool = False) -> None:
        """Samples the product of the rows of x with those of w (or with its columns)."""
        if self.watched is not None and x_TI.numel() and w.numel():
            right = w[:, self._spread(w.shape[1])].t() if transposed else w[self._spread(w.shape[0])]
            self._look(what, x_TI[self._spread(x_TI.shape[0])], right)

    def look_at_columns(self, what: str, dy_TO: Tensor, kept: Tensor) -> None:
        columns = self._columns.get(kept.data_ptr())
        if self.watched is not None and columns is not None and dy_TO.numel():
            self._look(what, dy_TO[:, self._spread(dy_TO.shape[1])].t(), columns)

    def _spread(self, count: int) -> Tensor:
        """A few places in 0 … count - 1, far apart, others in another call; nobody's random numbers are used."""
        return (torch.arange(min(SAMPLE, count)) * max(count // SAMPLE, 1) + self.number) % count

    def _look(self, what: str, left: Tensor, right: Tensor) -> None:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            error, bound = sampled_error(left.detach(), right.detach())
        assert self.watched is not None
        if error > bound and self.watched.trouble is None:
            self.watched.trouble = f"in a sample of {what} int16 was off by {error:.1e} of the result, bf16 by less"
            logger.warning("a layer's products return to fp32: %s", self.watched.trouble)


FP32 = Arithmetic()


class _Last(threading.local):
    """What was kept last: the output of one operator is the input of the next, and both keep it."""

    source: Tensor | None = None  # held, so that nothing else can lie in its place
    version = 0
    kept: tuple[Tensor, Tensor]
    rounded = False  # kept[0] is the source itself, rounded

    def note(self, source: Tensor, kept: tuple[Tensor, Tensor], rounded: bool) -> None:
        if source.is_contiguous() and not source.is_inference():
            self.source = source.detach()  # not the source itself, which will hold the graph
            self.version, self.kept, self.rounded = source._version, kept, rounded

    def kept_of(self, x: Tensor, rounded_only: bool) -> tuple[Tensor, Tensor] | None:
        source = self.source
        if source is None or source.data_ptr() != x.data_ptr() or source.numel() != x.numel():
            return None
        if source._version != self.version or not x.is_contiguous() or x.dtype != source.dtype:
            return None
        if source.shape[-1:] != x.shape[-1:] or rounded_only > self.rounded:
            return None
        kept, affine = self.kept
        return kept.view(x.shape), affine


_last = _Last()


def note_normed(out_TI: Tensor, normed_TI: Tensor, weight_I: Tensor | None, bias_I: Tensor | None) -> None:
    """Whoever keeps `out`, a LayerNorm's result, keeps what its backward keeps: out = normed · weight + bias."""
    _last.note(out_TI, (normed_TI, affine_of(weight_I, bias_I, out_TI.shape[-1])), rounded=False)


def affine_of(weight_I: Tensor | None, bias_I: Tensor | None, features: int) -> Tensor:
    """Copies of both, 2 × I: another module's parameters may be gone by the backward (fully_shard)."""
    weight_I = torch.ones(features) if weight_I is None else weight_I.detach()
    return torch.stack((weight_I, torch.zeros(features) if bias_I is None else bias_I.detach()))


def rounded(x_TO: Tensor, bias_O: Tensor | None) -> Tensor:
    """bf16 of x + bias, in one pass."""
    out = torch.empty_like(x_TO, dtype=torch.bfloat16)
    native.kernels().round_to_bf16(address(x_TO), address(bias_O), address(out), *rows_and_cols(x_TO))
    return out


def kept_as_float(kept: Kept) -> Tensor:
    """To be used at once: what was kept as bf16 is spread out in a workspace."""
    if len(kept) == 1:
        return kept[0]
    kept_TI, (factor_I, offset_I) = kept
    out = workspace.floats("kept", *kept_TI.shape)
    native.kernels().read_bf16(*map(address, (kept_TI, factor_I, offset_I, out)), *rows_and_cols(kept_TI))
    return out


def sampled_error(left: Tensor, right: Tensor) -> tuple[float, float]:
    """(error of the int16 product of these vectors, the most that is tolerated), relative to the result's norm."""
    exact = left.double() @ right.double().t()
    size = exact.norm().item()
    if not torch.finfo(torch.float32).tiny < size < float("inf"):
        return 0.0, TOLERATED  # nothing that fp32 would not lose, or infinities that it has too
    found = matmul.linear_forward(left.contiguous(), right.contiguous())
    bf16 = left.bfloat16().double() @ right.bfloat16().double().t()
    error, usual = ((y.double() - exact).norm().item() / size for y in (found, bf16))
    return error, max(usual, TOLERATED)
