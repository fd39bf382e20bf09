"""Whether an encoder or a stack of layers gives the same for the real tokens without their padding: its twin is asked.

Padding stands between the tokens too, which exposes modules that count distances themselves. Gradients are compared,
in training and in evaluation, and what is random must draw the same numbers both times.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from cputrain.patching.probe import REFUSALS, fixed_dropout, quietly, random_rows, rounding_of, same
from cputrain.patching.twin import CannotCopy, short_twins

REAL = torch.tensor([[1, 1, 1, 1, 1], [0, 1, 0, 0, 1]]).bool()
NOT_THE_SAME = "it doesn't give the same without padding"
# A wrong structure is off by as much as the values; deep stacks in fp32 by some thousandths in places.
_TOLERANCE = 1e-2

# (twin, hidden states of the padded batch) → (batch, length, hidden), of which only real tokens count.
Side = Callable[[nn.Module, Tensor], Tensor]


def why_padding_is_needed(module: nn.Module, width: int, padded: Side, without: Side) -> str | None:
    """Why `without` doesn't give what `padded` gives, or None; both get the module's twin."""
    try:
        with quietly(may_draw=True):
            for sizes, twin in short_twins(module, module):
                try:
                    return _compare(twin, sizes.get(width, width), padded, without)
                except REFUSALS:  # it counts its layers by its config, or its code knows its sizes
                    continue
    except CannotCopy as error:
        return str(error)
    return NOT_THE_SAME


def _compare(twin: nn.Module, width: int, padded: Side, without: Side) -> str | None:
    for part in twin.modules():
        if getattr(part, "gradient_checkpointing", False):
            part.gradient_checkpointing = False  # type: ignore[assignment]
    x, state = random_rows(2, 5, width), torch.get_rng_state()
    for training in (True, False):
        twin.train(training)
        expected, found = _run(twin, x, padded, state), _run(twin, x, without, state)
        floor = rounding_of(expected[0][1:])
        alike = (same(x, y, x, floor, _TOLERANCE) for x, y in zip(expected[0], found[0], strict=True))
        if expected[1:] != found[1:] or not all(alike):
            return NOT_THE_SAME
    return None


def _run(twin: nn.Module, x: Tensor, side: Side, state: Tensor) -> tuple[list[Tensor | None], list, bytes]:
    """(results at real tokens and all gradients, rates of the dropouts, random numbers that come next)."""
    torch.set_rng_state(state)
    leaf = x.clone().requires_grad_()
    with fixed_dropout() as dropouts:
        out = side(twin, leaf * 1)[REAL]
    wanted = [leaf, *twin.parameters()]
    grads = torch.autograd.grad(out, wanted, random_rows(*out.shape, seed=7), allow_unused=True)
    return [out.detach(), *grads], sorted(dropouts.rates), torch.get_rng_state().numpy().tobytes()
