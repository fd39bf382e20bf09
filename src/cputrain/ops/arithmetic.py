"""In which number format a layer's products run, how its activations are kept, and a look at whether that is exact.

fp32   products in fp32, activations kept as they are.
int16  products of block-scaled 16-bit integers (ops/matmul.py), activations kept in fp32 or as they were packed.
bf16   products in fp32, what is kept from the forward to the backward rounded to bf16 (attention's output excepted):
       half the memory on any CPU, and never the emulation of bf16 products, ten times slower than fp32.
native_bf16   all that is kept is bf16, and so are the products' operands: for CPUs that multiply bf16 themselves.

An int16 product loses what is small beside the largest values of its block; nearly always that is far less than bf16
loses everywhere. A layer where it is not (huge outliers that the other operand cancels) is found by a look at a sample
of each product every so often (int16_sample.py), and returns to fp32. It does so between steps: a checkpoint computes a
forward again in the backward, and raises an error if that keeps other tensors than the first time.
"""

from __future__ import annotations

import logging
import threading
import weakref
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from cputrain import native
from cputrain.ops import workspace
from cputrain.ops.int16_sample import SAMPLE as SAMPLE
from cputrain.ops.int16_sample import sampled_columns, sampled_error, sampled_rows
from cputrain.ops.operands import address, rows_and_cols

logger = logging.getLogger("cputrain")

Kind = Literal["fp32", "int16", "bf16", "native_bf16"]

# What is kept of a product's input, nothing if its weight needs no gradient. In bf16: numbers as bf16, and two rows of
# floats by which they are multiplied and added to. A LayerNorm's result and its backward then need one and the same.
Kept = tuple[Tensor, ...]

_STORAGE = {"bf16": torch.bfloat16, "native_bf16": torch.bfloat16}

# A look multiplies a few vectors of each side: milliseconds, once in so many forwards of a layer. A prime number: of a
# layer that runs 12 times in a model's forward, or has two operators, each has its turn.
LOOK_EVERY = 251


# Set while a module is only asked what it computes: in fp32, and what happens then is nobody's concern.
probing: ContextVar[bool] = ContextVar("cputrain_probing", default=False)


