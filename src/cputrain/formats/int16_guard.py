"""Whether int16 is exact enough for a layer: a look at a sample of each product every so often.

An int16 product loses what is small beside the largest values of its block; nearly always that is far less than bf16
loses everywhere. A layer where it is not (huge outliers that the other operand cancels) is found by its looks
(int16_sample.py), and returns to fp32. It does so between steps: a checkpoint computes a forward again in the backward,
and raises an error if that saves other tensors than the first time.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cputrain.formats.int16_sample import sampled_columns, sampled_error, sampled_rows
from cputrain.log import logger

# A look multiplies a few vectors of each side: milliseconds, once in so many forwards of a layer. A prime number: of a
# layer that runs 12 times in a model's forward, or has two operators, each has its turn.
LOOK_EVERY = 251
# What decides when the next look is due, and what becomes of it.
_REMEMBERED = ("forwards", "trouble", "returned", "_gradients_due", "_backward_ran")


@dataclass
class Guard:
    """What the looks at one layer's products found."""

    forwards: int = 0  # those inside a backward don't count
    trouble: str | None = None  # why its products return to fp32 …
    returned: bool = False  # … and whether they have
    _gradients_due: bool = field(default=False, compare=False)  # a forward was looked at, its gradients were not
    _backward_ran: bool = field(default=False, compare=False)  # since the last forward
    # Calls whose backward hasn't run. The graph holds its calls: one that no graph was made for is gone at once.
    _open: weakref.WeakSet[Watch] = field(default_factory=weakref.WeakSet, compare=False, repr=False)

    def copy(self) -> Guard:
        return Guard(self.forwards, self.trouble, self.returned)

    def remembered(self) -> dict[str, Any]:
        """Between two steps: no call is open."""
        return {name: getattr(self, name) for name in _REMEMBERED}

    def remember(self, found: dict[str, Any]) -> None:
        for name in _REMEMBERED:
            setattr(self, name, found[name])

    def begin(self) -> Watch:
        """Of one forward and its backward."""
        if torch._C._current_graph_task_id() != -1:
            return self._begin_inside_a_backward()
        if self.trouble and not self.returned:
            self.returned = not any(map(self._may_be_computed_again, self._open))
        looks = self.trouble is None and self.forwards % LOOK_EVERY == 0
        self._gradients_due |= looks
        # An evaluation may take a look and has no gradients: then the next forward that is trained on has its turn.
        notes = looks or (self._gradients_due and self._backward_ran)
        watch = Watch(self, not self.returned, looks, notes, self.forwards // LOOK_EVERY, _saved_tensors_have_hooks())
        self.forwards += 1
        self._backward_ran = False
        self._open.add(watch)
        return watch

    def _begin_inside_a_backward(self) -> Watch:
        """A checkpoint computes a forward again: in the format of the first time, neither counted nor looked at.

        After a reentrant checkpoint, it is this call that has the backward, so that it looks at the gradients.
        """
        look = max(self.forwards - 1, 0) // LOOK_EVERY
        return Watch(self, not self.returned, False, self._gradients_due, look)

    def _may_be_computed_again(self, watch: Watch) -> bool:
        """Once a backward has run, calls without hooks count no more: perhaps their gradients are never asked for."""
        return watch.has_hooks or not self._backward_ran

    def begin_backward(self, watch: Watch) -> bool:
        """Whether that call is to look at its gradients: one of those that could."""
        self._open.discard(watch)
        self._backward_ran = True
        looks = watch.notes and self._gradients_due and self.trouble is None
        self._gradients_due &= not looks
        return looks

    def judge(self, what: str, error: float, bound: float) -> None:
        if error > bound and self.trouble is None:
            self.trouble = f"in a sample of {what} int16 was off by {error:.1e} of the result, bf16 by less"
            logger.warning("a layer's products return to fp32: %s", self.trouble)


def _saved_tensors_have_hooks() -> bool:
    """As inside a checkpoint that isn't reentrant: it saves nothing, and computes it again."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


@dataclass(eq=False)
class Watch:
    """What a guard wants to see of one call; without a guard, nothing."""

    guard: Guard | None = None
    is_int16: bool = True
    looks: bool = False  # at the products that come now: the forward's, then the gradients'
    notes: bool = False  # what a look at its gradients would need
    look: int = 0  # the number of the look, from which the places follow
    has_hooks: bool = False
    _in_backward: bool = False
    # Columns of inputs of which only the packed form is saved: a look at the weight's gradient needs them. Copies of a
    # few columns, now and then; not part of the graph. A backward uses inputs in the reverse order of their noting.
    _columns: list[Tensor] = field(default_factory=list)

    def begin_backward(self) -> None:
        """To be called with every gradient of an output; the first is the beginning."""
        if self.guard is not None and not self._in_backward:
            self._in_backward = True
            self.looks = self.notes = self.guard.begin_backward(self)

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
        assert self.guard is not None
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            self.guard.judge(what, *sampled_error(left.detach(), right.detach()))