@dataclass
class Arithmetic:
    """How one layer computes, and what the looks at its products found."""

    kind: Kind = "fp32"
    forwards: int = 0  # those inside a backward don't count
    trouble: str | None = None  # why its products return to fp32 …
    returned: bool = False  # … and whether they have
    _gradients_due: bool = field(default=False, compare=False)  # a forward was looked at, its gradients were not
    _backward_ran: bool = field(default=False, compare=False)  # since the last forward
    # Calls whose backward hasn't run. The graph holds its calls: one that no graph was made for is gone at once.
    _open: weakref.WeakSet[Call] = field(default_factory=weakref.WeakSet, compare=False, repr=False)

    def __deepcopy__(self, memo: dict) -> Arithmetic:
        return Arithmetic(self.kind, self.forwards, self.trouble, self.returned)

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
        if self.kind != "int16":
            return Call(self.kind)
        if torch._C._current_graph_task_id() != -1:
            return self._begin_inside_a_backward()
        if self.trouble and not self.returned:
            self.returned = not any(map(self._may_be_computed_again, self._open))
        looks = self.trouble is None and self.forwards % LOOK_EVERY == 0
        self._gradients_due |= looks
        # An evaluation may take a look and has no gradients: then the next forward that is trained on has its turn.
        notes = looks or (self._gradients_due and self._backward_ran)
        call = Call(self._kind_now(), self, looks, notes, self.forwards // LOOK_EVERY, _saved_tensors_have_hooks())
        self.forwards += 1
        self._backward_ran = False
        self._open.add(call)
        return call

    def _begin_inside_a_backward(self) -> Call:
        """A checkpoint computes a forward again: in the kind of the first time, neither counted nor looked at.

        After a reentrant checkpoint, it is this call that has the backward, so that it looks at the gradients.
        """
        look = max(self.forwards - 1, 0) // LOOK_EVERY
        return Call(self._kind_now(), self, False, self._gradients_due, look)

    def _kind_now(self) -> Kind:
        return "fp32" if self.returned else "int16"

    def _may_be_computed_again(self, call: Call) -> bool:
        """Once a backward has run, calls without hooks count no more: perhaps nobody wants their gradients."""
        return call.has_hooks or not self._backward_ran

    def begin_backward(self, call: Call) -> bool:
        """Whether that call is to look at its gradients: one of those that could."""
        self._open.discard(call)
        self._backward_ran = True
        looks = call.notes and self._gradients_due and self.trouble is None
        self._gradients_due &= not looks
        return looks

    def judge(self, what: str, error: float, bound: float) -> None:
        if error > bound and self.trouble is None:
            self.trouble = f"in a sample of {what} int16 was off by {error:.1e} of the result, bf16 by less"
            logger.warning("a layer's products return to fp32: %s", self.trouble)


def _saved_tensors_have_hooks() -> bool:
    """As inside a checkpoint that isn't reentrant: it keeps nothing, and computes it again."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


@dataclass(eq=False)
class Call:
    """One forward of a layer, and its backward."""

    kind: Kind
    arithmetic: Arithmetic | None = None
    looks: bool = False  # at the products that come now: the forward's, then the gradients'
    notes: bool = False  # what a look at its gradients would need
    look: int = 0  # the number of the look, from which the places follow
    has_hooks: bool = False
    _in_backward: bool = False
    # Columns of inputs of which only the packed form is kept: a look at the weight's gradient needs them. Copies of a
    # few columns, now and then; not part of the graph. A backward uses inputs in the reverse order of their noting.
    _columns: list[Tensor] = field(default_factory=list)

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

    def begin_backward(self) -> None:
        """To be called with every gradient of an output; the first is the beginning."""
        if self.arithmetic is not None and not self._in_backward:
            self._in_backward = True
            self.looks = self.notes = self.arithmetic.begin_backward(self)

    def note_columns(self, x_TI: Tensor) -> None:
        if self.notes and x_TI.numel():
            self._columns.append(sampled_columns(x_TI, self.look, "right"))

    def look_at_rows(self, what: str, x_TI: Tensor, w: Tensor, transposed: bool = False) -> None:
        """Samples the product of the rows of x with those of w (or with its columns)."""
        if self.looks and x_TI.numel() and w.numel():
            sampled = sampled_columns if transposed else sampled_rows
            self._look(what, sampled_rows(x_TI, self.look, "left"), sampled(w, self.look, "right"))

    def look_at_columns(self, what: str, dy_TO: Tensor) -> None:
        """Samples the product of the columns of dy with those of the input that was noted last."""
        if self.looks and self._columns and dy_TO.numel():
            self._look(what, sampled_columns(dy_TO, self.look, "left"), self._columns.pop())

    def _look(self, what: str, left: Tensor, right: Tensor) -> None:
        assert self.arithmetic is not None
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            self.arithmetic.judge(what, *sampled_error(left.detach(), right.detach()))


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
    rows, cols = rows_and_cols(x_TO)
    native.kernels().round_to_bf16(
        address("rounded: x", x_TO, rows * cols),
        address("rounded: bias", bias_O, cols),
        address("rounded: out", out, rows * cols, torch.bfloat16),
        *(rows, cols),
    )
    return out


def kept_as_float(kept: Kept) -> Tensor:
    """To be used at once: what was kept as bf16 is spread out in a workspace."""
    if len(kept) == 1:
        return kept[0]
    kept_TI, (factor_I, offset_I) = kept
    out = workspace.floats("kept", *kept_TI.shape)
    rows, cols = rows_and_cols(kept_TI)
    native.kernels().read_bf16(
        address("what was kept", kept_TI, rows * cols, torch.bfloat16),
        address("its factor", factor_I, cols),
        address("its offset", offset_I, cols),
        address("its place in the workspace", out, rows * cols),
        *(rows, cols),
    )
    return out
